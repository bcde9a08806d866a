"""A linear layer's three GEMMs as the contract states them, forward and backward, in one autograd function.

FProp  Y  = X W^T    contraction K: X and W quantised along K
DGrad  dX = G_Y W    contraction N: G_Y and W quantised along N (of each part by itself)
WGrad  dW = G_Y^T X  contraction tokens: both quantised along the tokens of a group

An operand is `original`, `reconstructed` (what FProp's codes stand for), `requantised` (quantised along this GEMM's
contraction, and dequantised) or `codes`. The gradient of a quantised weight goes to the wide weight unchanged (the
straight-through estimator). A weight that needs no gradient has no WGrad and keeps no X; DGrad flows through it.

Along tokens the rows of each group are padded with zeros to whole blocks and to the largest group: zeros add nothing to
a product and leave every block's maximum as it is, so this is exact. Pads of a micro-batch count as tokens there.

Legend: see `gemm.py`; T rows of the largest group, padded.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from syncline.contract.precision import Operand
from syncline.contract.schemes import BLOCK, Scheme
from syncline.numerics import gemm
from syncline.numerics.operands import Copies, GemmName, How, Meter, Ran, described
from syncline.numerics.quantized import Quantized, dequantize


@dataclass(frozen=True)
class Weight:
    """A weight as `grouped_linear` reads it. `name` is for messages and the meter."""

    name: str
    how: How
    copies: Copies
    meter: Meter


def grouped_linear(x: Tensor, w: Tensor, offsets: Tensor, weight: Weight) -> Tensor:
    """X [S, K], sorted by group, times the wide parameter `w` [E, P x N, K] as `weight` says: [S, P x N] in x's dtype.

    offsets   int32 [E], the last one S

    Raises `NotQuantizable` naming the operand that is not finite or that blocks do not divide.
    """
    if torch.is_grad_enabled() and (x.requires_grad or w.requires_grad):
        y: Tensor = _GroupedLinear.apply(x, w, offsets, weight)  # type: ignore[no-untyped-call]
        return y
    return _fprop(x, offsets, weight, None)


class _GroupedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, offsets: Tensor, weight: Weight) -> Tensor:
        codes: list[Quantized] = []
        y = _fprop(x, offsets, weight, codes)
        saved = _to_save(x, offsets, weight, codes) if ctx.needs_input_grad[1] else None
        tensors = _tensors(saved)
        weight.meter.keep(tensors)
        ctx.save_for_backward(w, offsets, *tensors)  # w: so that a change before backward is an error
        ctx.weight = weight
        ctx.codes_of = (saved.scheme, saved.shape) if isinstance(saved, Quantized) else None
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        (g,) = grads
        w, offsets, *tensors = ctx.saved_tensors
        weight: Weight = ctx.weight
        dx = _dgrad(g, offsets, weight) if ctx.needs_input_grad[0] else None
        dw = None
        if ctx.needs_input_grad[1]:
            saved = tensors[0] if ctx.codes_of is None else _refilled(ctx.codes_of, tensors)
            dw = _wgrad(g, saved, offsets, weight).to(w.dtype).view(w.shape)
            weight.meter.release(tensors)
        return dx, dw, None, None


# ---- the three GEMMs ------------------------------------------------------------------------------------------
def _fprop(x: Tensor, offsets: Tensor, weight: Weight, kept: list[Quantized] | None) -> Tensor:
    """`kept` takes X's codes, if they were made."""
    how, copies = weight.how, weight.copies
    left, right = how.fprop.left, how.fprop.right
    q = None if left == "original" else gemm.quantize_rows(x, _activation(how), f"input of {weight.name}")
    if kept is not None and q is not None:
        kept.append(q)
    said = f"{_said('X', left, how.activation)}, {_said('W', right, how.weight)}"
    if right == "codes":
        operand = x if q is None else q
        _saw_codes(weight, "fprop", said, operand, copies.codes(), _size(q))
        return gemm.from_codes(operand, copies.codes(), offsets, x.dtype)
    values = x if q is None else gemm.values(q, how.held)
    w = copies.original() if right == "original" else copies.reconstructed()
    encoded = "" if right == "original" else described(copies.codes())
    extra = _size(q) + (0 if q is None else _size(values))
    weight.meter.saw("fprop", weight.name, Ran(said, _wide_name(x), encoded), extra)
    return gemm.wide(values, w, offsets, x.dtype)


def _dgrad(g: Tensor, offsets: Tensor, weight: Weight) -> Tensor:
    how, copies = weight.how, weight.copies
    left, right = how.dgrad.left, how.dgrad.right
    g_SPN = g.reshape(len(g), copies.parts, -1)
    q = (
        None
        if left == "original"
        else gemm.quantize_rows(g_SPN, _activation(how), f"gradient at {weight.name}")
    )
    said = f"{_said('G_Y', left, how.activation)}, {_said('W', right, how.weight)}"
    if right == "codes":
        sides = [g_SPN[:, p] if q is None else _column(q, p) for p in range(copies.parts)]
        stacks = [gemm.part_of(copies.transposed(), p) for p in range(copies.parts)]
        _saw_codes(weight, "dgrad", said, sides[0], stacks[0], _size(q))
        products = [gemm.from_codes(side, stack, offsets) for side, stack in zip(sides, stacks, strict=True)]
        return torch.stack(products).sum(0).to(g.dtype) if len(products) > 1 else products[0].to(g.dtype)
    values = g if q is None else dequantize(q, how.held).flatten(1)
    match right:
        case "original":
            w, encoded = copies.original(), ""
        case "reconstructed":
            w, encoded = copies.reconstructed(), described(copies.codes())
        case _:
            w, encoded = copies.requantised(), described(copies.transposed())
    extra = _size(q) + (0 if q is None else _size(values))
    weight.meter.saw("dgrad", weight.name, Ran(said, _wide_name(g), encoded), extra)
    return gemm.wide(values, w.transpose(-2, -1), offsets, g.dtype)


def _wgrad(g: Tensor, saved: Tensor | Quantized, offsets: Tensor, weight: Weight) -> Tensor:
    """[E, P x N, K] float32. `saved`: X, its codes along K (reconstructed) or along tokens [E, K, T]."""
    how = weight.how
    left, right = how.wgrad.left, how.wgrad.right
    said = f"{_said('G_Y', left, how.activation)}, {_said('X', right, how.activation)}"
    encoded = described(saved) if isinstance(saved, Quantized) else ""
    if right == "reconstructed" and isinstance(saved, Quantized):
        saved = gemm.values(saved, how.held)
    if left == "original" and isinstance(saved, Tensor):
        extra = 0 if right == "original" else _size(saved)
        weight.meter.saw("wgrad", weight.name, Ran(said, "wide fp32", encoded), extra)
        return _outer_products(g, saved, offsets)
    size = saved.shape[-1] if isinstance(saved, Quantized) else _padded_rows(offsets, how.activation, g)
    g_ENT = _by_group(g, offsets, size)
    q = None
    if left != "original":
        q = gemm.quantize_rows(g_ENT, _activation(how), f"gradient at {weight.name} along tokens")
    e, n = g_ENT.shape[:2]
    ends = torch.arange(n, (e + 1) * n, n, device=g.device, dtype=torch.int32)
    if right == "codes" and isinstance(saved, Quantized):
        rows = g_ENT.flatten(0, 1) if q is None else gemm.rows_of(q)
        _saw_codes(weight, "wgrad", said, rows, saved, _size(q) + _size(g_ENT))
        return gemm.from_codes(rows, saved, ends).view(e, n, -1)
    left_ENT = g_ENT if q is None else dequantize(q, how.held)
    x_EKT = dequantize(saved, how.held) if isinstance(saved, Quantized) else _by_group(saved, offsets, size)
    extra = _size(g_ENT) + _size(q) + _size(left_ENT) + _size(x_EKT)
    weight.meter.saw("wgrad", weight.name, Ran(said, "wide fp32", encoded), extra)
    return gemm.wide(left_ENT.flatten(0, 1), x_EKT, ends).view(e, n, -1)


# ---- what WGrad reads -----------------------------------------------------------------------------------------
def _to_save(x: Tensor, offsets: Tensor, weight: Weight, codes: list[Quantized]) -> Tensor | Quantized:
    how = weight.how
    match how.wgrad.right:
        case "original":
            return x
        case "reconstructed":
            return codes[0] if codes else gemm.quantize_rows(x, _activation(how), f"input of {weight.name}")
        case "requantised" | "codes":
            x_EKT = _by_group(x, offsets, _padded_rows(offsets, how.activation, x))
            return gemm.quantize_rows(x_EKT, _activation(how), f"input of {weight.name} along tokens")


def _tensors(saved: Tensor | Quantized | None) -> list[Tensor]:
    match saved:
        case None:
            return []
        case Quantized():
            return [t for t in (saved.codes, saved.scale, saved.outer) if t is not None]
        case _:
            return [saved]


def _refilled(codes_of: tuple[Scheme, tuple[int, ...]], tensors: list[Tensor]) -> Quantized:
    scheme, shape = codes_of
    return Quantized(scheme, tensors[0], tensors[1], tensors[2] if len(tensors) > 2 else None, shape)


def _outer_products(g: Tensor, x: Tensor, offsets: Tensor) -> Tensor:
    """G_Y^T X of each group: [E, N, K] float32, as torch's own backward multiplies."""
    g, x = g.float(), x.float()
    if len(offsets) == 1:
        return (g.T @ x).unsqueeze(0)
    if any(size * 4 % 16 for size in (g.shape[1], x.shape[1])):
        size = int(torch.diff(offsets, prepend=offsets.new_zeros(1)).max())
        return _by_group(g, offsets, size) @ _by_group(x, offsets, size).transpose(-2, -1)
    return F.grouped_mm(g.T, x, offs=offsets)


def _padded_rows(offsets: Tensor, scheme: Scheme | None, x: Tensor) -> int:
    """T: rows of the largest group in whole blocks, where a format or a kernel wants them whole."""
    largest = int(torch.diff(offsets, prepend=offsets.new_zeros(1)).max())
    step = 1
    if scheme is not None:
        step = BLOCK[scheme.format] or (scheme.columns if x.is_cuda else 1)
    return max(1, -(-largest // step)) * step


def _by_group(x: Tensor, offsets: Tensor, size: int) -> Tensor:
    """[S, C] -> [E, C, size], contiguous: each group's rows, then zeros."""
    if len(offsets) == 1:
        return F.pad(x.T, (0, size - x.shape[0])).contiguous().unsqueeze(0)
    starts = F.pad(offsets[:-1], (1, 0))
    row = torch.arange(size, device=x.device) + starts[:, None]  # [E, size]
    inside = row < offsets[:, None]
    rows = x[row.clamp(max=x.shape[0] - 1)].masked_fill(~inside.unsqueeze(-1), 0.0)
    return rows.transpose(1, 2).contiguous()


# ---- small things ---------------------------------------------------------------------------------------------
def _activation(how: How) -> Scheme:
    if how.activation is None:
        raise ValueError("a weight-only family has no activation operand")
    return how.activation


def _column(q: Quantized, p: int) -> Quantized:
    """Part `p` of rows [S, P, N]."""
    outer = None if q.outer is None else q.outer[:, p]
    return Quantized(q.scheme, q.codes[:, p], q.scale[:, p], outer, (q.shape[0], q.shape[2]))


def _said(who: str, kind: Operand, scheme: Scheme | None) -> str:
    if kind == "original" or scheme is None:
        return f"{who} {kind}"
    return f"{who} {kind} {scheme.rows}x{scheme.columns}"


def _wide_name(x: Tensor) -> str:
    return "wide bf16" if x.is_cuda and x.dtype == torch.bfloat16 else "wide fp32"


def _size(what: Tensor | Quantized | None) -> int:
    match what:
        case None:
            return 0
        case Quantized():
            return what.nbytes()
        case _:
            return what.numel() * what.element_size()


def _saw_codes(
    weight: Weight, which: GemmName, said: str, left: Tensor | Quantized, right: Quantized, extra: int
) -> None:
    kernel = gemm.kernel_of(left, right)
    weight.meter.saw(
        which, weight.name, Ran(said, kernel, described(right)), extra + gemm.workspace(left, right)
    )
