"""A contract as Megatron's and Transformer Engine's settings: command line, environment, which modules are low-bit.

Facts are of Megatron Core 0.16.1, Transformer Engine 2 and the public recipes of miles. What has no setting, or one
that means something else, is `CannotCompile`.
"""

from __future__ import annotations

import msgspec

from syncline.contract.compile import CannotCompile
from syncline.contract.compile.megatron_modules import Placement, placement
from syncline.contract.compile.parts import check_digest, one_scheme
from syncline.contract.plan import PrecisionPlan
from syncline.contract.precision import Adapter, Family, Gemm, PrecisionContract

_ORIGINAL = Gemm()
_CODES = Gemm(left="codes", right="codes")
_RECONSTRUCTED = Gemm(right="reconstructed")
_NVFP4_ENV = {
    "NVTE_NVFP4_DISABLE_2D_QUANTIZATION": "1",
    "NVTE_NVFP4_DISABLE_RHT": "1",
    "NVTE_NVFP4_DISABLE_STOCHASTIC_ROUNDING": "1",
    "NVTE_NVFP4_ROW_SCALED_ACTIVATION": "1",
    "NVTE_USE_FAST_MATH": "0",
}


class MegatronSettings(msgspec.Struct, frozen=True, kw_only=True):
    """modules   module pattern -> format, for a Transformer Engine precision file; None: every linear layer alike
    adapter   what the LoRA wrapper around Megatron's linear layers is made from: Megatron has none of its own
    caveats   what differs from the contract all the same, in words
    complete  False without a plan: which layers and modules stay wide is then not said
    """

    flags: tuple[str, ...]
    env: dict[str, str]
    modules: dict[str, str] | None
    adapter: Adapter | None
    caveats: tuple[str, ...]
    complete: bool


def megatron_flags(contract: PrecisionContract, plan: PrecisionPlan | None = None) -> MegatronSettings:
    """Settings of the trainer. `plan` None: a preview that knows no model.

    Raises `CannotCompile` naming the contract's key.
    """
    if plan is not None:
        check_digest(contract, plan)
    trainer = contract.trainer
    wide = (trainer.fprop, trainer.dgrad, trainer.wgrad) == (_ORIGINAL, _ORIGINAL, _ORIGINAL)
    family = None if wide else one_scheme(contract, "Megatron")
    flags = ["--bf16"] if trainer.parameters == "bf16" else []
    env: dict[str, str] = {}
    caveats: list[str] = []
    modules = None
    if trainer.gather == "fp32" and trainer.parameters == "bf16":
        raise CannotCompile(
            "trainer.gather", "'fp32', and Megatron gathers parameters as they are held: 'bf16'"
        )
    if family is not None:
        if trainer.parameters != "bf16":
            raise CannotCompile("trainer.parameters", "'fp32': low-precision GEMMs read BF16 parameters")
        more, env, caveats = _quantised(contract, family)
        if plan is not None and family.weight.format == "int4":
            _grouped_alone(plan)
        where = placement(plan) if plan is not None else Placement(modules=None, flags=())
        flags, modules = [*more, *flags, *where.flags], where.modules
    flags += _gather(contract, quantised=family is not None)
    if trainer.adam_offload:
        flags.append("--optimizer-cpu-offload")
    return MegatronSettings(
        flags=tuple(flags),
        env=env,
        modules=modules,
        adapter=contract.adapter,
        caveats=tuple(caveats),
        complete=plan is not None,
    )


def _quantised(contract: PrecisionContract, family: Family) -> tuple[list[str], dict[str, str], list[str]]:
    flags = ["--transformer-impl", "transformer_engine"]
    scheme = family.weight
    match scheme.format:
        case "fp8_block":
            _three_gemms(contract, "blockwise FP8")
            if (scheme.rows, scheme.columns) != (128, 128):
                message = f"{scheme.rows}x{scheme.columns}: Transformer Engine's blocks are 128x128"
                raise CannotCompile("families.0.weight", message)
            return [*flags, "--fp8-format", "e4m3", "--fp8-recipe", "blockwise"], _fp8_scales(family), []
        case "mxfp8":
            _three_gemms(contract, "MXFP8")
            _only_rule(family, "rceil")
            return [*flags, "--fp8-format", "e4m3", "--fp8-recipe", "mxfp8"], {}, []
        case "nvfp4":
            override = _nvfp4_backward(contract)
            env = dict(_NVFP4_ENV) | ({"NVTE_BACKWARD_OVERRIDE": override} if override else {})
            return [*flags, "--fp4-format", "e2m1", "--fp4-recipe", "nvfp4"], env, []
        case "int4":
            return flags, _fake_int4(contract, family), _int4_caveats(contract, family)
        case "mxfp4":
            raise CannotCompile(
                "families.0.weight.format", "'mxfp4': Transformer Engine has no recipe for it"
            )


# ---- the GEMMs ------------------------------------------------------------------------------------------------
def _forward(contract: PrecisionContract, name: str) -> None:
    if contract.trainer.fprop != _CODES:
        raise CannotCompile(
            "trainer.fprop", f"Transformer Engine's {name} multiplies codes; it has no fake quantization"
        )


def _three_gemms(contract: PrecisionContract, name: str) -> None:
    _forward(contract, name)
    for key, gemm in (("dgrad", contract.trainer.dgrad), ("wgrad", contract.trainer.wgrad)):
        if gemm != _CODES:
            message = (
                f"{name} multiplies codes in all three GEMMs; a wider backward is documented for NVFP4 alone"
            )
            raise CannotCompile(f"trainer.{key}", message)


def _nvfp4_backward(contract: PrecisionContract) -> str:
    """Value of NVTE_BACKWARD_OVERRIDE; "" where the backward pass multiplies codes."""
    _forward(contract, "NVFP4")
    trainer = contract.trainer
    if trainer.dgrad != trainer.wgrad:
        message = f"{_said(trainer.wgrad)} against {_said(trainer.dgrad)} of dgrad: one option is for both"
        raise CannotCompile("trainer.wgrad", message)
    for gemm, value in ((_ORIGINAL, "high_precision"), (_RECONSTRUCTED, "dequantized"), (_CODES, "")):
        if trainer.dgrad == gemm:
            return value
    raise CannotCompile(
        "trainer.dgrad", f"{_said(trainer.dgrad)} has no option: codes, reconstructed W, or original"
    )


def _said(gemm: Gemm) -> str:
    return f"({gemm.left}, {gemm.right})"


# ---- formats --------------------------------------------------------------------------------------------------
def _only_rule(family: Family, rule: str) -> None:
    if family.weight.rule != rule:
        message = f"{family.weight.rule!r}: Transformer Engine rounds scales by {rule!r}"
        raise CannotCompile("families.0.weight.rule", message)


def _fp8_scales(family: Family) -> dict[str, str]:
    scheme = family.weight
    if scheme.rule not in ("amax/448", "pow2"):
        raise CannotCompile(
            "families.0.weight.rule", f"{scheme.rule!r}: 'amax/448' and 'pow2' have a setting"
        )
    return {"NVTE_FP8_BLOCK_SCALING_FP32_SCALES": "0" if scheme.rule == "pow2" else "1"}


def _fake_int4(contract: PrecisionContract, family: Family) -> dict[str, str]:
    trainer = contract.trainer
    if (trainer.fprop, trainer.dgrad, trainer.wgrad) != (_RECONSTRUCTED, _RECONSTRUCTED, _ORIGINAL):
        message = "INT4 is fake-quantised in FProp and reused by DGrad; other operands have no option"
        raise CannotCompile("trainer.fprop", message)
    _only_rule(family, "amax/7")
    return {
        "OPEN_TRAINING_INT4_FAKE_QAT_FLAG": "1",
        "OPEN_TRAINING_INT4_GROUP_SIZE": str(family.weight.columns),
    }


def _grouped_alone(plan: PrecisionPlan) -> None:
    for entry in plan.low_bit():
        if ".experts." not in entry.name:
            message = (
                f"matches {entry.name}: INT4 fake quantization reaches grouped linear layers (experts) alone"
            )
            raise CannotCompile("families.0.match", message)


def _int4_caveats(contract: PrecisionContract, family: Family) -> list[str]:
    found = ["needs the patched Megatron that knows these variables"]
    if family.weight.amax_floor < 7e-5:
        found.append(
            f"a scale is at least 1e-5 there; the contract's amax_floor is {family.weight.amax_floor:g}"
        )
    if contract.trainer.operands != "bf16":
        found.append("reconstructed weights are rounded to BF16 there; the contract holds them in FP32")
    return found


def _gather(contract: PrecisionContract, quantised: bool) -> list[str]:
    if contract.trainer.gather != "fp8_block":
        return []
    if not quantised:
        raise CannotCompile(
            "trainer.gather", "'fp8_block' needs FP8 GEMMs in Megatron: no trainer GEMM reads codes"
        )
    return ["--fp8-param-gather"]
