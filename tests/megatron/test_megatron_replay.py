"""Prescribed routes in Megatron's forward pass, and layers that the backward pass runs again."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from conformance.trainer_engine import MODELS, changed, distance, samples, spec_of, widest
from torch import Tensor

pytest.importorskip("megatron.core", reason="the extra `megatron` is not installed")

from ranked import FP32, TOPOLOGIES, end_followers, exported, same_bytes, spec

from syncline.reference.routes import CannotReplay, RecordedRoutes
from syncline.trainer.engine import MisalignedRoutes, Sample
from syncline.trainer.engines.megatron import ranks
from syncline.trainer.engines.megatron.engine import MegatronEngine
from syncline.trainer.engines.torch import TorchEngine

LAYERS, EXPERTS, TOPK = 2, 4, 2
"""Of tiny-moe."""
REPLAY = {"router_replay": True}
ON_TP2 = pytest.mark.parametrize("topology", ["tp2"], scope="module")
"""Tests of one topology stand together, so that ranks are started once for them."""


@pytest.fixture(autouse=True, scope="module")
def no_followers_left() -> Iterator[None]:
    yield
    end_followers()


def record(ids_TLK: Tensor) -> RecordedRoutes:
    tokens, layers, topk = ids_TLK.shape
    return RecordedRoutes(ids_TLK.to(torch.uint8).numpy().tobytes(), (tokens, layers, topk), "u1")


def routed(
    some: list[Sample], experts: tuple[int, ...] = tuple(range(EXPERTS)), seed: int = 3
) -> list[Sample]:
    """The samples with random routes among `experts`, which no router would have chosen."""
    r = random.Random(seed)
    out = []
    for s in some:
        ids = [[r.sample(experts, TOPK) for _ in range(LAYERS)] for _ in range(len(s.tokens) - 1)]
        out.append(changed(s, routes=record(torch.tensor(ids))))
    return out


def engine(folder: Path, topology: str, **trainer: Any) -> MegatronEngine:
    made = MegatronEngine(spec(TOPOLOGIES[topology], trainer=trainer, **FP32), MODELS, folder)
    made.wake()
    return made


@pytest.mark.parametrize("topology", TOPOLOGIES, scope="module")
def test_prescribed_routes_are_taken_exactly(topology: str, tmp_path: Path) -> None:
    """Judged by the torch engine under the same record: other routes would score and step far away."""
    some = routed(samples())
    mine = engine(tmp_path / "m", topology, **REPLAY)
    theirs = TorchEngine(spec_of("tiny-moe", trainer=REPLAY, **FP32), MODELS, tmp_path / "t")
    theirs.wake()
    free = TorchEngine(spec_of("tiny-moe", **FP32), MODELS, tmp_path / "f")
    free.wake()
    scores = mine.score(some)
    assert widest(scores, theirs.score(some)) < 1e-5
    assert widest(scores, free.score(some)) > 1e-2
    assert widest(mine.score(some, as_rollout=True), theirs.score(some, as_rollout=True)) < 1e-5
    one, two = mine.step(some, 1), theirs.step(some, 1)
    assert one.routes == two.routes
    assert one.routes is not None
    assert max(one.routes.agreement) < 0.9, "the record is not what the router would choose"
    assert distance(exported(mine, tmp_path / "m1"), exported(theirs, tmp_path / "t1")) < 1e-6


@ON_TP2
def test_only_prescribed_experts_learn(topology: str, tmp_path: Path) -> None:
    some = routed(samples(), experts=(0, 3))
    made = engine(tmp_path / "m", topology, **REPLAY)
    before = exported(made, tmp_path / "a")
    made.step(some, 1)
    after = exported(made, tmp_path / "b")
    moved = {name for name in before if ".experts." in name and not torch.equal(before[name], after[name])}
    assert {int(name.split(".experts.")[1].split(".")[0]) for name in moved} == {0, 3}
    routers = [name for name in before if name.endswith("mlp.gate.weight")]
    assert all(not torch.equal(before[name], after[name]) for name in routers)


def whole(some: list[Sample], free: Sequence[Tensor] | None) -> list[Tensor]:
    """Routes of every token that rollout fed, of those that the trainer feeds: the last row stands for the rest."""
    assert free is not None
    return [
        torch.cat([f, f[-1:].expand(len(s.tokens) - 1 - len(f), -1, -1)])
        for s, f in zip(some, free, strict=True)
    ]


@ON_TP2
def test_its_own_free_routes_replayed_change_no_bit(topology: str, tmp_path: Path) -> None:
    some = samples()
    free, replay = engine(tmp_path / "f", topology), engine(tmp_path / "m", topology, **REPLAY)
    told = [
        changed(s, routes=record(ids))
        for s, ids in zip(some, whole(some, free.free_routes(some)), strict=True)
    ]
    assert widest(replay.score(told), free.score(some)) == 0.0
    result = replay.step(told, 1)
    assert result.routes is not None
    assert min(result.routes.agreement) == 1.0
    free.step(some, 1)
    assert same_bytes(exported(replay, tmp_path / "m1"), exported(free, tmp_path / "f1"))


@ON_TP2
def test_records_that_cannot_be_replayed_are_refused_and_nothing_is_trained(
    topology: str, tmp_path: Path
) -> None:
    made = engine(tmp_path / "m", topology, **REPLAY)
    before = exported(made, tmp_path / "a")
    some = routed(samples())
    assert some[0].routes is not None
    short = changed(some[0], routes=record(some[0].routes.ids()[:-1]))
    twice = changed(some[0], routes=record(torch.zeros(len(some[0].tokens) - 1, LAYERS, TOPK)))
    for bad, why in (
        ([changed(some[0], routes=None), *some[1:]], "t0 has no expert ids"),
        ([short, *some[1:]], "t0: expert ids for"),
        ([twice, *some[1:]], "t0: token 0 goes to one expert twice"),
    ):
        with pytest.raises(CannotReplay, match=why):
            made.step(bad, 1)
    assert same_bytes(before, exported(made, tmp_path / "b"))


@ON_TP2
def test_a_record_of_the_neighbouring_tokens_is_refused(topology: str, tmp_path: Path) -> None:
    made = engine(tmp_path / "m", topology, **REPLAY)
    before = exported(made, tmp_path / "a")
    some = samples(8, longest=60)
    late = [
        changed(s, routes=record(ids.roll(1, 0)))
        for s, ids in zip(some, whole(some, made.free_routes(some)), strict=True)
    ]
    with pytest.raises(MisalignedRoutes, match="one token off"):
        made.step(late, 1)
    assert same_bytes(before, exported(made, tmp_path / "b"))


# ---- recompute ----------------------------------------------------------------------------------------------
@pytest.mark.parametrize("topology", ["tp1", "tp2", "ep2", "pp2"], scope="module")
@pytest.mark.parametrize("replayed", [False, True])
def test_layers_that_run_again_give_the_same_bits(topology: str, replayed: bool, tmp_path: Path) -> None:
    """Several micro-batches, so that a pipeline has more than one pass on its way, and scores between, without a way
    back.
    """
    some = routed(samples(8)) if replayed else samples(8)
    ends = []
    for recompute in ("none", "layers"):
        made = MegatronEngine(
            spec(
                TOPOLOGIES[topology],
                trainer={"router_replay": replayed, "recompute": recompute},
                batch={"micro_tokens": 40},
                loss={"kl": {"coefficient": 0.1}},
                **FP32,
            ),
            MODELS,
            tmp_path / recompute,
        )
        made.wake()
        results = []
        for update in (1, 2):
            made.score(some)
            results.append(made.step(some, update))
        ends.append((results, exported(made, tmp_path / f"{recompute}1")))
    (plain, left), (again, right) = ends
    assert [r.logprobs for r in plain] == [r.logprobs for r in again]
    assert [r.grad_norm for r in plain] == [r.grad_norm for r in again]
    assert same_bytes(left, right)


def test_layers_do_run_again(tmp_path: Path) -> None:
    made = MegatronEngine(spec({}, trainer={"recompute": "layers"}), MODELS, tmp_path / "m")
    made.wake()
    awake: Any = ranks._current[0]._seat._engines[made._number].need()
    runs: list[bool] = []
    awake.model.decoder.layers[0].register_forward_hook(lambda *_: runs.append(torch.is_grad_enabled()))
    made.step(samples(), 1)
    assert runs == [False, True]
    runs.clear()
    made.score(samples())
    assert runs == [False]
