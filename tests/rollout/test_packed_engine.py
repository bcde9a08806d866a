"""Low-bit versions from the export to the served score: converted, staged, read back, equal to a cold model."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import pytest
import torch
from conformance.forge import FAMILIES, JOB, KEY, MODELS, Forge, cold, cold_logprobs, gap, plan
from conformance.model_exports import published, tensors_of
from conformance.rollout_engine import DRAIN, requests, run
from msgspec.structs import replace
from torch import Tensor

from syncline.contract.job import ModelSpec
from syncline.contract.plan import BadPlan
from syncline.contract.precision import Family, PrecisionContract
from syncline.contract.recipes import RECIPES
from syncline.contract.schemes import SCHEMES
from syncline.contract.version_path import VersionId, VersionManifest, opened, sign
from syncline.rollout.engine import StageFailed
from syncline.rollout.engines.reference import ReferenceEngine
from syncline.rollout.engines.weights import Weights
from syncline.runtime.store import BlobStore

IDS = [1, *range(10, 40)]


def engine_of(model: str, contract: PrecisionContract, max_running: int = 16) -> ReferenceEngine:
    return ReferenceEngine(MODELS, ModelSpec(name=model), JOB, KEY, max_running, contract=contract)


SHORT = [
    ("tiny-dense", "int4_qat_w4a16"),
    ("tiny-dense", "mxfp4_qat_w4a16"),
    ("tiny-dense", "nvfp4_w4a4"),
    ("tiny-moe", "int4_qat_w4a16"),
    ("tiny-moe", "mxfp4_qat_w4a16"),
    ("tiny-moe", "mxfp8"),
    ("tiny-moe", "nvfp4_selective"),
    ("tiny-moe", "nvfp4_w4a4"),
    ("tiny-moe", "unified_fp8"),
    ("tiny-hybrid", "qwen38"),
    ("tiny-kimi", "lora_frozen_mxfp4"),
    ("tiny-glm", "glm52"),
]
LONG = [
    ("tiny-dense", "mxfp8"),
    ("tiny-dense", "unified_fp8"),
    ("tiny-moe", "qwen38"),
    ("tiny-hybrid", "int4_qat_w4a16"),
    ("tiny-hybrid", "mxfp4_qat_w4a16"),
    ("tiny-hybrid", "mxfp8"),
    ("tiny-hybrid", "nvfp4_selective"),
    ("tiny-hybrid", "nvfp4_w4a4"),
    ("tiny-hybrid", "unified_fp8"),
    ("tiny-kimi", "nvfp4_w4a4"),
    ("tiny-kimi", "unified_fp8"),
    ("tiny-glm", "nvfp4_selective"),
    ("tiny-glm", "qwen38"),
    ("tiny-glm", "unified_fp8"),
]
FITTING = [*SHORT, *(pytest.param(*pair, marks=pytest.mark.long) for pair in LONG)]
"""Recipes with the examples that they fit (adapters apart: the frozen base alone)."""


def staged(
    root: Path, model: str, contract: PrecisionContract, number: int = 0, seed: int = 0
) -> tuple[ReferenceEngine, BlobStore]:
    """An engine that has staged the conversion of `seed`'s weights."""
    store = BlobStore(root / "store")
    signed = published(root / f"export-{number}", model, tensors_of(model, seed), contract, store, number)
    engine = engine_of(model, contract)
    engine.stage(signed, store)
    return engine, store


def weights_of(engine: ReferenceEngine) -> Weights:
    """The staged set of weights, which no user of an engine sees."""
    weights = engine._staged
    assert weights is not None
    return weights


def under(recipe: str, **rollout: Literal["dequantised", "codes"]) -> PrecisionContract:
    """The recipe without its adapter and with a wide context."""
    contract = RECIPES[recipe]
    return replace(contract, rollout=replace(contract.rollout, kv_cache="wide", **rollout), adapter=None)


def test_every_recipe_that_fits_an_example_is_tested() -> None:
    found = set()
    for model in FAMILIES:
        for recipe in (name for name, contract in RECIPES.items() if contract.families):
            try:
                plan(MODELS / model, under(recipe))
            except BadPlan:
                continue
            found.add((model, recipe))
    assert found == {*SHORT, *LONG}


@pytest.mark.parametrize(("model", "recipe"), FITTING)
def test_a_served_score_is_that_of_the_dequantised_model(tmp_path: Path, model: str, recipe: str) -> None:
    """Both kernels. A sum in another order may tip an activation into the next code: in one probe of three at most."""
    probes = [[1, *range(start, start + 8)] for start in (10, 40, 70)]
    wide = [cold_logprobs(cold(MODELS / model, 0, RECIPES["bf16"]), ids, 2) for ids in probes]
    expected = [cold_logprobs(cold(MODELS / model, 0, under(recipe)), ids, 2) for ids in probes]
    assert max(map(gap, wide, expected)) > 1e-2
    for kernel in ("dequantised", "codes"):
        engine, _ = staged(tmp_path / kernel, model, under(recipe, kernel=kernel))
        scored = [engine.score(ids, 2, buffer="staged").logprobs for ids in probes]
        gaps = sorted(map(gap, scored, expected))
        assert gaps[1] < 1e-5, gaps
        if kernel == "dequantised" or all(family.activation is None for family in RECIPES[recipe].families):
            assert gaps[2] < 1e-5, gaps


@pytest.mark.parametrize(
    ("recipe", "bits"),
    [
        ("unified_fp8", 8.0),
        ("int4_qat_w4a16", 5.0),
        ("mxfp4_qat_w4a16", 4.25),
        ("nvfp4_w4a4", 4.5),
        ("mxfp8", 8.25),
    ],
)
def test_the_model_really_is_that_small(tmp_path: Path, recipe: str, bits: float) -> None:
    """Bytes of all that the modules hold; no wide copy of a low-bit weight is among them."""
    contract = under(recipe)
    engine, _ = staged(tmp_path, "tiny-moe", contract)
    engine.score(IDS, 2, buffer="staged")
    model = weights_of(engine).model
    every = {t.data_ptr(): t for t in (*model.parameters(), *model.buffers())}
    total = sum(t.numel() * t.element_size() for t in every.values())
    entries = plan(MODELS / "tiny-moe", contract).low_bit()
    low = sum(entry.shape[0] * entry.shape[1] for entry in entries)
    wide = sum(t.numel() for t in tensors_of("tiny-moe").values()) - low
    rotary = 8 * 4  # inverse frequencies
    shapes = 16 * len(entries) if recipe.startswith("int4") else 0
    outer = 4 * len(entries) if recipe.startswith("nvfp4") else 0
    scales = 4 * len(entries) if recipe.startswith("unified") else 0
    assert total - 4 * wide - shapes - outer - scales - low * bits / 8 == pytest.approx(
        rotary, abs=2 * rotary
    )
    trace = engine.trace("staged")
    assert trace.bytes["codes"] + trace.bytes["scales"] + trace.bytes["wide"] == total


@pytest.mark.parametrize("recipe", ["unified_fp8", "nvfp4_w4a4", "int4_qat_w4a16"])
def test_the_bridge_makes_the_codes_of_the_artefact(tmp_path: Path, recipe: str) -> None:
    contract = under(recipe)
    bridge = replace(contract, convert=replace(contract.convert, route="bf16_bridge"))
    artefact, _ = staged(tmp_path / "a", "tiny-moe", contract)
    bridged, store = staged(tmp_path / "b", "tiny-moe", bridge)
    one, other = weights_of(artefact), weights_of(bridged)
    assert one.packed.slots.keys() == other.packed.slots.keys()
    for name, slot in one.packed.slots.items():
        assert torch.equal(
            slot.view(-1).view(torch.uint8), other.packed.slots[name].view(-1).view(torch.uint8)
        ), name
        listed = next(t for t in opened_manifest(one).tensors if t.name == name)
        raw = slot.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        assert hashlib.sha256(raw).hexdigest() == listed.digest
    assert artefact.score(IDS, 2, buffer="staged") == bridged.score(IDS, 2, buffer="staged")
    assert {use.communicated for use in bridged.trace("staged").uses} == {"BF16"}
    assert other.copied == opened_manifest(other).nbytes()
    signed = other.signed
    assert signed is not None
    other.load(signed, opened_manifest(other), store)
    assert other.copied == 0
    broken = next(slot for name, slot in other.packed.slots.items() if "down_proj" in name)
    broken.view(-1).view(torch.uint8)[5] ^= 1
    other.load(signed, opened_manifest(other), store)
    assert 0 < other.copied < opened_manifest(other).nbytes()
    assert torch.equal(
        broken.view(-1).view(torch.uint8),
        next(slot for name, slot in one.packed.slots.items() if "down_proj" in name)
        .view(-1)
        .view(torch.uint8),
    )


def opened_manifest(weights: Weights) -> VersionManifest:
    """The manifest that `weights` were loaded from."""
    assert weights.manifest is not None
    return weights.manifest


def test_a_tensor_that_the_buffer_holds_is_not_copied_and_still_proven(tmp_path: Path) -> None:
    """A frozen base: the next version changes one tensor, and one of the old ones was damaged in memory."""
    contract = under("unified_fp8")
    engine, store = staged(tmp_path, "tiny-moe", contract)
    weights = weights_of(engine)
    assert weights.copied == opened_manifest(weights).nbytes()
    tensors = tensors_of("tiny-moe")
    moved, hurt = "model.norm.weight", "model.layers.0.mlp.experts.1.up_proj.weight"
    tensors[moved] = tensors[moved] * 2
    signed = published(tmp_path / "e1", "tiny-moe", tensors, contract, store, 1)
    weights.packed.slots[hurt].view(torch.uint8)[3, 3] ^= 0x11
    second = engine.stage(signed, store)
    sizes = {t.name: t.nbytes for t in opened(signed, KEY).tensors}
    assert weights_of(engine) is weights
    assert weights.copied == sizes[moved] + sizes[hurt]
    assert second.verdict == "verified"
    fresh, _ = staged(tmp_path / "fresh", "tiny-moe", contract)
    other = fresh.stage(signed, store)
    assert other.loaded_digest == second.loaded_digest
    assert engine.score(IDS, 2, buffer="staged") == fresh.score(IDS, 2, buffer="staged")


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (
            "no scale",
            r"tensor .*0.self_attn.k_proj.weight_scale_inv is missing: .*k_proj.weight is low-bit, and "
            r".*k_proj.weight is there, its codes without the scale",
        ),
        (
            "no codes",
            r"tensor .*0.self_attn.k_proj.weight is missing: .* is there, its scale without the codes",
        ),
        ("neither", r"tensor .*0.self_attn.k_proj.weight is missing: .* none of its parts is there"),
        (
            "dtype",
            r"tensor .*0.self_attn.k_proj.weight has dtype BF16 and shape \[32, 64\], the plan says F8_E4M3",
        ),
        (
            "shape",
            r"tensor .*0.self_attn.k_proj.weight_scale_inv has dtype F32 and shape \[1, 2\], the plan says",
        ),
        ("extra", r"tensor model.layers.0.mlp.gate.weight_scale_inv is not part of the model"),
        ("plan", r"was made by precision plan f+, this engine resolves "),
        ("unplanned", r"was made by precision plan none, this engine resolves "),
        ("padded", r"tensor model.norm.weight is padded from \(60,\) in the manifest and from None"),
        ("wide", r"representation 'bf16', this engine reads fp8_block"),
    ],
)
def test_a_manifest_that_is_not_the_plans_is_refused_by_tensor(
    tmp_path: Path, fault: str, message: str
) -> None:
    contract, name = under("unified_fp8"), "model.layers.0.self_attn.k_proj.weight"
    forge = Forge(tmp_path, MODELS / "tiny-moe", contract=contract)
    scale = f"{name}_scale_inv"
    changes: dict[str, Callable[[dict[str, Tensor]], object]] = {
        "no scale": lambda t: t.pop(scale),
        "no codes": lambda t: t.pop(name),
        "neither": lambda t: [t.pop(part) for part in (name, scale)],
        "dtype": lambda t: t.update({name: t[name].bfloat16()}),
        "shape": lambda t: t.update({scale: torch.ones(1, 2)}),
        "extra": lambda t: t.update({"model.layers.0.mlp.gate.weight_scale_inv": torch.ones(1, 1)}),
    }
    manifest = forge.manifest(0, change=changes.get(fault))
    match fault:
        case "plan":
            manifest = replace(manifest, plan="f" * 64)
        case "unplanned":
            manifest = replace(manifest, plan="")
        case "padded":
            manifest = replace(manifest, padding={"model.norm.weight": (60,)})
        case "wide":
            manifest = Forge(tmp_path / "wide", MODELS / "tiny-moe").manifest(0)
    engine = engine_of("tiny-moe", contract)
    with pytest.raises(StageFailed, match=message):
        engine.stage(sign(manifest, KEY), forge.store)
    engine.stage(forge.version(1), forge.store)


def test_together_equals_alone_with_quantised_activations(tmp_path: Path) -> None:
    """Continuous batching under FP8: a token's codes depend on that token alone."""
    contract = under("unified_fp8")
    forge = Forge(tmp_path, MODELS / "tiny-moe", contract=contract)
    engine = engine_of("tiny-moe", contract)
    engine.stage(forge.version(0), forge.store)
    engine.commit(DRAIN)
    wanted = requests(24)
    alone = {request.trajectory: run(engine, [request])[request.trajectory] for request in wanted}
    together = run(engine, wanted, random.Random(1))
    apart = []
    for request in wanted:
        (one,), (other,) = alone[request.trajectory], together[request.trajectory]
        assert (one.tokens, one.experts) == (other.tokens, other.experts)
        apart.append(gap(one.logprobs, other.logprobs))
    assert sum(found >= 1e-5 for found in apart) <= len(apart) // 4, apart  # those that tipped


def test_the_trace_is_read_from_the_modules(tmp_path: Path) -> None:
    contract = under("nvfp4_selective")
    engine, _ = staged(tmp_path, "tiny-moe", contract)
    trace = engine.trace("staged")
    uses = {use.family: use for use in trace.uses}
    experts, wide = uses["experts"], uses[""]
    assert experts.tensors == 2 * 4 * 3
    assert experts.encoded == "E2M1, E4M3 scale per 1x16, FP32 outer scale per tensor"
    assert experts.operands == "X codes 1x16, W codes 1x16"
    assert experts.kernel == "emulated codes, fp32 partial sums"
    assert experts.persistent == "F32+F8_E4M3+U8"
    assert set(experts.communicated.split("; ")) == {"F32", "F8_E4M3", "U8"}
    assert wide.tensors == 45 - 24
    assert (wide.encoded, wide.kernel, wide.persistent) == ("BF16 values", "wide", "F32")
    layers, heads, width = 2, 2, 16
    assert trace.bytes["kv_cache"] == layers * 2 * heads * width * 4
    stored = ReferenceEngine(
        MODELS, ModelSpec(name="tiny-moe"), JOB, KEY, 4, kv="fp8_e4m3", contract=contract
    )
    store = BlobStore(tmp_path / "store")
    stored.stage(store.read_manifest(VersionId(0, 0)), store)
    assert stored.trace("staged").bytes["kv_cache"] == layers * 2 * heads * (width + 4)


@pytest.mark.parametrize(
    ("match", "message"),
    [
        (
            ("*.experts.*.up_proj.weight",),
            r"gate_proj.weight stays wide, and .*up_proj.weight lies in the same",
        ),
        (("*.experts.0.*_proj.weight",), r"experts.1.* stays wide, and .*experts.0"),
        (("*embed_tokens.weight",), r"embed_tokens.weight lies in model.embed_tokens, a Embedding"),
    ],
)
def test_what_cannot_be_held_in_few_bits_is_refused_by_name(
    tmp_path: Path, match: tuple[str, ...], message: str
) -> None:
    family = Family(name="some", match=match, weight=SCHEMES["mxfp4"], sensitive=True)
    contract = PrecisionContract(name="some", families=(family,))
    forge = Forge(tmp_path, MODELS / "tiny-moe", contract=contract)
    with pytest.raises(ValueError, match=message):
        engine_of("tiny-moe", contract).stage(forge.version(0), forge.store)
