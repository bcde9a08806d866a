"""A contract in words: what each of the six components does, as one line each (seed Table 4)."""

from __future__ import annotations

from typing import Literal

from syncline.contract.precision import Gemm, Operand, PrecisionContract
from syncline.contract.precision_trace import Component
from syncline.contract.schemes import Scheme

_WIDE = {"bf16": "BF16", "fp32": "FP32"}


def components(contract: PrecisionContract) -> dict[Component, str]:
    """Component -> what the contract says of it, in the order of an update."""
    trainer = contract.trainer
    return {
        "rollout": _rollout(contract),
        "fprop": _gemm(contract, trainer.fprop, "X", "W"),
        "dgrad": _gemm(contract, trainer.dgrad, "G_Y", "W"),
        "wgrad": _wgrad(contract),
        "optimizer": _optimizer(contract),
        "convert": _convert(contract),
    }


def scheme_words(scheme: Scheme | None) -> str:
    """A scheme as people write it, such as `fp8_block 128x128, amax/448`; "wide" for None."""
    if scheme is None:
        return "wide"
    more = [f", {scheme.rule}"]
    if scheme.outer == "row":
        more.append(", outer scale per row")
    if scheme.padding != "refuse":
        more.append(f", padding {scheme.padding}")
    return f"{scheme.format} {scheme.rows}x{scheme.columns}{''.join(more)}"


def _formats(contract: PrecisionContract) -> str:
    return ", ".join(dict.fromkeys(family.weight.format for family in contract.families))


def _rollout(contract: PrecisionContract) -> str:
    rollout = contract.rollout
    said = [f"{_WIDE[rollout.wide]} values"]
    if contract.families:
        names = ", ".join(family.name for family in contract.families)
        quantised = any(family.activation is not None for family in contract.families)
        if rollout.kernel == "codes":
            kernel = "codes of W and X multiplied" if quantised else "codes of W multiplied"
        else:
            kernel = "W and X dequantised, wide GEMM" if quantised else "W decoded, wide GEMM"
        said = [f"{_formats(contract)} ({names}): {kernel}", f"the rest {_WIDE[rollout.wide]}"]
    if contract.adapter is not None:
        said.append("BF16 adapter beside the base")
    if rollout.kv_cache != "wide":
        said.append(f"KV cache {rollout.kv_cache}")
    return "; ".join(said)


_READ: dict[Operand, str] = {
    "original": "original",
    "reconstructed": "reconstructed",
    "requantised": "requantised",
    "codes": "codes of",
}


def _gemm(contract: PrecisionContract, gemm: Gemm, left: str, right: str) -> str:
    wide = _WIDE[contract.trainer.parameters]
    if gemm == Gemm():
        return f"{wide} values, wide GEMM"
    if gemm.left == gemm.right == "codes":
        return f"{_formats(contract)} codes of {left} and {right} multiplied"
    kernel = "low-bit kernel" if "codes" in (gemm.left, gemm.right) else "wide GEMM"
    return f"{_READ[gemm.left]} {left}, {_READ[gemm.right]} {right}, {kernel}"


def _wgrad(contract: PrecisionContract) -> str:
    if contract.adapter is not None:
        return "of the adapter alone, wide"
    said = _gemm(contract, contract.trainer.wgrad, "G_Y", "X")
    through: tuple[Literal["reconstructed", "codes"], ...] = ("reconstructed", "codes")
    straight = contract.trainer.fprop.right in through
    return f"{said}; straight through to the wide weight" if straight else said


def _optimizer(contract: PrecisionContract) -> str:
    trainer = contract.trainer
    what = "of the adapter alone, " if contract.adapter is not None else ""
    said = f"{what}{_WIDE[trainer.master]} master and moments"
    if trainer.gather == "fp8_block":
        said += "; FP8 blocks gathered"
    return said + ("; on the CPU" if trainer.adam_offload else "")


def _convert(contract: PrecisionContract) -> str:
    if contract.adapter is not None:
        return "the adapter moves in BF16; the base never does"
    if not contract.families:
        return f"{_WIDE[contract.rollout.wide]} values"
    if contract.convert.route == "bf16_bridge":
        return "BF16 values; the engine quantises as it loads"
    by = " on the trainer's ranks" if contract.convert.where == "trainer_rank" else ""
    return f"quantised and packed to {_formats(contract)}{by}"
