"""What each shipped recipe must show of itself in its six-component trace, and what any run of one must hold."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from syncline.contract.job import JobSpec
from syncline.contract.precision_trace import COMPONENTS, ComponentTrace, Use

GEMMS = ("fprop", "dgrad", "wgrad")
SUM = 1e-6  # nats: how exactly a decomposition must sum on each token
WIDE = "wide fp32"
CODES = "emulated codes, fp32 partial sums"


class Shown(NamedTuple):
    """The low-bit family of a recipe as its trace must show it. Empty where the recipe has none.

    encoded   codes and scales of the weights, in rollout and in the store
    rollout, fprop, dgrad, wgrad   operands; `codes`: which of the four multiply codes
    held      kinds of bytes that the trainer's GEMMs must have held beside the wide parameters
    bits      of a low-bit weight in the store, scales included, at most
    adapter   tensors of the adapter that trains in place of the weights; 0: the weights train
    passed    weights that a gradient passes through, where not all: an adapter in the last layers needs no more
    """

    family: str
    tensors: int
    encoded: str
    rollout: str
    fprop: str
    dgrad: str
    wgrad: str
    codes: frozenset[str]
    held: frozenset[str]
    bits: float
    adapter: int = 0
    passed: int | None = None


_NOTHING: frozenset[str] = frozenset()
_ALL = frozenset({"rollout", "fprop", "dgrad", "wgrad"})
_QAT = ("X original, W reconstructed 1x32", "G_Y original, W reconstructed 1x32", "G_Y original, X original")
_NVFP4 = "E2M1, E4M3 scale per 1x16, FP32 outer scale per tensor"
_NVFP4_QDQ = "X reconstructed 1x16, W reconstructed 1x16"
_NVFP4_BACKWARD = ("G_Y original, W reconstructed 1x16", "G_Y original, X reconstructed 1x16")
_WIDE_BASE = ("X original, W original", "G_Y original, W original", "")  # frozen: no WGrad
_FP8 = "E4M3, FP32 scale per 128x128"
_QAT_HELD = frozenset({"codes", "scales", "reconstructed", "saved_activations"})

SHOWN: dict[str, Shown | None] = {
    "bf16": None,
    "unified_fp8": Shown(
        "linear", 32, _FP8, "X codes 1x128, W codes 128x128", "X codes 1x128, W codes 128x128",
        "G_Y codes 1x128, W codes 128x128", "G_Y codes 1x128, X codes 1x128",
        _ALL, frozenset({"codes", "scales", "transposed", "saved_activations"}), 8.1,
    ),
    "mxfp8": Shown(
        "linear", 32, "E4M3, E8M0 scale per 1x32", "X codes 1x32, W codes 1x32", "X codes 1x32, W codes 1x32",
        "G_Y codes 1x32, W codes 1x32", "G_Y codes 1x32, X codes 1x32",
        _ALL, frozenset({"codes", "scales", "transposed", "saved_activations"}), 8.3,
    ),
    "int4_qat_w4a16": Shown(
        "linear", 32, "INT4, FP32 scale per 1x32", _QAT[0], *_QAT, _NOTHING, _QAT_HELD, 5.1
    ),
    "mxfp4_qat_w4a16": Shown(
        "linear", 32, "E2M1, E8M0 scale per 1x32", _QAT[0], *_QAT, _NOTHING, _QAT_HELD, 4.3
    ),
    "nvfp4_selective": Shown(
        "experts", 24, _NVFP4, "X codes 1x16, W codes 1x16", "X codes 1x16, W codes 1x16", *_NVFP4_BACKWARD,
        frozenset({"rollout", "fprop"}), _QAT_HELD, 4.6,
    ),
    "nvfp4_w4a4": Shown(
        "linear", 32, _NVFP4, _NVFP4_QDQ, _NVFP4_QDQ, *_NVFP4_BACKWARD,
        _NOTHING, _QAT_HELD, 4.6,
    ),
    "glm52": Shown(
        "linear", 69, _FP8, "X codes 1x128, W codes 128x128", "X original, W original",
        "G_Y original, W original", "G_Y original, X original",
        frozenset({"rollout"}), frozenset({"saved_activations"}), 8.1,
    ),
    "lora_frozen_mxfp4": Shown(
        "experts", 72, "E2M1, E8M0 scale per 1x32", _QAT[0], *_WIDE_BASE, _NOTHING, _NOTHING, 4.3, adapter=28
    ),
    "qwen38": Shown(
        "experts", 96, _NVFP4, "X codes 1x16, W codes 1x16", *_WIDE_BASE, frozenset({"rollout"}), _NOTHING, 4.6,
        adapter=8, passed=24,
    ),
}  # fmt: skip
"""Recipe -> what its trace shows; None: nothing is low-bit."""


def judge_trace(spec: JobSpec, trace: Mapping[str, ComponentTrace]) -> None:
    """The six components are there, hold bytes, and say what the recipe is."""
    assert tuple(trace) == COMPONENTS
    for part in trace.values():
        assert part.uses, part
        assert any(size > 0 for size in part.bytes.values()) or part.component == "dgrad", part
    shown = SHOWN[str(spec.precision.recipe)]
    families = {use.family for part in trace.values() for use in part.uses}
    assert families - {"", "kv_cache", "adapter"} == ({shown.family} if shown else set())
    adapter = shown is not None and shown.adapter > 0
    assert ("adapter" in families) is adapter
    optimizer = trace["optimizer"]
    assert optimizer.uses[0].encoded == "master fp32, moments fp32"
    assert optimizer.bytes["moments"] == 2 * trace["wgrad"].bytes["gradients"]
    assert optimizer.bytes["master"] == trace["fprop"].bytes["adapter" if adapter else "wide"]
    if shown is not None:
        _judge_adapter(shown, trace)
        _judge_family(shown, trace)
    contract = spec.contract()
    context = [use for use in trace["rollout"].uses if use.family == "kv_cache"]
    assert len(context) == (0 if contract.rollout.kv_cache == "wide" else 1)
    for use in context:  # every stored tensor is E4M3 under a scale of its own
        assert all("F8_E4M3 with an F32 scale per vector" in said for said in use.encoded.split("; "))
    assert trace["rollout"].bytes["kv_cache"] > 0


def _judge_family(shown: Shown, trace: Mapping[str, ComponentTrace]) -> None:
    wanted = {"rollout": shown.rollout, "fprop": shown.fprop, "dgrad": shown.dgrad, "wgrad": shown.wgrad}
    silent = {"optimizer"} | {name for name, operands in wanted.items() if not operands}
    if moved_alone(trace):
        silent.add("convert")
    uses = {name: _use(part, shown.family) for name, part in trace.items() if name not in silent}
    tensors = dict.fromkeys(uses, shown.tensors)
    if shown.passed is not None:
        tensors["dgrad"] = shown.passed
    assert {name: use.tensors for name, use in uses.items()} == tensors
    told = {name: uses[name].operands for name in wanted.keys() - silent}
    assert told == {name: wanted[name] for name in told}
    for name in told:
        wide = "wide" if name == "rollout" else WIDE
        assert uses[name].kernel == (CODES if name in shown.codes else wide), uses[name]
    assert uses["rollout"].encoded == shown.encoded
    held = {kind for name in GEMMS for kind, size in trace[name].bytes.items() if size}
    assert shown.held <= held, (shown.held, held)
    assert held - shown.held <= {"wide", "workspace", "gradients", "adapter"}
    rollout, convert = trace["rollout"].bytes, trace["convert"].bytes
    assert convert["artefact"] == sum(size for kind, size in convert.items() if kind != "artefact")
    if moved_alone(trace):
        return
    assert uses["convert"].encoded == shown.encoded
    # what was written is what is held; INT4's recorded shapes, kept with the scales, are 16 bytes a tensor
    assert (rollout["codes"], rollout["scales"]) == (convert["codes"], convert["scales"])


def moved_alone(trace: Mapping[str, ComponentTrace]) -> bool:
    """Whether the version consists of an adapter, written beside a base that an older version brought."""
    return {use.family for use in trace["convert"].uses} == {"adapter"}


def _judge_adapter(shown: Shown, trace: Mapping[str, ComponentTrace]) -> None:
    """Where an adapter trains, it alone has gradients, masters and moments, and rollout holds it in BF16."""
    if not shown.adapter:
        return
    for name in ("rollout", *GEMMS, "optimizer", "convert"):
        assert _use(trace[name], "adapter").tensors == shown.adapter, name
    for name in ("wgrad", "optimizer"):
        assert {use.family for use in trace[name].uses} == {"adapter"}, "the base is frozen"
    assert trace["wgrad"].bytes["gradients"] == trace["fprop"].bytes["adapter"]
    assert trace["convert"].bytes["adapter"] == trace["optimizer"].bytes["gathered"]


def bits_per_weight(spec: JobSpec, convert: ComponentTrace, weights: int) -> float:
    """Bits that the store spends on one of the family's `weights` weights."""
    return 8 * (convert.bytes["codes"] + convert.bytes["scales"]) / weights


def _use(part: ComponentTrace, family: str) -> Use:
    (use,) = [use for use in part.uses if use.family == family]
    return use


def band(spec: JobSpec) -> tuple[float, float]:
    """Where the contract expects the mean |mismatch|, at the job's temperature: logits are divided by it."""
    expected = spec.contract().expected
    assert expected.high is not None
    return expected.low, expected.high / spec.sampling.temperature


def judge_terms(spec: JobSpec, diagnostics: Mapping[str, Any]) -> None:
    """The summary's terms are what the contract expects of a same-version comparison, and nothing drifted."""
    low, high = band(spec)
    terms = diagnostics["terms"]
    assert low <= terms["mismatch"]["mean"] <= high, terms
    assert terms["noise_decode"]["mean"] <= 1e-3
    assert diagnostics["baseline"] is not None
    assert diagnostics["alarms"] == []
    if spec.contract().rollout.kv_cache == "wide":
        assert "kv_cache" not in terms
        assert "KV cache is wide" in diagnostics["unmeasured"]["kv_cache"]
    else:
        assert 1e-3 < terms["kv_cache"]["mean"] < high
