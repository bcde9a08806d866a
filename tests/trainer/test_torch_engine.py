"""The torch engine passes the suite, gives its memory back, and packs without waste."""

from __future__ import annotations

import subprocess
import sys
from itertools import combinations, pairwise
from pathlib import Path

import pytest
import torch
from conformance.trainer_engine import MODELS, MakeEngine, TrainerEngineSuite, samples, spec_of
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from syncline.contract.job import JobSpec
from syncline.reference.model import load_model
from syncline.trainer.engine import TrainerEngine
from syncline.trainer.engines.forward import rows_of, sampled_logprobs
from syncline.trainer.engines.torch import TorchEngine
from syncline.trainer.pack import micro_batches, padding_share


class TestTorchEngine(TrainerEngineSuite):
    """The conformance suite."""

    @pytest.fixture
    def make(self, tmp_path: Path) -> MakeEngine:
        made = 0

        def build(spec: JobSpec) -> TrainerEngine:
            nonlocal made
            made += 1
            return TorchEngine(spec, MODELS, tmp_path / f"scratch{made}")

        return build

    def test_a_dead_process_s_sleep_is_not_woken(self, tmp_path: Path) -> None:
        first = TorchEngine(spec_of(), MODELS, tmp_path / "scratch")
        first.wake()
        first.sleep()
        assert any((tmp_path / "scratch").iterdir())
        second = TorchEngine(spec_of(), MODELS, tmp_path / "scratch")
        second.wake()
        assert not (tmp_path / "scratch").exists()


SLEEPER = """
import sys
from pathlib import Path
import psutil
from conformance.trainer_engine import MODELS, samples, spec_of
from syncline.trainer.engines.torch import TorchEngine
engine = TorchEngine(spec_of(sys.argv[2]), MODELS, Path(sys.argv[1]))
size = lambda: psutil.Process().memory_info().rss
baseline = size()
for turn in range(3):
    engine.wake()
    engine.step(samples(32), turn + 1)
    engine.sleep()
print(size() / baseline)
"""


@pytest.mark.parametrize("model", ["tiny-dense", "tiny-moe"])
def test_sleep_returns_memory_to_within_a_tenth_of_the_baseline(tmp_path: Path, model: str) -> None:
    tests = Path(__file__).parents[1]
    done = subprocess.run(
        [sys.executable, "-c", SLEEPER, str(tmp_path / "scratch"), model],
        cwd=tests,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) < 1.1


@given(st.lists(st.integers(1, 60), max_size=40), st.integers(1, 200), st.sampled_from([None, 1, 20, 1000]))
def test_every_sequence_is_in_one_micro_batch_within_its_bound(
    lengths: list[int], bound: int, pass_cells: int | None
) -> None:
    batches = micro_batches(lengths, bound, pass_cells)
    assert sorted(i for batch in batches for i in batch) == list(range(len(lengths)))
    for batch in batches:
        width = max(lengths[i] for i in batch)
        assert len(batch) * width <= bound or len(batch) == 1


def test_even_lengths_waste_nothing_and_uneven_ones_little() -> None:
    assert padding_share([7] * 30, micro_batches([7] * 30, 70)) == 0.0
    uneven = [1, 50] * 20
    assert padding_share(uneven, micro_batches(uneven, 500)) < 0.05
    assert padding_share(uneven, [list(range(40))]) > 0.4


@given(st.lists(st.integers(1, 60), min_size=1, max_size=9), st.integers(60, 400), st.integers(1, 300))
def test_rectangles_are_the_cheapest_ways_to_cut_the_lengths(
    lengths: list[int], bound: int, pass_cells: int
) -> None:
    """Against every way to cut the sorted lengths; rows of one length are never cut but where a rectangle is full."""

    def cost(batches: list[list[int]]) -> int:
        return sum(len(b) * max(lengths[i] for i in b) + pass_cells for b in batches)

    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    places = range(1, len(order))
    least = min(
        cost([order[i:j] for i, j in pairwise((0, *cuts, len(order)))])
        for count in range(len(order))
        for cuts in combinations(places, count)
        if all(len(order[i:j]) * lengths[order[i]] <= bound for i, j in pairwise((0, *cuts, len(order))))
    )
    found = cost(micro_batches(lengths, bound, pass_cells))
    assert found >= least
    if sum(lengths) + max(lengths) * len(lengths) < bound:  # one rectangle holds all: only padding decides
        assert found == least


def test_short_rows_are_not_padded_beside_a_long_one() -> None:
    lengths = [190, *range(20, 80)]
    together, apart = micro_batches(lengths, 16384), micro_batches(lengths, 16384, 256)
    assert len(together) == 1
    assert padding_share(lengths, together) > 0.7
    assert 1 < len(apart) < 8
    assert padding_share(lengths, apart) < 0.2


def test_log_probs_and_entropy_of_sampled_tokens_are_those_of_torch() -> None:
    """Values and gradients, against log-softmax of all positions; the head of the model sees sampled ones alone."""
    model = load_model(MODELS, spec_of().model, 0).model
    rows = rows_of(samples(5, temperature=0.7), torch.device("cpu"))
    seen: list[tuple[int, ...]] = []
    head = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    handle = head.register_forward_hook(lambda m, i, out: seen.append(tuple(out.shape)))
    found: list[list[Tensor]] = []
    for entropy_gradient in (False, True):
        model.zero_grad()
        logprobs_N, entropy_N = sampled_logprobs(model, rows, entropy_gradient)
        logprobs_N.square().sum().backward()  # type: ignore[no-untyped-call]
        found.append([logprobs_N, entropy_N, *(p.grad for p in model.parameters() if p.grad is not None)])
        assert entropy_N.requires_grad is entropy_gradient
    handle.remove()
    assert seen == [(1, len(rows.target_N), 100)] * 2
    model.zero_grad()
    logits_BTV = model(input_ids=rows.ids_BT, attention_mask=rows.mask_BT, use_cache=False).logits
    all_BTV = torch.log_softmax(logits_BTV / 0.7, dim=-1)
    plain_NV = all_BTV[rows.row_N, rows.column_N]
    plain_N = plain_NV.gather(1, rows.target_N[:, None])[:, 0]
    plain_N.square().sum().backward()  # type: ignore[no-untyped-call]
    expected = [plain_N, -(plain_NV.exp() * plain_NV).sum(-1)]
    expected += [p.grad for p in model.parameters() if p.grad is not None]
    for mine in found:
        assert len(mine) == len(expected)
        for one, other in zip(mine, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
