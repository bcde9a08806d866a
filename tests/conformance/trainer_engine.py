"""What every trainer engine must do. An engine's own test file subclasses `TrainerEngineSuite` and gives `make`.

The judge is plain `transformers`: one row at a time, no padding, weights loaded as a stranger would load them.
"""

from __future__ import annotations

import hashlib
import json
import math
import random
from array import array
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from syncline.contract.job import JobSpec
from syncline.contract.recorded import mask_of
from syncline.trainer.engine import EngineAsleep, Sample, TrainerEngine

MODELS = Path(__file__).parents[2] / "examples" / "models"
MakeEngine = Callable[[JobSpec], TrainerEngine]
FAMILIES = ("tiny-dense", "tiny-moe", "tiny-hybrid")


def spec_of(model: str = "tiny-dense", **parts: Any) -> JobSpec:
    """SGD without clipping, so that weights move by exactly the gradient, unless a test says otherwise."""
    base: dict[str, Any] = {
        "name": "t",
        "model": {"name": model},
        "optimizer": {"name": "sgd", "lr": 0.1, "clip_norm": 1e9},
    }
    for name, part in parts.items():
        base[name] = {**base.get(name, {}), **part}
    return JobSpec.model_validate_json(json.dumps(base))


def samples(count: int = 6, seed: int = 0, temperature: float = 1.0, longest: int = 14) -> list[Sample]:
    """Responses of uneven length; the behaviour log-probs are near those of a fresh model of 100 ids."""
    r = random.Random(seed)
    out = []
    for i in range(count):
        prompt, sampled = r.randint(2, 9), r.randint(1, longest)
        out.append(
            Sample(
                trajectory=f"t{i}",
                tokens=array("i", [r.randrange(3, 100) for _ in range(prompt + sampled)]),
                positions=array("i", range(prompt, prompt + sampled)),
                behaviour=array("f", [-4.6 + 0.1 * r.random() for _ in range(sampled)]),
                loss_mask=bytes([1] * sampled),
                advantage=1.0 if i % 2 else -0.5,
                temperature=temperature,
            )
        )
    return out


def changed(sample: Sample, **fields: Any) -> Sample:
    """The sample with some fields replaced."""
    names = (
        "trajectory",
        "tokens",
        "positions",
        "behaviour",
        "loss_mask",
        "advantage",
        "temperature",
        "routes",
        "mask",
    )
    return Sample(**({name: getattr(sample, name) for name in names} | fields))


def weights(engine: TrainerEngine, folder: Path) -> dict[str, Tensor]:
    """The exported weights, as FP32."""
    engine.export(folder)
    return {name: t.float() for name, t in load_file(folder / "model.safetensors").items()}


def distance(left: dict[str, Tensor], right: dict[str, Tensor]) -> float:
    """Largest absolute difference of two sets of weights."""
    assert left.keys() == right.keys()
    return max(float((left[name] - right[name]).abs().max()) for name in left)


@torch.no_grad()
def stranger(folder: Path, some: Sequence[Sample]) -> list[list[float]]:
    """Log-probs by plain transformers from an exported folder, each sample alone."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()  # type: ignore[no-untyped-call]
    out = []
    for s in some:
        logits_TV = model(torch.tensor([list(s.tokens)])).logits[0] / s.temperature
        for p, support in zip(s.positions, s.mask.supports() if s.mask else (), strict=bool(s.mask)):
            left_V = torch.full_like(logits_TV[p - 1], -torch.inf)
            left_V[list(support)] = logits_TV[p - 1, list(support)]
            logits_TV[p - 1] = left_V
        logprobs_TV = torch.log_softmax(logits_TV, dim=-1)
        out.append([float(logprobs_TV[p - 1, s.tokens[p]]) for p in s.positions])
    return out


def widest(left: Sequence[Sequence[float]], right: Sequence[Sequence[float]]) -> float:
    """Largest absolute difference of two lists of log-probs."""
    return max(abs(a - b) for x, y in zip(left, right, strict=True) for a, b in zip(x, y, strict=True))


class TrainerEngineSuite:
    """Subclasses give the fixture `make`, which builds an engine of a spec, asleep, with a scratch folder."""

    def awake(self, make: MakeEngine, spec: JobSpec) -> TrainerEngine:
        engine = make(spec)
        engine.wake()
        return engine

    # ---- scores -----------------------------------------------------------------------------------------
    @pytest.mark.parametrize("model", FAMILIES)
    @pytest.mark.parametrize("temperature", [1.0, 0.7])
    def test_scores_are_those_of_a_stranger_with_the_exported_weights(
        self, make: MakeEngine, tmp_path: Path, model: str, temperature: float
    ) -> None:
        engine = self.awake(make, spec_of(model))
        engine.step(samples(), 1)
        engine.export(tmp_path / "v")
        some = samples(8, seed=1, temperature=temperature)
        assert widest(engine.score(some), stranger(tmp_path / "v", some)) < 1e-5

    @pytest.mark.parametrize("model", FAMILIES)
    def test_neighbours_change_no_score(self, make: MakeEngine, model: str) -> None:
        engine = self.awake(make, spec_of(model))
        some = samples(7, seed=2, longest=40)
        alone = [engine.score([s])[0] for s in some]
        assert widest(engine.score(some), alone) < 1e-5
        assert widest(engine.score(some[::-1])[::-1], alone) < 1e-5

    def test_a_sampling_mask_is_scored_and_trained_as_what_it_leaves(
        self, make: MakeEngine, tmp_path: Path
    ) -> None:
        engine = self.awake(make, spec_of())
        engine.step(samples(), 1)
        before = weights(engine, tmp_path / "v")
        some, r = samples(6, seed=1, temperature=0.7), random.Random(0)
        cut = [
            changed(s, mask=mask_of([{s.tokens[p], *r.sample(range(100), 9)} for p in s.positions]))
            for s in some
        ]
        mixed = [*cut[:3], *some[3:]]
        assert widest(engine.score(mixed), stranger(tmp_path / "v", mixed)) < 1e-5
        assert widest(engine.score(cut), engine.score(some)) > 0.1
        alone = [changed(s, mask=mask_of([[s.tokens[p]] for p in s.positions])) for s in some]
        result = engine.step(alone, 2)
        assert max(max(row) for row in result.logprobs) == 0
        assert distance(before, weights(engine, tmp_path / "alone")) == 0, "one id has nothing to gain"
        result = engine.step(cut, 3)
        assert widest(result.logprobs, stranger(tmp_path / "v", cut)) < 1e-5
        assert distance(before, weights(engine, tmp_path / "cut")) > 0

    def test_a_mask_of_the_whole_vocabulary_is_none(self, make: MakeEngine, tmp_path: Path) -> None:
        some = samples(4, seed=3)
        whole = [changed(s, mask=mask_of([range(100)] * len(s.positions))) for s in some]
        moved = []
        for name, given in (("none", some), ("whole", whole)):
            engine = self.awake(make, spec_of())
            engine.step(given, 1)
            moved.append(weights(engine, tmp_path / name))
        assert distance(*moved) == 0

    def test_each_sample_has_its_own_temperature(self, make: MakeEngine) -> None:
        engine = self.awake(make, spec_of())
        cool, warm = samples(1, temperature=0.5)[0], samples(1, temperature=2.0)[0]
        together = engine.score([cool, warm])
        assert widest(together, [engine.score([cool])[0], engine.score([warm])[0]]) < 1e-5
        assert widest([together[0]], [together[1]]) > 0.01

    def test_only_sampled_tokens_are_scored_and_tools_are_read(self, make: MakeEngine) -> None:
        engine = self.awake(make, spec_of())
        s = changed(samples(1, longest=1)[0], tokens=array("i", range(10, 22)))
        turns = changed(
            s,
            positions=array("i", [4, 5, 9, 10]),
            behaviour=array("f", [-4.0] * 4),
            loss_mask=bytes([1] * 4),
        )
        whole = changed(
            s,
            positions=array("i", range(4, 11)),
            behaviour=array("f", [-4.0] * 7),
            loss_mask=bytes([1] * 7),
        )
        part, full = engine.score([turns])[0], engine.score([whole])[0]
        assert widest([part], [[full[0], full[1], full[5], full[6]]]) < 1e-5

    # ---- steps ------------------------------------------------------------------------------------------
    def test_a_step_reports_the_scores_before_it(self, make: MakeEngine) -> None:
        engine = self.awake(make, spec_of())
        some = samples()
        before = engine.score(some)
        result = engine.step(some, 1)
        assert list(result.logprobs) == before
        assert engine.score(some) != before
        assert [list(w) for w in result.weights] == [[1.0] * len(s.positions) for s in some]

    def test_a_step_raises_what_was_good_and_lowers_what_was_bad(self, make: MakeEngine) -> None:
        engine = self.awake(make, spec_of(precision={"recipe": "fp32"}, optimizer={"lr": 0.01}))
        some = samples()
        before = [math.fsum(x) for x in engine.score(some)]
        result = engine.step(some, 1)
        after = [math.fsum(x) for x in engine.score(some)]
        gained = math.fsum(s.advantage * (b - a) for s, a, b in zip(some, before, after, strict=True))
        assert result.tally.clipped < result.tally.tokens
        assert gained > 0

    @pytest.mark.parametrize("model", FAMILIES)
    @pytest.mark.parametrize("normaliser", ["token_mean", "sequence_mean"])
    def test_the_step_is_the_same_however_it_is_split(
        self, make: MakeEngine, tmp_path: Path, model: str, normaliser: str
    ) -> None:
        ends = []
        for i, (micro, order) in enumerate([(16384, 1), (40, 1), (1, 1), (40, -1)]):
            spec = spec_of(
                model,
                precision={"recipe": "fp32"},
                batch={"micro_tokens": micro},
                loss={"normaliser": normaliser},
            )
            engine = self.awake(make, spec)
            start = weights(engine, tmp_path / f"start{i}")
            engine.step(samples()[::order], 1)
            ends.append(weights(engine, tmp_path / f"end{i}"))
        moved = distance(start, ends[0])
        assert moved > 1e-4
        for other in ends[1:]:
            assert distance(ends[0], other) < 1e-6 + 1e-5 * moved

    def test_the_same_start_and_batch_give_the_same_bytes(self, make: MakeEngine, tmp_path: Path) -> None:
        digests = []
        for i in range(2):
            engine = self.awake(make, spec_of(optimizer={"name": "adamw", "lr": 0.01}))
            for update in range(1, 4):
                engine.step(samples(seed=update), update)
            digests.append(engine.export(tmp_path / str(i)))
        assert digests[0] == digests[1]

    def test_a_masked_token_is_scored_and_moves_nothing(self, make: MakeEngine, tmp_path: Path) -> None:
        some = [s for s in samples(8) if len(s.positions) > 2]
        halves = [bytes(i % 2 for i in range(len(s.positions))) for s in some]
        masked = [changed(s, loss_mask=m) for s, m in zip(some, halves, strict=True)]
        wild = [
            changed(
                s, behaviour=array("f", [b if on else -50.0 for b, on in zip(s.behaviour, m, strict=True)])
            )
            for s, m in zip(masked, halves, strict=True)
        ]
        digests = []
        for i, batch in enumerate((masked, wild)):
            engine = self.awake(make, spec_of())
            result = engine.step(batch, 1)
            assert [len(x) for x in result.logprobs] == [len(s.positions) for s in some]
            assert [bytes(int(w) for w in x) for x in result.weights] == halves
            assert result.tally.tokens == sum(map(sum, halves))
            digests.append(engine.export(tmp_path / str(i)))
        assert digests[0] == digests[1]

    def test_warm_up_and_clip_scale_the_step(self, make: MakeEngine, tmp_path: Path) -> None:
        moved = {}
        for name, optimizer in (
            ("plain", {}),
            ("warm", {"warmup": 10}),
            ("clipped", {"clip_norm": 1e-3}),
        ):
            engine = self.awake(make, spec_of(precision={"recipe": "fp32"}, optimizer=optimizer))
            start = weights(engine, tmp_path / f"{name}0")
            norm = engine.step(samples(), 1).grad_norm
            end = weights(engine, tmp_path / f"{name}1")
            moved[name] = math.sqrt(sum(float((end[n] - start[n]).square().sum()) for n in start))
        assert norm is not None
        assert moved["plain"] == pytest.approx(0.1 * norm, rel=1e-3)
        assert moved["warm"] == pytest.approx(moved["plain"] / 10, rel=1e-2)
        assert moved["clipped"] == pytest.approx(0.1 * 1e-3, rel=2e-2)

    @pytest.mark.parametrize("bad", [math.nan, math.inf])
    def test_what_is_not_finite_is_named_and_the_step_skipped(
        self, make: MakeEngine, tmp_path: Path, bad: float
    ) -> None:
        engine = self.awake(make, spec_of(optimizer={"name": "adamw", "lr": 0.01}))
        engine.step(samples(), 1)
        before = engine.export(tmp_path / "before")
        some = samples()
        result = engine.step([changed(some[0], advantage=bad), *some[1:]], 2)
        assert result.skipped
        assert "loss" in result.non_finite
        assert any(name.startswith("gradient of ") for name in result.non_finite)
        assert engine.export(tmp_path / "after") == before
        assert not engine.step(some, 3).skipped
        assert engine.export(tmp_path / "later") != before

    def test_a_step_on_nothing_is_skipped(self, make: MakeEngine, tmp_path: Path) -> None:
        engine = self.awake(make, spec_of())
        before = engine.export(tmp_path / "before")
        assert engine.step([], 1).skipped
        blank = [changed(s, loss_mask=bytes(len(s.positions))) for s in samples()]
        result = engine.step(blank, 2)
        assert result.skipped
        assert result.loss is None
        assert [len(x) for x in result.logprobs] == [len(s.positions) for s in blank]
        assert engine.export(tmp_path / "after") == before

    def test_the_reference_policy_is_the_initial_one(self, make: MakeEngine) -> None:
        engine = self.awake(make, spec_of(loss={"kl": {"coefficient": 0.01}}, optimizer={"lr": 1.0}))
        some = samples()
        assert engine.step(some, 1).tally.kl == pytest.approx(0.0, abs=1e-6)
        assert engine.step(some, 2).tally.kl > 1e-4
        engine.sleep()
        engine.wake()
        assert engine.step(some, 3).tally.kl > 1e-4

    def test_a_correction_reports_its_weights(self, make: MakeEngine) -> None:
        engine = self.awake(
            make, spec_of(loss={"correction": {"kind": "truncate", "high": 1.01, "low": 0.99}})
        )
        some = samples()
        result = engine.step(some, 1)
        assert result.tally.outside > 0
        assert all(0.989 < w < 1.011 for row in result.weights for w in row)

    # ---- memory and files -------------------------------------------------------------------------------
    def test_export_names_what_it_wrote(self, make: MakeEngine, tmp_path: Path) -> None:
        engine = self.awake(make, spec_of())
        files = engine.export(tmp_path / "v")
        assert set(files) == {"model.safetensors", "config.json"}
        for name, digest in files.items():
            assert hashlib.sha256((tmp_path / "v" / name).read_bytes()).hexdigest() == digest
        written = load_file(tmp_path / "v" / "model.safetensors")
        assert tuple(sorted(written)) == tuple(sorted(engine.describe().tensors))
        assert {t.dtype for t in written.values()} == {torch.bfloat16}
        assert "lm_head.weight" not in written  # tied
        config = (MODELS / "tiny-dense" / "config.json").read_bytes()
        assert (tmp_path / "v" / "config.json").read_bytes() == config

    def test_fp32_trains_in_fp32_and_scores_canaries_as_rollout_will(
        self, make: MakeEngine, tmp_path: Path
    ) -> None:
        engine = self.awake(make, spec_of(precision={"recipe": "fp32"}))
        some = samples()
        exact, rounded = engine.score(some), engine.score(some, as_rollout=True)
        assert 1e-6 < widest(exact, rounded) < 0.1
        assert engine.score(some) == exact
        engine.export(tmp_path / "v")
        state = load_file(tmp_path / "v" / "model.safetensors")
        assert {t.dtype for t in state.values()} == {torch.float32}
        assert widest(exact, stranger(tmp_path / "v", some)) < 1e-5

    def test_sleep_and_wake_change_no_bit(self, make: MakeEngine, tmp_path: Path) -> None:
        digests = []
        for i, naps in enumerate((False, True)):
            engine = self.awake(make, spec_of(optimizer={"name": "adamw", "lr": 0.01}))
            for update in range(1, 4):
                engine.step(samples(seed=update), update)
                if naps:
                    engine.sleep()
                    engine.sleep()
                    assert not engine.awake
                    engine.wake()
                    engine.wake()
            digests.append(engine.export(tmp_path / str(i)))
        assert digests[0] == digests[1]

    def test_asleep_it_does_nothing_by_halves(self, make: MakeEngine, tmp_path: Path) -> None:
        engine = make(spec_of())
        assert not engine.awake
        for ask in (
            lambda: engine.score(samples()),
            lambda: engine.step(samples(), 1),
            lambda: engine.export(tmp_path / "v"),
            lambda: engine.save(tmp_path),
            lambda: engine.load(tmp_path),
        ):
            with pytest.raises(EngineAsleep):
                ask()
        assert not (tmp_path / "v").exists()

    @pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
    def test_load_goes_on_where_save_stopped(self, make: MakeEngine, tmp_path: Path, optimizer: str) -> None:
        spec = spec_of(optimizer={"name": optimizer, "lr": 0.01})
        engine = self.awake(make, spec)
        engine.step(samples(seed=1), 1)
        (tmp_path / "saved").mkdir()
        engine.save(tmp_path / "saved")
        engine.step(samples(seed=2), 2)
        other = self.awake(make, spec)
        other.step(samples(seed=9), 1)
        other.load(tmp_path / "saved")
        other.step(samples(seed=2), 2)
        assert engine.export(tmp_path / "a") == other.export(tmp_path / "b")
        assert not [
            p.name for p in (tmp_path / "saved").iterdir() if p.suffix not in (".safetensors", ".json")
        ]

    def test_load_refuses_what_does_not_fit_and_changes_nothing(
        self, make: MakeEngine, tmp_path: Path
    ) -> None:
        (tmp_path / "other").mkdir()
        self.awake(make, spec_of("tiny-moe")).save(tmp_path / "other")
        engine = self.awake(make, spec_of())
        before = engine.export(tmp_path / "a")
        with pytest.raises(ValueError, match=r"tensor parameter\.\S+ is (missing|unexpected)"):
            engine.load(tmp_path / "other")
        with pytest.raises(ValueError, match=r"safetensors"):
            engine.load(tmp_path / "absent")
        assert engine.export(tmp_path / "b") == before
