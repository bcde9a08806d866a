"""Products with quantised operands: wide ones over dequantised values, and low-precision ones over codes and scales.

One grouped product serves linear layers (one group) and fused experts (one per expert). Trainer and rollout call the
same functions on the same values, so two sides that agree on a plan differ by the order of additions alone.

Legend: S rows of `x` sorted by group, K contraction, E groups, N outputs, P parts of a weight that a checkpoint keeps
as P tensors and memory as one (gate and up): they are quantised apart and multiplied as P x N outputs. `offsets`
int32 [E]: row at which each group ends. A stacked weight is a `Quantized` of shape [E, N, K] or [E, P, N, K].
"""

from __future__ import annotations

import math
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from syncline.contract.schemes import Scheme
from syncline.numerics import blockwise, nvfp4
from syncline.numerics.elements import from_e8m0
from syncline.numerics.quantized import NotQuantizable, Quantized, dequantize, quantize

Kernel = Literal[
    "wide", "emulated codes, fp32 partial sums", "scaled_mm 1x128 by 128x128", "scaled_mm 1x128 by 1x128"
]
"""What multiplies. `wide`: a plain product of values; the others consume codes and scales."""


# ---- operands -------------------------------------------------------------------------------------------------
def quantize_stack(w: Tensor, scheme: Scheme, name: str, outer: Tensor | None = None) -> Quantized:
    """Quantise each [N, K] of `w` [E, N, K] or [E, P, N, K] by itself.

    outer   nvfp4: outer scales broadcastable to [E, (P,) 1, 1]; None: one for each [N, K], from its own maximum

    Raises `NotQuantizable` naming `name`.
    """
    if w.dim() not in (3, 4):
        raise NotQuantizable(f"{name} has shape {list(w.shape)}: a stack is [E, N, K] or [E, P, N, K]")
    if scheme.format == "nvfp4" and outer is None:
        outer = nvfp4.outer_scale(w.detach().abs().amax((-2, -1), keepdim=True), scheme)
    return quantize(w, scheme, name, outer)


def quantize_rows(x: Tensor, scheme: Scheme, name: str) -> Quantized:
    """Quantise activations `x` [.., S, K], each row by itself where the scheme says so (nvfp4 with outer "row").

    Raises `NotQuantizable` naming `name`, for a K that blocks do not divide too.
    """
    if scheme.rows != 1 or (scheme.format == "nvfp4" and scheme.outer != "row"):
        raise NotQuantizable(
            f"scheme of {name}: an activation's codes would depend on other tokens of the batch"
        )
    if scheme.format != "nvfp4":
        return quantize(x, scheme, name)
    return quantize(x, scheme, name, nvfp4.outer_scale(x.detach().abs().amax(-1, keepdim=True), scheme))


def values(q: Quantized, held: torch.dtype) -> Tensor:
    """What the codes stand for, rounded once to `held`; a stack of parts as [E, P x N, K].

    With FP32 scales a BF16 copy loses bits that a kernel on codes keeps; the contract's `trainer.operands` decides.
    """
    wide = dequantize(q, held)
    return wide.flatten(1, 2) if wide.dim() == 4 else wide


def elements(q: Quantized) -> Tensor:
    """The code values without scales, float32 [.., K], K as padded."""
    # under a scale of 1 for each row: many times faster on CPU than torch's cast of float8
    one = torch.ones(*q.codes.shape[:-1], 1, device=q.codes.device)
    width = q.codes.shape[-1]
    match q.scheme.format:
        case "fp8_block" | "mxfp8":
            return blockwise.decode_e4m3(q.codes, one, 1, width, torch.float32)
        case "int4":
            return blockwise.decode_int4(q.codes, one, q.shape[-1], q.shape[-1], torch.float32)
        case "mxfp4" | "nvfp4":
            return blockwise.decode_e2m1(q.codes, one, 2 * width, torch.float32)


def part_of(q: Quantized, p: int) -> Quantized:
    """Part `p` of a stack of parts [E, P, N, K]: a stack [E, N, K] that shares its memory."""
    outer = q.outer
    if outer is not None and outer.dim() == 4:
        outer = outer[:, p if outer.shape[1] > 1 else 0]
    return Quantized(q.scheme, q.codes[:, p], q.scale[:, p], outer, (q.shape[0], *q.shape[2:]))


def rows_of(q: Quantized) -> Quantized:
    """A stack of activations [E, N, K] as E x N rows, in its memory."""
    outer = None if q.outer is None else q.outer.flatten(0, 1)
    return Quantized(
        q.scheme, q.codes.flatten(0, 1), q.scale.flatten(0, 1), outer, (q.shape[0] * q.shape[1], q.shape[2])
    )


def row_scales(q: Quantized) -> Tensor:
    """The scale of each row's blocks along K, outer scale included: float32 [.., rows, blocks]."""
    match q.scheme.format:
        case "fp8_block":
            rows = q.shape[-2] if len(q.shape) > 1 else 1
            return q.scale.repeat_interleave(q.scheme.rows, -2)[..., :rows, :]
        case "int4":
            return q.scale
        case "mxfp8" | "mxfp4":
            return from_e8m0(q.scale)
        case "nvfp4":
            if q.outer is None:
                raise NotQuantizable("an nvfp4 tensor without its outer scale")
            return q.scale.float() * q.outer


# ---- products -------------------------------------------------------------------------------------------------
def wide(x: Tensor, w: Tensor, offsets: Tensor, out: torch.dtype = torch.float32) -> Tensor:
    """x [S, K] times its group's w [E, N, K]: [S, N], rounded once to `out`. No gradient flows.

    FP32 arithmetic, except that two BF16 operands on a GPU go to its BF16 kernel (FP32 accumulation there too).
    """
    if not (x.is_cuda and x.dtype == w.dtype == torch.bfloat16):
        x, w = x.float(), w.float()
    return _grouped(x, w, offsets).to(out)


def kernel_of(x: Tensor | Quantized, w: Quantized) -> Kernel:
    """What `from_codes` multiplies these operands with."""
    if not isinstance(x, Quantized) or not w.codes.is_cuda or w.scheme.format != "fp8_block":
        return "emulated codes, fp32 partial sums"
    k, n = w.shape[-1], w.shape[-2]
    tiles = (x.scheme.format, x.scheme.rows, x.scheme.columns) == ("fp8_block", 1, 128)
    native = torch.cuda.get_device_capability(w.codes.device) == (
        9,
        0,
    )  # cuBLAS scales blocks on Hopper alone
    match (w.scheme.rows, w.scheme.columns):
        case (128, 128) if native and tiles and k % 128 == 0 and n % 128 == 0:
            return "scaled_mm 1x128 by 128x128"
        case (1, 128) if native and tiles and k % 128 == 0 and n % 16 == 0:
            return "scaled_mm 1x128 by 1x128"
        case _:
            return "emulated codes, fp32 partial sums"


def from_codes(
    x: Tensor | Quantized, w: Quantized, offsets: Tensor, out: torch.dtype = torch.float32
) -> Tensor:
    """Like `wide` from codes and scales: [S, P x N]. `kernel_of` says by which kernel. No gradient flows.

    The dequantised weight never exists: a block's codes are multiplied and summed in FP32, its scales applied to the
    sum, and the blocks added up in FP32. `x` may stay wide (weight-only formats).

    Raises `NotQuantizable` if blocks of `x` and `w` along K differ.
    """
    if isinstance(x, Quantized) and x.scheme.columns != w.scheme.columns:
        raise NotQuantizable(
            f"operands in blocks of {x.scheme.columns} and {w.scheme.columns} along K share no partial sums"
        )
    match kernel_of(x, w):
        case "scaled_mm 1x128 by 128x128" | "scaled_mm 1x128 by 1x128" if isinstance(x, Quantized):
            return _scaled_mm(x, w, offsets, out)
        case _:
            return _partial_sums(x, w, offsets).to(out)


def workspace(x: Tensor | Quantized, w: Quantized) -> int:
    """Bytes that `from_codes` takes beside its result: the emulation's FP32 code values and one partial sum."""
    if kernel_of(x, w) != "emulated codes, fp32 partial sums":
        return 0
    rows, k = (x.shape[-2], x.shape[-1]) if isinstance(x, Quantized) else (x.shape[0], x.shape[1])
    weight = w.codes.numel() * (
        2 if w.codes.dtype == torch.uint8 else 8 if w.codes.dtype == torch.int32 else 1
    )
    return 4 * (rows * k + weight + rows * math.prod(w.shape[1:-1]))


def _partial_sums(x: Tensor | Quantized, w: Quantized, offsets: Tensor) -> Tensor:
    step = w.scheme.columns
    codes_EPK, scales_EPB = _merged(elements(w)), _merged(row_scales(w))
    if isinstance(x, Quantized):
        x_SK, scales_SB = elements(x), row_scales(x)
    else:
        x_SK, scales_SB = F.pad(x.float(), (0, codes_EPK.shape[-1] - x.shape[-1])), None
    group_S = _groups(offsets, x_SK.shape[0]) if len(codes_EPK) > 1 else None
    total: Tensor | None = None
    for b in range(scales_EPB.shape[-1]):
        block = slice(b * step, (b + 1) * step)
        part = _grouped(x_SK[:, block], codes_EPK[:, :, block], offsets)
        if scales_SB is not None:
            part *= scales_SB[:, b, None]
        part *= scales_EPB[0, :, b] if group_S is None else scales_EPB[:, :, b][group_S]
        total = part if total is None else total.add_(part)
    if total is None:
        raise NotQuantizable("a weight without a single block")
    return total


def _merged(stack: Tensor) -> Tensor:
    return stack.flatten(1, 2) if stack.dim() == 4 else stack


def _groups(offsets: Tensor, rows: int) -> Tensor:
    """int64 [S]: the group of each row."""
    return torch.searchsorted(
        offsets, torch.arange(rows, device=offsets.device, dtype=offsets.dtype), right=True
    )


def _grouped(x: Tensor, w: Tensor, offsets: Tensor) -> Tensor:
    """x [S, K] times its group's w [E, N, K], both of one dtype: [S, N]."""
    if len(w) == 1:
        return x @ w[0].T
    strides = [t.stride(d) * t.element_size() for t in (x, w) for d in range(t.dim()) if t.stride(d) != 1]
    aligned = all(stride % 16 == 0 for stride in strides)  # what the grouped kernel asks for
    if aligned:
        return F.grouped_mm(x, w.transpose(-2, -1), offs=offsets)
    out, start = x.new_zeros(x.shape[0], w.shape[1]), 0
    for e, end in enumerate(offsets.tolist()):
        torch.mm(x[start:end], w[e].T, out=out[start:end])
        start = end
    return out


def _scaled_mm(x: Quantized, w: Quantized, offsets: Tensor, out: torch.dtype) -> Tensor:
    """Hopper's FP8 GEMM, one call for each group and part. Layouts: torch's `_scaled_mm_v2` checks."""
    stack = w.codes if w.codes.dim() == 4 else w.codes.unsqueeze(1)
    scales = w.scale if w.scale.dim() == 4 else w.scale.unsqueeze(1)
    parts, n = stack.shape[1:3]
    y = torch.zeros(x.codes.shape[0], parts * n, dtype=out, device=x.codes.device)
    start = 0
    for e, end in enumerate(offsets.tolist()):
        left = x.scale[start:end].T.contiguous().T  # stride [1, rows]
        for p in range(parts if end > start else 0):
            y[start:end, p * n : (p + 1) * n] = F.scaled_mm(
                x.codes[start:end],
                stack[e, p].T,
                left,
                F.ScalingType.BlockWise1x128,
                _right_scale(scales[e, p], w.scheme),
                F.ScalingType.BlockWise128x128 if w.scheme.rows == 128 else F.ScalingType.BlockWise1x128,
                output_dtype=out,
            )
        start = end
    return y


def _right_scale(scale: Tensor, scheme: Scheme) -> Tensor:
    """[K blocks rounded up to 4, N blocks] in columns for 128x128, [N, K blocks] in columns for 1x128."""
    if scheme.rows == 128:
        return F.pad(scale, (0, -scale.shape[-1] % 4)).contiguous().T
    return scale.T.contiguous().T
