"""LoRA on Megatron's layers: the torch engine's adapter on attention, merged weights on experts, a base that stays."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from conformance.trainer_engine import MODELS, distance, samples, spec_of, widest
from safetensors.torch import load_file, save_file
from torch import Tensor

pytest.importorskip("megatron.core", reason="the extra `megatron` is not installed")

from ranked import TOPOLOGIES, end_followers, exported, same_bytes, saved, saved_by_torch, spec

from syncline.contract.adapters import DOWN, UP, is_adapter
from syncline.contract.job import ModelSpec
from syncline.trainer.engines.frozen import BaseMoved
from syncline.trainer.engines.megatron import ranks
from syncline.trainer.engines.megatron.engine import MegatronEngine
from syncline.trainer.engines.torch import TorchEngine

QKVO = "*.self_attn.[qkvo]_proj.weight"
EXPERTS = "*.mlp.experts.*_proj.weight"
ADAM: dict[str, Any] = {"optimizer": {"name": "adamw", "lr": 1e-2}}
BF16 = {"rollout": {"wide": "bf16"}, "trainer": {"parameters": "bf16"}}
FP32 = {"rollout": {"wide": "fp32"}, "trainer": {"parameters": "fp32", "gather": "fp32"}}
ON_TP2 = pytest.mark.parametrize("topology", ["tp2"], scope="module")
"""Tests of one topology stand together, so that ranks are started once for them."""


@pytest.fixture(autouse=True, scope="module")
def no_followers_left() -> Iterator[None]:
    yield
    end_followers()


def lora(*targets: str, wide: dict[str, Any] = BF16) -> dict[str, Any]:
    adapter = {"rank": 4, "alpha": 8.0, "targets": list(targets or (QKVO,))}
    return {"precision": {"custom": {"name": "lora", "adapter": adapter, **wide}}}


def megatron(folder: Path, topology: str, **parts: Any) -> MegatronEngine:
    made = MegatronEngine(spec(TOPOLOGIES[topology], **parts), MODELS, folder)
    made.wake()
    return made


def plain(folder: Path, **parts: Any) -> TorchEngine:
    made = TorchEngine(spec_of("tiny-moe", **parts), MODELS, folder)
    made.wake()
    return made


@pytest.mark.parametrize("topology", TOPOLOGIES, scope="module")
def test_attention_adapters_are_those_of_the_torch_engine(topology: str, tmp_path: Path) -> None:
    """From the same seed, the same artefact at first to the byte, and the same gradients of A and B."""
    narrow, other = megatron(tmp_path / "n", topology, **lora()), plain(tmp_path / "o", **lora())
    assert same_bytes(exported(narrow, tmp_path / "n0"), exported(other, tmp_path / "o0"))
    alone = exported(narrow, tmp_path / "n1", base=False)
    assert same_bytes(alone, exported(other, tmp_path / "o1", base=False))
    assert all(is_adapter(name) for name in alone)
    parts = lora(wide=FP32) | ADAM
    one, two = megatron(tmp_path / "m", topology, **parts), plain(tmp_path / "t", **parts)
    for update in (1, 2, 3):  # B is zero at first, so A has its first gradient in the second step
        mine, theirs = one.step(samples(seed=update), update), two.step(samples(seed=update), update)
        assert widest(mine.logprobs, theirs.logprobs) < 1e-4
        assert mine.grad_norm == pytest.approx(theirs.grad_norm, rel=1e-3)
        if update == 1:
            (tmp_path / "saved").mkdir()
            one.save(tmp_path / "saved")
            found, wanted = saved(tmp_path / "saved", "exp_avg"), saved_by_torch(two, "exp_avg")
            assert distance(found, wanted) < 1e-5 * max(float(t.abs().max()) for t in wanted.values())
    left, right = exported(one, tmp_path / "m1", base=False), exported(two, tmp_path / "t1", base=False)
    assert all(float(left[name].abs().max()) > 0 for name in left), "every A and B has moved"
    assert distance(left, right) < 1e-3


@pytest.mark.parametrize("topology", TOPOLOGIES, scope="module")
def test_expert_adapters_are_merged_weights_to_a_stranger(topology: str, tmp_path: Path) -> None:
    """The torch engine has none on fused experts, so plain transformers judges: base + scale B A scores alike, and its
    dW gives the adapter's gradients: dB = s dW A^T, dA = s B^T dW.
    """
    parts = lora(QKVO, EXPERTS, wide=FP32)
    one = megatron(tmp_path / "m", topology, **parts)
    for update in (1, 2):
        one.step(samples(seed=update), update)
    before = exported(one, tmp_path / "b")
    models = merged(before, tmp_path)
    whole = spec_of("merged", precision={"recipe": "fp32"})
    whole = whole.model_copy(update={"model": ModelSpec(name="merged", weights="pretrained")})
    judge = TorchEngine(whole, models, tmp_path / "t")
    judge.wake()
    assert widest(one.score(samples()), judge.score(samples())) < 1e-5
    one.step(samples(seed=3), 3)
    dense = exported(judge, tmp_path / "j0")
    judge.step(samples(seed=3), 3)
    moved = exported(judge, tmp_path / "j1")
    after = exported(one, tmp_path / "a")
    checked = 0
    for name, start in before.items():
        if not is_adapter(name):
            assert torch.equal(start, after[name]), "the base is frozen"
            continue
        if not name.endswith(f".{UP}.weight"):
            continue
        stem = name.removesuffix(f".{UP}.weight")
        dw = (dense[f"{stem}.weight"] - moved[f"{stem}.weight"]) / 0.1
        a, b = before[f"{stem}.{DOWN}.weight"], start
        for leaf, wanted in ((UP, 2.0 * dw @ a.T), (DOWN, 2.0 * b.T @ dw)):
            found = (before[f"{stem}.{leaf}.weight"] - after[f"{stem}.{leaf}.weight"]) / 0.1
            assert float((found - wanted).abs().max()) < 1e-4 * max(1.0, float(wanted.abs().max())), (
                stem,
                leaf,
            )
            checked += 1
    assert checked == 2 * (2 * 4 + 2 * 4 * 3), "both of every target: 2 layers, 4 projections, 4 experts of 3"


def merged(weights: dict[str, Tensor], tmp_path: Path) -> Path:
    """A model root with the model of these weights, W + (8 / 4) B A in place of W."""
    folder = tmp_path / "models" / "merged"
    folder.mkdir(parents=True)
    for file in (MODELS / "tiny-moe").iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    full = {name: t.clone() for name, t in weights.items() if not is_adapter(name)}
    for name in weights:
        if name.endswith(f".{UP}.weight"):
            stem = name.removesuffix(f".{UP}.weight")
            full[f"{stem}.weight"] += 2.0 * weights[name] @ weights[f"{stem}.{DOWN}.weight"]
    save_file(full, folder / "model.safetensors", metadata={"format": "pt"})
    return folder.parent


@ON_TP2
def test_a_checkpoint_keeps_the_adapter_and_knows_its_base(topology: str, tmp_path: Path) -> None:
    parts = lora(QKVO, EXPERTS) | ADAM
    one = megatron(tmp_path / "m", topology, **parts)
    one.step(samples(seed=1), 1)
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    one.save(folder)
    one.sleep()
    one.wake()
    one.step(samples(seed=2), 2)
    scores = one.score(samples())
    other = megatron(tmp_path / "o", topology, **parts)
    other.load(folder)
    other.step(samples(seed=2), 2)
    assert widest(other.score(samples()), scores) == 0.0
    tensors = {
        n for file in folder.glob("*.safetensors") for n in load_file(file) if n.startswith("parameter.")
    }
    assert tensors
    assert all(is_adapter(name) for name in tensors), "nothing of the base is saved"
    foreign = megatron(tmp_path / "f", topology, seeds={"model": 9}, **parts)
    with pytest.raises(
        ValueError, match=r"belongs to the frozen base [0-9a-f]{64}, the model's is [0-9a-f]{64}"
    ):
        foreign.load(folder)


@ON_TP2
def test_the_base_stays_to_the_byte_and_one_that_moved_is_not_exported(topology: str, tmp_path: Path) -> None:
    one = megatron(tmp_path / "m", topology, **lora(QKVO, EXPERTS) | ADAM)
    base = {n: t for n, t in exported(one, tmp_path / "a").items() if not is_adapter(n)}
    for update in (1, 2, 3):
        assert not one.step(samples(seed=update), update).skipped
    after = exported(one, tmp_path / "b")
    assert same_bytes(base, {n: t for n, t in after.items() if not is_adapter(n)})
    alone = exported(one, tmp_path / "c", base=False)
    assert same_bytes(alone, {n: t for n, t in after.items() if is_adapter(n)})
    awake: Any = ranks._current[0]._seat._engines[one._number].need()
    with torch.no_grad():
        awake.model.decoder.final_layernorm.weight[0] += 1
    for act in (lambda: one.export(tmp_path / "v", base=False), lambda: one.save(tmp_path), one.sleep):
        with pytest.raises(BaseMoved, match=r"the frozen base was [0-9a-f]{64} when it was loaded"):
            act()
    assert not (tmp_path / "v").exists()


@ON_TP2
def test_the_reference_policy_is_the_base_without_the_adapter(topology: str, tmp_path: Path) -> None:
    one = megatron(tmp_path / "m", topology, loss={"kl": {"coefficient": 0.1}}, **lora() | ADAM)
    first, second = (one.step(samples(), update).tally.kl for update in (1, 2))
    assert first == pytest.approx(0.0, abs=1e-6)
    assert second > 0


@pytest.mark.parametrize("topology", ["tp2", "pp2"], scope="module")
def test_layers_that_run_again_train_the_adapter_to_the_same_bits(topology: str, tmp_path: Path) -> None:
    """Also where only the last layer has one: earlier stages have no parameter that trains."""
    for targets in ((QKVO, EXPERTS), ("model.layers.1.self_attn.q_proj.weight",)):
        ends = []
        for recompute in ("none", "layers"):
            folder = tmp_path / f"{len(targets)}{recompute}"
            one = megatron(folder, topology, trainer={"recompute": recompute}, **lora(*targets) | ADAM)
            for update in (1, 2):
                one.step(samples(seed=update), update)
            ends.append(exported(one, folder / "end", base=False))
        assert same_bytes(*ends)
        assert any(float(t.abs().max()) > 0 for n, t in ends[0].items() if n.endswith(f".{UP}.weight"))


@ON_TP2
def test_the_trace_says_that_the_adapter_alone_trains(topology: str, tmp_path: Path) -> None:
    one = megatron(tmp_path / "m", topology, **lora() | ADAM)
    trace = {part.component: part for part in one.step(samples(), 1).trace}
    assert {use.family for use in trace["fprop"].uses} == {"", "adapter"}
    assert {use.family for use in trace["wgrad"].uses} == {"adapter"}
    assert {use.family for use in trace["optimizer"].uses} == {"adapter"}
    assert trace["optimizer"].uses[0].tensors == 2 * 2 * 4
    size = one.describe().parameters
    assert trace["optimizer"].bytes["master"] == 4 * size
    assert trace["optimizer"].bytes["moments"] == 8 * size


def test_a_contract_in_bf16_arithmetic_with_an_adapter_is_refused(tmp_path: Path) -> None:
    custom = {**lora()["precision"]["custom"], "compute": "bf16"}
    with pytest.raises(ValueError, match="compute: 'bf16' with an adapter is not offered"):
        MegatronEngine(spec({}, precision={"custom": json.loads(json.dumps(custom))}), MODELS, tmp_path)
