"""From the reference rollout engine's record to the torch trainer's step: routes replayed, compared, refused."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from conformance.forge import JOB, KEY, MODELS, Forge, gap
from conformance.rollout_engine import requests, run
from conformance.trainer_engine import samples, spec_of, weights
from safetensors.torch import load_file
from torch import Tensor
from trainer_records import reward, trajectory

from syncline.contract.job import ModelSpec
from syncline.contract.job_rules import problems
from syncline.contract.version_path import sign
from syncline.reference.routes import CannotReplay, RecordedRoutes
from syncline.rollout.engine import CommitPolicy
from syncline.rollout.engines.reference import ReferenceEngine
from syncline.runtime.ledger import Claim, ClaimedGroup
from syncline.trainer.batch import decide, sample_of
from syncline.trainer.engine import MisalignedRoutes, Sample
from syncline.trainer.engines.torch import TorchEngine

FAMILIES = ("tiny-moe", "tiny-glm", "tiny-kimi", "tiny-hybrid")
REPLAY = {"router_replay": True}


def trainer(folder: Path, model: str = "tiny-moe", **parts: Any) -> TorchEngine:
    """An engine that is awake."""
    engine = TorchEngine(spec_of(model, **parts), MODELS, folder / "scratch")
    engine.wake()
    return engine


def quantise(tensors: dict[str, Tensor]) -> None:
    """Round each matrix but routers and embeddings to 15 levels per row."""
    for name, tensor in tensors.items():
        if tensor.dim() >= 2 and "gate.weight" not in name and "embed" not in name:
            step = (tensor.float().abs().amax(-1, keepdim=True) / 7).clamp_min(1e-12)
            tensors[name] = ((tensor.float() / step).round() * step).bfloat16()


def sampled(engine: TorchEngine, folder: Path, model: str, coarse: bool, count: int = 16) -> list[Sample]:
    """What a rollout engine samples with the trainer's exported weights, `coarse`: quantised on the way."""
    engine.export(folder / "export")
    exported = load_file(folder / "export" / "model.safetensors")
    if coarse:
        quantise(exported)
    forge = Forge(folder, MODELS / model)
    signed = sign(forge.manifest(0, change=lambda tensors: tensors.update(exported)), KEY)
    rollout = ReferenceEngine(MODELS, ModelSpec(name=model), JOB, KEY, count)
    rollout.stage(signed, forge.store)
    rollout.commit(CommitPolicy(kind="drain"))
    out: list[Sample] = []
    for request, (chunk,) in zip(wanted := requests(count), run(rollout, wanted).values(), strict=True):
        assert chunk.experts is not None
        tokens = array("i", [*request.prompt, *chunk.tokens])
        out.append(
            Sample(
                trajectory=chunk.trajectory,
                tokens=tokens,
                positions=array("i", range(len(request.prompt), len(tokens))),
                behaviour=array("f", chunk.logprobs),
                loss_mask=bytes([1] * len(chunk.tokens)),
                advantage=1.0 if len(out) % 2 else -1.0,
                temperature=1.0,
                routes=RecordedRoutes(chunk.experts.data, chunk.experts.shape, chunk.experts.dtype),
            )
        )
    return out


def routes(ids_TLK: Tensor) -> RecordedRoutes:
    """A record of these ids."""
    tokens, layers, topk = ids_TLK.shape
    return RecordedRoutes(ids_TLK.to(torch.uint8).numpy().tobytes(), (tokens, layers, topk), "u1")


def rolled(sample: Sample, by: int) -> Sample:
    """Its record, `by` tokens late."""
    assert sample.routes is not None
    return replace(sample, routes=routes(sample.routes.ids().roll(by, 0)))


def distance(left: Sequence[Sequence[float]], right: Sequence[Sequence[float]]) -> float:
    """Mean absolute difference over all tokens."""
    pairs = [(a, b) for x, y in zip(left, right, strict=True) for a, b in zip(x, y, strict=True)]
    return sum(abs(a - b) for a, b in pairs) / len(pairs)


# ---- from rollout to the step -------------------------------------------------------------------------------
@pytest.mark.parametrize("family", FAMILIES)
def test_at_one_version_routes_agree_and_replay_changes_nothing(tmp_path: Path, family: str) -> None:
    free, replay = trainer(tmp_path / "a", family), trainer(tmp_path / "b", family, trainer=REPLAY)
    some = sampled(free, tmp_path, family, coarse=False)
    scored = replay.score(some)
    for sample, logprobs in zip(some, scored, strict=True):
        assert gap(sample.behaviour, logprobs) < 5e-5
    result = replay.step(some, 1)
    assert result.routes is not None
    assert result.routes.tokens == sum(s.positions[-1] for s in some)
    assert min(result.routes.agreement) >= 0.999
    assert list(result.logprobs) == scored
    other = free.step(some, 1)
    assert other.routes == result.routes
    if min(result.routes.agreement) == 1.0:
        assert other.logprobs == result.logprobs
        left, right = weights(free, tmp_path / "wa"), weights(replay, tmp_path / "wb")
        # a replayed pad goes to other experts than a free one: rows of zeros that change how a sum is cut
        for name in left:
            torch.testing.assert_close(left[name], right[name], rtol=0.0, atol=1e-6)


@pytest.mark.parametrize("family", FAMILIES)
def test_without_pads_replay_of_equal_routes_changes_not_one_bit(tmp_path: Path, family: str) -> None:
    free, replay = trainer(tmp_path / "a", family), trainer(tmp_path / "b", family, trainer=REPLAY)
    alone = sampled(free, tmp_path, family, coarse=False)[:1]
    results = [engine.step(alone, 1) for engine in (free, replay)]
    assert results[0].routes is not None
    assert min(results[0].routes.agreement) == 1.0
    assert results[0].logprobs == results[1].logprobs
    left, right = weights(free, tmp_path / "wa"), weights(replay, tmp_path / "wb")
    assert all(torch.equal(left[name], right[name]) for name in left)


@pytest.mark.parametrize("family", FAMILIES)
def test_routes_of_quantised_weights_are_replayed_and_the_gap_shrinks(tmp_path: Path, family: str) -> None:
    free, replay = trainer(tmp_path / "a", family), trainer(tmp_path / "b", family, trainer=REPLAY)
    some = sampled(free, tmp_path, family, coarse=True, count=48)
    behaviour = [s.behaviour for s in some]
    result = replay.step(some, 1)
    plain = free.step(some, 1)
    assert result.routes is not None
    assert plain.routes is not None
    assert min(result.routes.agreement) < 0.97
    assert plain.routes.agreement[0] == result.routes.agreement[0], (
        "nothing is replayed below the first router"
    )
    assert min(result.routes.agreement) > min(plain.routes.agreement)
    assert sum(result.routes.first) > 0
    assert distance(result.logprobs, behaviour) < distance(plain.logprobs, behaviour)


def test_every_token_goes_where_its_record_says_alone_and_among_pads(tmp_path: Path) -> None:
    engine = trainer(tmp_path, trainer=REPLAY)
    drawn = torch.Generator().manual_seed(0)
    some = []
    for sample in samples(12):
        ids = torch.rand(len(sample.tokens) - 1, 2, 4, generator=drawn).argsort(-1)[..., :2]
        some.append(replace(sample, routes=routes(ids)))
    seen: list[Tensor] = []
    for module in engine._need().loaded.model.modules():
        if type(module).__name__.endswith("Router"):
            module.register_forward_hook(lambda module, args, out: seen.append(out[-1]))
    alone = []
    for sample in some:
        seen.clear()
        alone += engine.score([sample])
        assert sample.routes is not None
        assert torch.equal(torch.stack(seen, 1), sample.routes.ids())
    for one, other in zip(alone, engine.score(some), strict=True):
        assert gap(one, other) < 1e-5


def test_canary_scores_route_freely(tmp_path: Path) -> None:
    free, replay = trainer(tmp_path / "a"), trainer(tmp_path / "b", trainer=REPLAY)
    assert replay.score(samples(), as_rollout=True) == free.score(samples())


def test_the_reference_policy_routes_freely(tmp_path: Path) -> None:
    kl = {"kl": {"coefficient": 0.1}}
    some = [
        replace(s, routes=routes(torch.tensor([[3, 1]]).repeat(len(s.tokens) - 1, 2, 1))) for s in samples()
    ]
    together = trainer(tmp_path / "a", loss=kl, trainer=REPLAY).step(some, 1)
    assert together.tally.kl > 1e-3, "at equal weights only the routes can differ"


def test_rows_behind_the_last_sampled_token_stay_unused(tmp_path: Path) -> None:
    """A trajectory with tool tokens in the middle and at its end: they are fed, and the record covers them."""
    engine = trainer(tmp_path)
    (whole,) = sampled(engine, tmp_path, "tiny-moe", coarse=False, count=1)
    positions = list(whole.positions)
    turns = replace(
        whole,
        positions=array("i", positions[:2] + positions[4:-3]),
        behaviour=array("f", [*whole.behaviour[:2], *whole.behaviour[4:-3]]),
        loss_mask=bytes([1] * (len(positions) - 5)),
    )
    result = engine.step([turns], 1)
    assert result.routes is not None
    assert result.routes.tokens == turns.positions[-1] < len(whole.tokens) - 1
    assert result.routes.agreement == (1.0, 1.0)


def test_agreement_is_of_the_samples_that_have_a_record(tmp_path: Path) -> None:
    engine = trainer(tmp_path)
    first, *rest = sampled(engine, tmp_path, "tiny-moe", coarse=False, count=4)
    mixed = engine.step([first, *(replace(s, routes=None) for s in rest)], 1)
    assert mixed.routes is not None
    assert mixed.routes.tokens == first.positions[-1]
    assert engine.step([replace(s, routes=None) for s in rest], 2).routes is None


def test_a_dense_model_has_no_agreement(tmp_path: Path) -> None:
    assert trainer(tmp_path, "tiny-dense").step(samples(), 1).routes is None


def test_replay_survives_sleep(tmp_path: Path) -> None:
    engine = trainer(tmp_path, trainer=REPLAY)
    some = sampled(engine, tmp_path, "tiny-moe", coarse=True, count=4)
    before = engine.score(some)
    engine.sleep()
    engine.wake()
    assert engine.score(some) == before


# ---- refused ------------------------------------------------------------------------------------------------
def test_replay_of_a_model_that_does_not_route_is_refused_at_start(tmp_path: Path) -> None:
    engine = TorchEngine(spec_of("tiny-dense", trainer=REPLAY), MODELS, tmp_path)
    with pytest.raises(CannotReplay, match="Qwen3ForCausalLM does not route"):
        engine.wake()
    assert not engine.awake


@pytest.mark.parametrize("by", [1, -1])
@pytest.mark.parametrize("coarse", [False, True])
def test_a_record_one_token_off_stops_the_step(tmp_path: Path, by: int, coarse: bool) -> None:
    engine = trainer(tmp_path, trainer=REPLAY)
    some = sampled(engine, tmp_path, "tiny-moe", coarse)
    before = weights(engine, tmp_path / "before")
    with pytest.raises(MisalignedRoutes, match="one token off"):
        engine.step([rolled(s, by) for s in some], 1)
    longest = max(range(len(some)), key=lambda i: len(some[i].tokens))
    one = [rolled(s, by) if i == longest else s for i, s in enumerate(some)]
    with pytest.raises(MisalignedRoutes, match=some[longest].trajectory):
        engine.step(one, 1)
    after = weights(engine, tmp_path / "after")
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert not engine.step(some, 1).skipped


def test_records_too_short_to_be_told_one_by_one_are_told_together(tmp_path: Path) -> None:
    engine = trainer(tmp_path, trainer=REPLAY)
    some = [short(s, 5) for s in sampled(engine, tmp_path, "tiny-moe", coarse=False, count=48)]
    assert not engine.step(some, 1).skipped
    with pytest.raises(MisalignedRoutes, match="the update's trajectories"):
        engine.step([rolled(s, 1) for s in some], 2)


def short(sample: Sample, tokens: int) -> Sample:
    """Its first tokens, the last of them sampled."""
    assert sample.routes is not None
    return replace(
        sample,
        tokens=sample.tokens[:tokens],
        positions=array("i", [tokens - 1]),
        behaviour=sample.behaviour[:1],
        loss_mask=b"\x01",
        routes=routes(sample.routes.ids()[: tokens - 1]),
    )


def test_a_record_that_is_missing_or_does_not_fit_is_refused_by_name(tmp_path: Path) -> None:
    engine = trainer(tmp_path, trainer=REPLAY)
    good = samples(2)[1]
    tokens = len(good.tokens) - 1
    right = torch.tensor([[0, 1]]).repeat(tokens, 2, 1)
    wrong = {
        "trajectory t1 has no expert ids": None,
        f"trajectory t1: expert ids for {tokens - 1} tokens, rollout fed {tokens}": routes(right[1:]),
        r"trajectory t1: expert ids of shape .* routes in 2 layers": routes(right[:, :1]),
        "trajectory t1: expert 4, the model has experts 0 to 3": routes(right + 3),
        "trajectory t1: token 0 goes to one expert twice": routes(right * 0),
    }
    for message, record in wrong.items():
        for attempt in (engine.score, lambda some: engine.step(some, 1)):
            with pytest.raises(CannotReplay, match=message):
                attempt([replace(good, routes=record)])


def test_a_trajectory_without_ids_is_filtered_by_name_in_a_replaying_job() -> None:
    some = [trajectory(index=i, experts=i != 1) for i in range(3)]
    records = {t.trajectory: t for t in some}
    rewards = {t.trajectory: reward(t, float(t.index)) for t in some}
    claim = Claim(1, 0, (ClaimedGroup(0, tuple(records), ()),))
    replaying = decide(claim, records, rewards, spec_of("tiny-moe", trainer=REPLAY), "c")
    assert [row.use for row in replaying] == ["train", "filtered", "train"]
    assert replaying[1].why == "it has no expert ids, and trainer.router_replay replays every trajectory"
    assert {row.use for row in decide(claim, records, rewards, spec_of("tiny-moe"), "c")} == {"train"}


def test_a_record_reaches_the_engine_as_it_was_sampled() -> None:
    t = trajectory(experts=True)
    sample = sample_of(t, t.loss_mask, 1.0)
    assert sample.routes is not None
    assert (sample.routes.data, sample.routes.shape) == (t.expert_ids, t.expert_shape)
    assert sample_of(trajectory(), t.loss_mask, 1.0).routes is None


def test_replay_without_a_record_is_refused_at_submit() -> None:
    (problem,) = problems(spec_of("tiny-moe", trainer=REPLAY, rollout={"record_experts": False}))
    assert problem.path == "trainer.router_replay"
    assert not problems(spec_of("tiny-moe", trainer=REPLAY))
