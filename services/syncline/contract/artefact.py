"""The checkpoint tensors that one low-bit weight becomes: names, dtypes, shapes. The names are those SGLang loads.

`X.weight` of the trainer's export becomes:

fp8_block   X.weight F8_E4M3 [N, K], X.weight_scale_inv F32 [ceil(N/rows), ceil(K/columns)]
mxfp8       X.weight F8_E4M3 [N, K], X.weight_scale_inv U8 (E8M0) [N, K/32]
int4        X.weight_packed I32 [N, ceil(K/8)], X.weight_scale F32 [N, ceil(K/columns)], X.weight_shape I64 [2]
mxfp4       X.weight_packed U8 [N, K/2], X.weight_scale U8 (E8M0) [N, K/32]
nvfp4       X.weight U8 [N, K/2], X.weight_scale F8_E4M3 [N, K/16], X.weight_scale_2 F32 []

K is the padded one where the scheme pads; the manifest's `padding` then names the shape before.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from syncline.contract.plan import PlanEntry
from syncline.contract.schemes import BLOCK, Scheme

Role = Literal["codes", "scale", "outer", "shape"]


class Part(msgspec.Struct, frozen=True, kw_only=True):
    """One checkpoint tensor of a low-bit weight; `source` is the trainer tensor that it comes from."""

    name: str
    role: Role
    dtype: str
    shape: tuple[int, ...]
    source: str


def parts(entry: PlanEntry) -> tuple[Part, ...]:
    """What low-bit `entry` becomes, codes first. Raises `ValueError` for a wide entry or a name without `.weight`."""
    scheme = entry.weight
    if scheme is None or not entry.name.endswith(".weight"):
        raise ValueError(
            f"tensor {entry.name} is {'wide' if scheme is None else 'no weight'}: it has no low-bit parts"
        )
    n, k = entry.shape
    if scheme.padding == "zero":
        step = BLOCK[scheme.format] or scheme.columns
        k = -(-k // step) * step
    return tuple(
        Part(name=entry.name + suffix, role=role, dtype=dtype, shape=shape, source=entry.name)
        for suffix, role, dtype, shape in _rows(scheme, n, k)
    )


def padding(entry: PlanEntry) -> dict[str, tuple[int, ...]]:
    """Codes tensor of low-bit `entry` -> shape of the weight before zeros were added to it; empty: none were."""
    scheme = entry.weight
    if scheme is None or scheme.padding != "zero":
        return {}
    return (
        {parts(entry)[0].name: entry.shape}
        if entry.shape[1] % (BLOCK[scheme.format] or scheme.columns)
        else {}
    )


def encoded(scheme: Scheme) -> str:
    """What a tensor of `scheme` is stored as, in words."""
    elements = {"fp8_block": "E4M3", "mxfp8": "E4M3", "mxfp4": "E2M1", "nvfp4": "E2M1", "int4": "INT4"}
    scales = {"fp8_block": "FP32", "mxfp8": "E8M0", "mxfp4": "E8M0", "nvfp4": "E4M3", "int4": "FP32"}
    block = f"{scales[scheme.format]} scale per {scheme.rows}x{scheme.columns}"
    outer = f", FP32 outer scale per {scheme.outer}" if scheme.format == "nvfp4" else ""
    return f"{elements[scheme.format]}, {block}{outer}"


def _rows(scheme: Scheme, n: int, k: int) -> tuple[tuple[str, Role, str, tuple[int, ...]], ...]:
    blocks = (-(-n // scheme.rows), -(-k // scheme.columns))
    match scheme.format:
        case "fp8_block":
            return ("", "codes", "F8_E4M3", (n, k)), ("_scale_inv", "scale", "F32", blocks)
        case "mxfp8":
            return ("", "codes", "F8_E4M3", (n, k)), ("_scale_inv", "scale", "U8", blocks)
        case "int4":
            words = -(-k // 8)
            return (
                ("_packed", "codes", "I32", (n, words)),
                ("_scale", "scale", "F32", blocks),
                ("_shape", "shape", "I64", (2,)),
            )
        case "mxfp4":
            return ("_packed", "codes", "U8", (n, k // 2)), ("_scale", "scale", "U8", blocks)
        case "nvfp4":
            return (
                ("", "codes", "U8", (n, k // 2)),
                ("_scale", "scale", "F8_E4M3", blocks),
                ("_scale_2", "outer", "F32", ()),
            )
