"""The arrays of a decode batch: each row's own random numbers in their order, and what it may not look at."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from syncline.contract.version_path import VersionId
from syncline.rollout.engine import Request, Sampling
from syncline.rollout.engines.hidden import Hidden
from syncline.rollout.engines.rows import Row, RowTable
from syncline.rollout.engines.sampling import UNIFORMS, Draws


def row(name: str, seed: int, min_tokens: int = 0) -> Row:
    sampling = Sampling(max_tokens=2000, min_tokens=min_tokens)
    request = Request(trajectory=name, prompt=(1, 2), seed=(seed,), sampling=sampling)
    return Row(request=request, kv=VersionId(0, 0), wall=0.0, started=0.0, prefill=0.0)


def numbers(seed: int, count: int) -> list[float]:
    """What a request of this seed draws when it is alone."""
    draws, drawn = Draws((seed,)), list[float]()
    while len(drawn) < count:
        drawn += draws.uniforms().tolist()
    return drawn[:count]


def test_each_row_gets_its_own_numbers_whoever_joins_and_leaves() -> None:
    """Rows of unlike age, past several refills; one leaves and the last takes its place."""
    table = RowTable(4)
    seeds = {"a": 1, "b": 2, "c": 3, "d": 4}
    taken: dict[str, list[float]] = {name: [] for name in seeds}

    def sample(first: int) -> None:
        end = len(table.rows)
        table.refill_uniforms(first, end)
        for i, number in enumerate(table.uniforms_now(first, end)):
            taken[table.rows[first + i].request.trajectory].append(float(number))
        table.record(first, end, np.zeros(end - first, np.int64), np.zeros(end - first, np.float32))

    def join(name: str) -> None:
        table.add(row(name, seeds[name]), 2)
        sample(len(table.rows) - 1)

    joins = {0: "a", 100: "b", UNIFORMS - 1: "c", UNIFORMS + 40: "d"}
    for step in range(3 * UNIFORMS):
        if step in joins:
            join(joins[step])
        if step == 2 * UNIFORMS + 7:
            table.drop(1)
        sample(0)
    assert [r.request.trajectory for r in table.rows] == ["a", "d", "c"]
    for name, got in taken.items():
        assert len(got) > UNIFORMS
        assert got == numbers(seeds[name], len(got)), name


def test_a_draw_sees_what_a_row_asked_for_after_others_left() -> None:
    table = RowTable(3)
    for i, temperature in enumerate((0.5, 1.0, 2.0)):
        made = row(str(i), i)
        sampling = Sampling(temperature=temperature, top_k=i, top_p=1 - 0.1 * i, max_tokens=9)
        made.request = Request(trajectory=str(i), prompt=(1,), seed=(i,), sampling=sampling)
        table.add(made, 1)
    table.drop(0)
    cuts = table.cuts(0, 2)
    assert cuts.temperature[:, 0].tolist() == [2.0, 1.0]
    assert cuts.top_k[:, 0].tolist() == [2, 1]
    assert cuts.top_p[:, 0].tolist() == pytest.approx([0.8, 0.9])


def test_stop_tokens_are_suppressed_row_by_row() -> None:
    table = RowTable(3)
    table.add(row("a", 1, min_tokens=2), 2)
    assert table.suppressed(0, 1) is True
    table.record(0, 1, np.zeros(1, np.int64), np.zeros(1, np.float32))
    table.record(0, 1, np.zeros(1, np.int64), np.zeros(1, np.float32))
    assert table.suppressed(0, 1) is False
    table.add(row("b", 2, min_tokens=1), 2)
    some = table.suppressed(0, 2)
    assert isinstance(some, torch.Tensor)
    assert some.tolist() == [False, True]


def test_hidden_columns_are_those_before_a_row_s_start() -> None:
    """Whatever was asked before: the same starts with more columns than were made, other starts, fewer rows."""
    hidden = Hidden(heads=2)
    asked = [([3, 0], columns) for columns in range(5, 200)]
    asked += [([2, 0], 9), ([3, 0, 1], 9), ([3, 0], 9), ([0, 4], 7), ([4], 6)]
    for starts, columns in asked:
        bias = hidden.bias(np.array(starts), columns)
        assert bias is not None
        wanted = [
            [-np.inf if c < start else 0.0 for c in range(columns)] for start in starts for _ in range(2)
        ]
        assert bias[:, 0].tolist() == wanted
    assert hidden.bias(np.zeros(3, np.int64), 8) is None
