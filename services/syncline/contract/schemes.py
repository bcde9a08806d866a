"""Quantisation schemes as data: which numbers a tensor's codes and scales are, and how they are chosen.

A scheme is the whole rule. `numerics` carries it out, in one implementation that trainer, converter, verifier and
engine share; nothing there has a default of its own. Sources of the rules: OCP MX 1.0 for E8M0 blocks, NVIDIA's
NVFP4 for two-level scales, DeepSeek-V3 for 128x128 FP8 blocks, the symmetric W4A16 of compressed-tensors.
"""

from __future__ import annotations

import hashlib
from typing import Literal

import msgspec

Format = Literal["fp8_block", "int4", "mxfp8", "mxfp4", "nvfp4"]
Rule = Literal[
    "amax/448",  # fp8_block: scale = fp32(amax / 448), codes = x / scale
    "448/amax",  # fp8_block: inverse = fp32(448 / amax), scale = fp32(1 / inverse), codes = x * inverse
    "448/amax in fp64",  # fp8_block: the same with the quotient taken in fp64 over max(amax, floor)
    "pow2",  # fp8_block: scale = 2^ceil(log2(amax / 448)), exact
    "floor",  # mx: exponent of amax minus that of the largest element value; codes saturate
    "ceil",  # mx: floor, and one more unless amax is a power of two
    "rceil",  # mx: smallest power of two with amax / scale <= largest element value
    "even",  # mx: amax rounded half up to the element's mantissa, then floor
    "even1",  # mx: even with one mantissa bit whatever the element (compressed-tensors)
    "two_level",  # nvfp4: outer = fp32(amax of the tensor / 2688), scale = e4m3(block amax / 6 / outer)
    "amax/7",  # int4: codes -7..7
    "amax/7.5",  # int4: codes -8..7
]


class Scheme(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How one tensor is stored in few bits. `rows` x `columns` values share a scale; columns run along K.

    amax_floor   an amax below it counts as this much when the scale is chosen; 0: a block whose scale would be 0
                 has scale 1 (or the smallest E8M0 scale) and zero codes
    padding      what a size that the block does not divide means. "refuse": an error that names the legal sizes;
                 "zero": zeros are added to K (and packed too); "partial": the last block is smaller
    outer        nvfp4: what shares an outer scale. "row": each row alone, for activations, whose codes must not depend
                 on the other tokens of the batch
    """

    format: Format
    rows: int
    columns: int
    rule: Rule
    amax_floor: float = 0.0
    padding: Literal["refuse", "zero", "partial"] = "refuse"
    outer: Literal["tensor", "row"] = "tensor"

    def digest(self) -> str:
        """sha256 hex of the canonical JSON form."""
        return hashlib.sha256(msgspec.json.encode(self)).hexdigest()


RULES: dict[Format, tuple[Rule, ...]] = {
    "fp8_block": ("amax/448", "448/amax", "448/amax in fp64", "pow2"),
    "mxfp8": ("floor", "ceil", "rceil", "even", "even1"),
    "mxfp4": ("floor", "ceil", "rceil", "even", "even1"),
    "nvfp4": ("two_level",),
    "int4": ("amax/7", "amax/7.5"),
}
BLOCK: dict[Format, int | None] = {"fp8_block": None, "mxfp8": 32, "mxfp4": 32, "nvfp4": 16, "int4": None}
"""Values along K under one scale, where the format fixes it."""

NVFP4_FLOOR = 2688 * 2.0**-120
"""Smallest amax for which 1 / outer / (smallest block scale 2^-6) is finite: below it, zero would become NaN."""


def problem(scheme: Scheme) -> str:
    """What contradicts itself in `scheme`, with the key that is wrong; empty if nothing does."""
    if scheme.rule not in RULES[scheme.format]:
        return (
            f"rule {scheme.rule!r} is none of {scheme.format}: {', '.join(map(repr, RULES[scheme.format]))}"
        )
    if scheme.rows < 1 or scheme.columns < 1:
        return f"rows {scheme.rows} and columns {scheme.columns} must be at least 1"
    fixed = BLOCK[scheme.format]
    if fixed is not None and (scheme.rows, scheme.columns) != (1, fixed):
        return f"rows x columns is {scheme.rows}x{scheme.columns}; {scheme.format} has 1x{fixed}"
    if scheme.format == "int4" and scheme.rows != 1:
        return f"rows {scheme.rows}: int4 groups run along K alone"
    if scheme.padding == "partial" and scheme.format not in ("fp8_block", "int4"):
        return f"padding 'partial': {scheme.format} blocks are whole"
    if scheme.outer != "tensor" and scheme.format != "nvfp4":
        return f"outer {scheme.outer!r}: {scheme.format} has no outer scale"
    if not 0.0 <= scheme.amax_floor < 3e38:
        return f"amax_floor {scheme.amax_floor}"
    return ""


SCHEMES: dict[str, Scheme] = {
    "fp8_block": Scheme(format="fp8_block", rows=128, columns=128, rule="amax/448", padding="partial"),
    "fp8_block_pow2": Scheme(format="fp8_block", rows=128, columns=128, rule="pow2", padding="partial"),
    "fp8_tile": Scheme(format="fp8_block", rows=1, columns=128, rule="amax/448", padding="partial"),
    "fp8_tile_pow2": Scheme(format="fp8_block", rows=1, columns=128, rule="pow2", padding="partial"),
    "int4_g32": Scheme(format="int4", rows=1, columns=32, rule="amax/7"),
    "int4_g128": Scheme(format="int4", rows=1, columns=128, rule="amax/7"),
    "mxfp8": Scheme(format="mxfp8", rows=1, columns=32, rule="rceil"),
    "mxfp4": Scheme(format="mxfp4", rows=1, columns=32, rule="even"),
    "nvfp4_row": Scheme(
        format="nvfp4", rows=1, columns=16, rule="two_level", amax_floor=NVFP4_FLOOR, outer="row"
    ),
    "nvfp4": Scheme(format="nvfp4", rows=1, columns=16, rule="two_level", amax_floor=NVFP4_FLOOR),
}
"""Shipped schemes by name; `fp8_tile` and `nvfp4_row` are for activations."""


KvFormat = Literal["wide", "fp8_e4m3"]
"""How a rollout engine stores the attention context: in the compute dtype, or as E4M3 codes with FP32 scales."""
KvTensor = Literal["keys", "values", "indexer_keys"]
"""What a layer stores per token. Latent attention (MLA) stores its latent as keys and its rope part as values."""

KV_QUANTISED: dict[KvFormat, frozenset[KvTensor]] = {
    "wide": frozenset(),
    "fp8_e4m3": frozenset({"keys", "values", "indexer_keys"}),
}
"""Which of them a format quantises; the others stay in the compute dtype, linear-attention states always do.

All three under fp8_e4m3: sparse attention (DeepSeek-V3.2, GLM-5) selects by FP8 index keys with one FP32 scale per
vector, and an engine that selects by wider ones would attend to other tokens than it will in production. FlashMLA
differs in the latent (a scale per 128 of its 512 values) and keeps the rope part in BF16; here each stored vector
is treated alike, so that the format has one meaning for every family.
"""


def kv_scheme(width: int) -> Scheme:
    """The scheme of a stored vector of `width` values (one token, one head): one FP32 scale, amax / 448."""
    return Scheme(format="fp8_block", rows=1, columns=width, rule="amax/448")
