"""Adapters in a model and in the torch engine: what trains, what flows through, what is kept and what is refused."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from conformance.trainer_engine import MODELS, distance, samples, spec_of, weights, widest
from msgspec.structs import replace
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from syncline.contract.adapters import adapter_shapes, is_adapter
from syncline.contract.job import ModelSpec
from syncline.contract.plan import BadPlan, resolve
from syncline.contract.precision import Adapter, PrecisionContract
from syncline.contract.recipes import RECIPES
from syncline.reference.adapter import CannotAdapt, attach
from syncline.reference.model import LoadedModel, load_model, round_to_bf16
from syncline.reference.packed import pack
from syncline.reference.trained import train_in
from syncline.trainer.engines.frozen import BaseMoved
from syncline.trainer.engines.torch import TorchEngine

K3 = RECIPES["lora_frozen_mxfp4"]
QKVO = "*.self_attn.[qkvo]_proj.weight"
RECIPE_OF = {"tiny-kimi": "lora_frozen_mxfp4", "tiny-hybrid": "qwen38"}


def loaded(model: str, seed: int = 3) -> LoadedModel:
    made = load_model(MODELS, ModelSpec(name=model), seed)
    round_to_bf16(made.model)
    return made


def adapter_of(*targets: str, rank: int = 4) -> Adapter:
    return Adapter(rank=rank, alpha=8.0, targets=targets or (QKVO,))


def logits(model: nn.Module, seed: int = 0) -> Tensor:
    ids = torch.randint(3, 100, (2, 11), generator=torch.Generator().manual_seed(seed))
    return torch.as_tensor(model(input_ids=ids).logits)


def fill(parameters: Sequence[nn.Parameter], seed: int = 1) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in parameters:
            p.copy_(torch.empty(p.shape).normal_(0, 0.1, generator=generator).bfloat16())


# ---- attach -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("model", ["tiny-dense", "tiny-kimi", "tiny-hybrid", "tiny-moe"])
@torch.no_grad()
def test_a_new_adapter_changes_nothing_and_a_filled_one_is_its_merged_weights(model: str) -> None:
    plain, made = loaded(model), loaded(model)
    names = list(made.model.state_dict())
    adapters = attach(made.model, made.plan, adapter_of(), 0)
    assert torch.equal(logits(made.model), logits(plain.model))
    assert [n for n in made.model.state_dict() if n not in adapters.parameters] == names
    fill(list(adapters.parameters.values()))
    for name, p in plain.model.named_parameters():
        down = adapters.parameters.get(name.removesuffix("weight") + "lora_A")
        if down is not None:
            p.add_(adapters.scale * adapters.parameters[name.removesuffix("weight") + "lora_B"] @ down)
    assert float((logits(made.model) - logits(plain.model)).abs().max()) < 1e-4
    with adapters.disabled():
        assert torch.equal(logits(made.model), logits(loaded(model).model))
    assert adapters.on


@pytest.mark.parametrize("model", ["tiny-kimi", "tiny-hybrid"])
def test_gradients_are_those_of_the_merged_weights(model: str) -> None:
    """A model of merged weights, all trainable, gives dW; then dB = s dW A^T and dA = s B^T dW, in every layer."""
    merged, made = loaded(model), loaded(model)
    adapters = attach(made.model, made.plan, adapter_of(), 0)
    fill(list(adapters.parameters.values()))
    stems = [name.removesuffix("lora_A") for name in adapters.parameters if name.endswith("lora_A")]
    with torch.no_grad():
        for stem in stems:
            a, b = (adapters.parameters[stem + leaf] for leaf in ("lora_A", "lora_B"))
            merged.model.get_parameter(f"{stem}weight").add_(adapters.scale * b @ a)
    for one in (merged.model, made.model):
        torch.log_softmax(logits(one), -1)[..., 7].sum().backward()  # type: ignore[no-untyped-call]
    assert {n for n, p in made.model.named_parameters() if p.grad is not None} == set(adapters.parameters)
    for stem in stems:
        a, b = (adapters.parameters[stem + leaf] for leaf in ("lora_A", "lora_B"))
        dw = merged.model.get_parameter(f"{stem}weight").grad
        assert a.grad is not None
        assert b.grad is not None
        assert dw is not None
        for mine, wanted in ((a.grad, adapters.scale * b.T @ dw), (b.grad, adapters.scale * dw @ a.T)):
            assert float(wanted.detach().abs().max()) > 0
            torch.testing.assert_close(
                mine, wanted, rtol=1e-3, atol=1e-4 * float(wanted.detach().abs().max())
            )


def test_names_shapes_and_random_values_are_those_of_the_contract_and_the_seed() -> None:
    made = loaded("tiny-kimi")
    shapes = {name: w.shape for name, w in made.plan.windows.items()}
    adapters = attach(made.model, made.plan, adapter_of(), 7)
    views = adapters.views()
    assert {name: tuple(v.shape) for name, v in views.items()} == adapter_shapes(adapter_of(), shapes)
    assert "model.layers.0.self_attn.q_proj.lora_A.weight" in views
    for name, view in views.items():
        if ".lora_B." in name:
            assert not view.any()
            continue
        bound = view.shape[1] ** -0.5
        assert float(view.abs().max()) <= bound
        assert float(view.std()) == pytest.approx(bound / 3**0.5, rel=0.2)
    again, other = (
        attach(m.model, m.plan, adapter_of(), s).views()
        for m, s in ((loaded("tiny-kimi"), 7), (loaded("tiny-kimi"), 8))
    )
    assert all(torch.equal(views[n], again[n]) for n in views)
    assert not any(torch.equal(views[n], other[n]) for n in views if ".lora_A." in n)


@torch.no_grad()
def test_it_lies_over_packed_and_over_trained_modules_alike() -> None:
    """A family and an adapter on the same weights: both forwards read the codes' values, and add the same product."""
    contract = PrecisionContract(
        name="both",
        families=(replace(RECIPES["int4_qat_w4a16"].families[0], match=("*.self_attn.*_proj.weight",)),),
    )
    rolled, trained = loaded("tiny-dense"), loaded("tiny-dense")
    plan = resolve(contract, {name: w.shape for name, w in rolled.plan.windows.items()})
    wide = {name: v.clone() for name, v in trained.model.state_dict().items()}
    packed = pack(rolled.model, rolled.plan, plan, contract)
    for entry in plan.low_bit():
        packed.quantise(entry, wide[trained.plan.windows[entry.name].owner].view(entry.shape), None)
    low = train_in(trained.model, trained.plan, plan, contract)
    out = []
    for model, state in ((rolled.model, rolled.plan), (trained.model, trained.plan)):
        adapters = attach(model, state, adapter_of(), 0)
        fill(list(adapters.parameters.values()))
        with low.as_rollout():
            out.append(logits(model))
            with adapters.disabled():
                out.append(logits(model))
    assert torch.equal(out[0], out[2])
    assert torch.equal(out[1], out[3])
    assert not torch.allclose(out[0], out[1], atol=1e-2)


@pytest.mark.parametrize(
    ("model", "targets", "rank", "says"),
    [
        ("tiny-dense", ("*.no_such_proj.weight",), 4, "no_such_proj.*matches no tensor"),
        ("tiny-dense", ("*norm.weight",), 4, "norm.weight, which is no linear weight"),
        ("tiny-dense", ("*.embed_tokens.weight",), 4, "embed_tokens.weight, which is no linear weight"),
        ("tiny-kimi", ("*.A_log",), 4, "A_log, which is no linear weight"),
        (
            "tiny-kimi",
            ("*.self_attn.b_proj.weight",),
            8,
            r"rank 8 is more than .*b_proj.weight of shape \[4, 64\]",
        ),
    ],
)
def test_targets_that_cannot_be_are_refused_by_name(
    model: str, targets: tuple[str, ...], rank: int, says: str
) -> None:
    made = loaded(model)
    with pytest.raises(BadPlan, match=says):
        attach(made.model, made.plan, adapter_of(*targets, rank=rank), 0)


def test_fused_experts_and_a_second_adapter_are_refused_by_name() -> None:
    made = loaded("tiny-kimi")
    with pytest.raises(CannotAdapt, match=r"experts.0.w1.weight lies in .*gate_up_proj of KimiLinearExperts"):
        attach(made.model, made.plan, adapter_of("*.experts.*.w[13].weight"), 0)
    attach(made.model, made.plan, adapter_of(), 0)
    with pytest.raises(CannotAdapt, match="has an adapter already"):
        attach(made.model, made.plan, adapter_of(), 0)


# ---- the engine -----------------------------------------------------------------------------------------------
def engine_of(tmp: Path, model: str = "tiny-kimi", **parts: Any) -> TorchEngine:
    spec = spec_of(model, precision={"recipe": RECIPE_OF[model]}, **parts)
    engine = TorchEngine(spec, MODELS, tmp / "scratch")
    engine.wake()
    return engine


def _see(seen: set[str], name: str, _: Tensor) -> None:
    seen.add(name)


def exported(engine: TorchEngine, folder: Path) -> dict[str, Tensor]:
    """The adapter alone."""
    engine.export(folder, base=False)
    assert sorted(p.name for p in folder.iterdir()) == ["adapter.safetensors", "config.json"]
    return load_file(folder / "adapter.safetensors")


def test_the_adapter_alone_trains_and_the_first_layer_learns_through_the_frozen_rest(tmp_path: Path) -> None:
    """B is zero at first, so A has its first gradient in the second step."""
    engine = engine_of(tmp_path)
    seen: set[str] = set()
    live = engine._need()
    for name, p in live.loaded.model.named_parameters():
        if p.requires_grad:
            p.register_post_accumulate_grad_hook(partial(_see, seen, name))  # type: ignore[no-untyped-call]
    before = weights(engine, tmp_path / "before")
    for update in (1, 2):
        assert not engine.step(samples(), update).skipped
    after = weights(engine, tmp_path / "after")
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    adapter = {name for name in before if is_adapter(name)}
    assert moved == adapter
    assert any(name.startswith("model.layers.0.") for name in moved)
    assert len(adapter) == 28
    assert seen == set(live.masters)
    assert all(p.grad is None for p in live.loaded.model.parameters())


def test_nothing_of_the_base_has_masters_moments_gradients_or_a_wgrad(tmp_path: Path) -> None:
    engine = engine_of(tmp_path, "tiny-hybrid", optimizer={"name": "adamw", "lr": 1e-3})
    live, result = engine._need(), engine.step(samples(), 1)
    assert live.base is not None
    mine = set(live.base.adapters.parameters)
    assert set(live.masters) == mine
    assert len(live.optimizer.state) == len(mine) == 8
    trace = {part.component: part for part in result.trace}
    low = engine._need_numerics()._trained
    assert low is not None
    assert low.meter.seen["fprop"]
    assert low.meter.seen["wgrad"] == {}
    size = sum(p.numel() for p in live.masters.values())
    assert {use.family for use in trace["wgrad"].uses} == {"adapter"}
    assert {use.family for use in trace["optimizer"].uses} == {"adapter"}
    assert {"", "experts", "adapter"} == {use.family for use in trace["fprop"].uses}
    assert trace["fprop"].bytes["adapter"] == 4 * size
    assert trace["optimizer"].bytes["master"] == 4 * size
    assert trace["optimizer"].bytes["moments"] == 8 * size
    assert trace["wgrad"].bytes["gradients"] == 4 * size
    assert engine.describe().parameters == size


def test_an_export_of_the_adapter_alone_is_the_full_one_without_its_base(tmp_path: Path) -> None:
    engine = engine_of(tmp_path)
    engine.step(samples(), 1)
    whole, alone = weights(engine, tmp_path / "whole"), exported(engine, tmp_path / "alone")
    assert set(alone) == {name for name in whole if is_adapter(name)}
    assert all(t.dtype == torch.bfloat16 for t in alone.values())
    assert distance({n: t.float() for n, t in alone.items()}, {n: whole[n] for n in alone}) == 0
    assert engine.describe().tensors == tuple(sorted(whole))


def test_sleep_and_checkpoints_keep_the_adapter_and_know_their_base(tmp_path: Path) -> None:
    engine = engine_of(tmp_path, optimizer={"name": "adamw", "lr": 1e-2})
    engine.step(samples(), 1)
    (tmp_path / "checkpoint").mkdir()
    engine.save(tmp_path / "checkpoint")
    engine.step(samples(), 2)
    scores = engine.score(samples())
    engine.sleep()
    engine.wake()
    assert engine.score(samples()) == scores
    saved = load_file(tmp_path / "checkpoint" / "weights.safetensors")
    assert {name.removeprefix("parameter.") for name in saved} - {"base.sha256"} == set(
        engine._need().masters
    )
    other = engine_of(tmp_path / "other", optimizer={"name": "adamw", "lr": 1e-2})
    other.load(tmp_path / "checkpoint")
    other.step(samples(), 2)
    assert widest(other.score(samples()), scores) == 0
    foreign = engine_of(tmp_path / "foreign", seeds={"model": 9}, optimizer={"name": "adamw", "lr": 1e-2})
    before = foreign.score(samples())
    with pytest.raises(
        ValueError, match=r"belongs to the frozen base [0-9a-f]{64}, the model's is [0-9a-f]{64}"
    ):
        foreign.load(tmp_path / "checkpoint")
    assert foreign.score(samples()) == before


def test_a_base_that_moved_is_neither_exported_nor_saved(tmp_path: Path) -> None:
    engine = engine_of(tmp_path)
    with torch.no_grad():
        engine._need().loaded.model.get_parameter("model.layers.2.mlp.experts.down_proj")[0, 0, 0] += 1
    with pytest.raises(BaseMoved, match=r"the frozen base was [0-9a-f]{64} when it was loaded"):
        engine.export(tmp_path / "v", base=False)
    with pytest.raises(BaseMoved):
        engine.save(tmp_path)


def test_the_reference_policy_is_the_base_without_the_adapter(tmp_path: Path) -> None:
    """A KL of 0 at first, above 0 once the adapter has moved, and no second model in memory."""
    kl: dict[str, Any] = {"loss": {"kl": {"coefficient": 0.1}}, "optimizer": {"name": "adamw", "lr": 1e-2}}
    engine = engine_of(tmp_path, **kl)
    assert engine._reference is None
    first, second = (engine.step(samples(), update).tally.kl for update in (1, 2))
    assert first == 0
    assert second > 0


def test_nan_in_an_adapter_is_named_and_not_exported(tmp_path: Path) -> None:
    engine = engine_of(tmp_path)
    name = "model.layers.1.self_attn.v_proj.lora_B"
    with torch.no_grad():
        engine._need().masters[name][0, 0] = torch.nan
    with pytest.raises(RuntimeError, match=name):
        engine.export(tmp_path / "v", base=False)


def test_files_of_another_adapter_are_refused_by_tensor(tmp_path: Path) -> None:
    engine = engine_of(tmp_path)
    (tmp_path / "c").mkdir()
    engine.save(tmp_path / "c")
    path = tmp_path / "c" / "weights.safetensors"
    tensors = load_file(path)
    gone = "parameter.model.layers.0.self_attn.k_proj.lora_A"
    save_file({n: t for n, t in tensors.items() if n != gone}, path)
    with pytest.raises(ValueError, match=f"tensor {gone} is missing"):
        engine.load(tmp_path / "c")


def test_a_rank_beyond_the_matrix_is_refused_before_a_job_starts() -> None:
    made = loaded("tiny-kimi")
    shapes = {name: w.shape for name, w in made.plan.windows.items()}
    with pytest.raises(BadPlan, match="rank 65 is more than") as caught:
        resolve(replace(K3, adapter=adapter_of(rank=65)), shapes)
    assert caught.value.key == "adapter.rank"
