"""A contract as SGLang's settings: command line, environment, `quantization_config`, adapter config.

Facts are of SGLang 0.5.23, read in its source. Where it has no setting for what the contract says: `CannotCompile`.
"""

from __future__ import annotations

import math
from typing import Any

import msgspec

from syncline.contract.compile import CannotCompile
from syncline.contract.compile.parts import check_digest, linear, module, one_scheme
from syncline.contract.partition import check_partition
from syncline.contract.plan import FUSED, PlanEntry, PrecisionPlan, matches
from syncline.contract.precision import Family, PrecisionContract

_INT4_GROUPS = (32, 64, 128)
_NVFP4_ENV = {
    "FLASHINFER_DISABLE_FP4_QUANT_FAST_MATH": "1",
    "SGLANG_FLASHINFER_NVFP4_PER_TOKEN_ACTIVATION": "1",
    "TRTLLM_DISABLE_FP4_QUANT_FAST_MATH": "1",
}


class SGLangSettings(msgspec.Struct, frozen=True, kw_only=True):
    """quantization_config  for the artefact's config.json; None: wide
    adapter_config        for `adapter_config.json`; None: no adapter
    caveats               what differs from the contract all the same, in words
    complete              False without a plan: exceptions and the adapter's modules are then not listed
    """

    flags: tuple[str, ...]
    env: dict[str, str]
    quantization_config: dict[str, Any] | None
    adapter_config: dict[str, Any] | None
    caveats: tuple[str, ...]
    complete: bool


def sglang_flags(
    contract: PrecisionContract, plan: PrecisionPlan | None = None, tp: int = 1
) -> SGLangSettings:
    """Settings of a server with tensor-parallel size `tp`. `plan` None: a preview that knows no model.

    Raises `CannotCompile` naming the contract's key, `BadPlan` for a `tp` that cuts blocks.
    """
    if plan is not None:
        check_digest(contract, plan)
        check_partition(plan, tp)
    family = one_scheme(contract, "SGLang")
    wide = {"bf16": "bfloat16", "fp32": "float32"}[contract.rollout.wide]
    flags = ["--dtype", wide]
    config: dict[str, Any] | None = None
    caveats: list[str] = []
    env: dict[str, str] = {}
    if family is not None:
        if contract.rollout.wide != "bf16":
            raise CannotCompile(
                "rollout.wide", f"{contract.rollout.wide!r} beside {family.weight.format}: use 'bf16'"
            )
        if contract.convert.route != "artefact":
            raise CannotCompile(
                "convert.route", "no setting quantises BF16 tensors in the contract's blocks on load"
            )
        ignored = _ignored(plan) if plan is not None else None
        method, config, caveats, env = _quantised(contract, family, plan)
        if ignored is not None:
            config["ignore" if "ignore" in config else "modules_to_not_convert"] = ignored
        flags += ["--quantization", method]
        if family.weight.format == "nvfp4":
            flags += ["--moe-runner-backend", "flashinfer_trtllm_routed"]
    flags += ["--kv-cache-dtype", "fp8_e4m3" if contract.rollout.kv_cache == "fp8_e4m3" else "auto"]
    adapter = _adapter(contract, plan, flags)
    if tp > 1:
        flags += ["--tp-size", str(tp)]
    return SGLangSettings(
        flags=tuple(flags),
        env=env,
        quantization_config=config,
        adapter_config=adapter,
        caveats=tuple(caveats),
        complete=plan is not None,
    )


def _quantised(
    contract: PrecisionContract, family: Family, plan: PrecisionPlan | None
) -> tuple[str, dict[str, Any], list[str], dict[str, str]]:
    """Method of `--quantization`, config without exceptions, caveats, environment."""
    scheme = family.weight
    match scheme.format:
        case "fp8_block":
            _codes(contract, family)
            return "fp8", _fp8(family, plan), [], {}
        case "mxfp8":
            _codes(contract, family)
            return "mxfp8", _blocks("mxfp8", 1, 32), [], {}
        case "int4":
            _weight_only(contract, family)
            if scheme.columns not in _INT4_GROUPS:
                raise CannotCompile("families.0.weight.columns", f"{scheme.columns}: one of {_INT4_GROUPS}")
            weights = {"num_bits": 4, "type": "int", "group_size": scheme.columns, "actorder": None}
            caveat = "weight_scale is held in BF16: FP32 scales are rounded as they load"
            return "compressed-tensors", _compressed("pack-quantized", weights), [caveat], {}
        case "mxfp4":
            _weight_only(contract, family)
            _experts_alone(plan, family)
            weights = {"num_bits": 4, "type": "float", "group_size": 32}
            caveat = "checkpoint names of packed MXFP4 experts are unproven but for Kimi K3"
            return "compressed-tensors", _compressed("mxfp4-pack-quantized", weights), [caveat], {}
        case "nvfp4":
            _codes(contract, family)
            config = {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16, "ignore": []}
            caveat = "X.input_scale must be in the artefact; with per-token activation scales it is 1"
            return "modelopt_fp4", config, [caveat], dict(_NVFP4_ENV)


def _fp8(family: Family, plan: PrecisionPlan | None) -> dict[str, Any]:
    scheme = family.weight
    if scheme.rows != scheme.columns:
        raise CannotCompile("families.0.weight", f"{scheme.rows}x{scheme.columns}: blocks are square")
    for entry in plan.low_bit() if plan is not None else ():
        fused = any(module(entry.name).rsplit(".", 1)[-1] in group for group in FUSED)
        if fused and entry.shape[0] % scheme.rows:
            raise CannotCompile(
                "families.0.weight.rows",
                f"{entry.name} has {entry.shape[0]} rows: parts of a fused layer are multiples of {scheme.rows}",
            )
    config = _blocks("fp8", scheme.rows, scheme.columns)
    return {**config, "scale_fmt": "ue8m0"} if scheme.rule == "pow2" else config


def _blocks(method: str, rows: int, columns: int) -> dict[str, Any]:
    return {
        "quant_method": method,
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "weight_block_size": [rows, columns],
        "modules_to_not_convert": [],
    }


def _compressed(form: str, weights: dict[str, Any]) -> dict[str, Any]:
    group = {
        "targets": ["Linear"],
        "input_activations": None,
        "output_activations": None,
        "weights": {**weights, "symmetric": True, "strategy": "group", "dynamic": False},
    }
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "quantization_status": "compressed",
        "ignore": [],
        "config_groups": {"group_0": group},
    }


# ---- what must be so ------------------------------------------------------------------------------------------
def _codes(contract: PrecisionContract, family: Family) -> None:
    name = family.weight.format
    if family.activation is None:
        raise CannotCompile("families.0.activation", f"SGLang quantises the activations of {name} layers")
    if contract.rollout.kernel != "codes":
        raise CannotCompile("rollout.kernel", f"'dequantised', and SGLang multiplies the codes of {name}")


def _weight_only(contract: PrecisionContract, family: Family) -> None:
    name = family.weight.format
    if family.activation is not None:
        raise CannotCompile("families.0.activation", f"SGLang keeps the activations of {name} layers wide")
    if contract.rollout.kernel != "dequantised":
        raise CannotCompile("rollout.kernel", f"'codes', and SGLang decodes {name} into BF16 GEMMs")


def _experts_alone(plan: PrecisionPlan | None, family: Family) -> None:
    for entry in plan.low_bit() if plan is not None else ():
        if ".experts." not in entry.name:
            what = f"{family.weight.format} is for routed experts alone"
            raise CannotCompile("families.0.match", f"matches {entry.name}: {what}")


def _ignored(plan: PrecisionPlan) -> list[str]:
    """Modules that stay wide. A layer's experts are one module, as are fused projections: never half and half."""
    held: dict[str, dict[bool, str]] = {}
    for entry in filter(linear, plan.entries):
        held.setdefault(_unit(entry), {})[entry.weight is not None] = entry.name
    for unit, found in held.items():
        if len(found) == 2:
            raise CannotCompile(
                "families.0.match", f"{found[True]} is low-bit and {found[False]} is wide, and {unit} is one"
            )
    kept = {_listed(entry) for entry in filter(linear, plan.entries) if entry.weight is None}
    return sorted(kept)


def _listed(entry: PlanEntry) -> str:
    head, experts, _ = module(entry.name).partition(".experts.")
    return f"{head}.experts" if experts else module(entry.name)


def _unit(entry: PlanEntry) -> str:
    name = _listed(entry)
    stem, _, leaf = name.rpartition(".")
    return next((f"{stem}.{'+'.join(group)}" for group in FUSED if leaf in group), name)


def adapted(contract: PrecisionContract, plan: PrecisionPlan) -> list[str]:
    """The weights that the contract's adapter is on."""
    targets = contract.adapter.targets if contract.adapter is not None else ()
    return [entry.name for entry in plan.entries if any(matches(t, entry.name) for t in targets)]


def _adapter(
    contract: PrecisionContract, plan: PrecisionPlan | None, flags: list[str]
) -> dict[str, Any] | None:
    """Adds the LoRA flags. The factor is written as alpha / r, which is how SGLang computes it."""
    adapter = contract.adapter
    if adapter is None:
        return None
    leaves = ["all"]
    if plan is not None:
        leaves = sorted({module(name).rsplit(".", 1)[-1] for name in adapted(contract, plan)})
    flags += ["--enable-lora", "--max-lora-rank", str(adapter.rank), "--max-loras-per-batch", "2"]
    flags += ["--lora-target-modules", *leaves]
    alpha = adapter.scale() * adapter.rank
    return {
        "peft_type": "LORA",
        "r": adapter.rank,
        "lora_alpha": int(alpha) if math.isclose(alpha, int(alpha)) else alpha,
        "target_modules": leaves,
        "bias": "none",
    }
