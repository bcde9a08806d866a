"""The textbook's three GEMMs of a low-bit weight: a product each, whose operands are put through codes one by one.

FProp reads X row by row and W along K; DGrad G row by row, of each fused part by itself, and W along N; WGrad G and X
along the tokens that are there. Legend: T tokens, N outputs, K inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from syncline.contract.plan import PrecisionPlan
from syncline.contract.precision import Trainer
from syncline.contract.schemes import BLOCK, Scheme
from syncline.numerics.quantized import dequantize, outer_scale, quantize
from syncline.reference.state import StatePlan, named_windows

ANEW = ("requantised", "codes")
"""Operands whose codes run along the product's own contraction."""


class Reads(NamedTuple):
    """Of one parameter: scheme of its activations, rows of each fused part, DGrad's W where it is another."""

    activation: Scheme | None
    rows: int
    dgrad: Tensor | None


class Gemms(TorchFunctionMode):
    """Inside, a linear product with a low-bit weight is multiplied as `how` says. Made of the masters' values."""

    def __init__(self, how: Trainer, plan: PrecisionPlan, model: nn.Module, state: StatePlan) -> None:
        super().__init__()
        self._how = how
        own = model.state_dict(keep_vars=True)
        views = named_windows(model, state)
        other: Mapping[str, Tensor] = {}
        if how.dgrad.right in ANEW:
            other = weights_through(plan, views, along_n=True)
        elif how.dgrad.right != how.fprop.right and how.dgrad.right == "original":
            other = {entry.name: views[entry.name].detach() for entry in plan.low_bit()}
        wholes: dict[str, Tensor] = {}
        for name, values in other.items():
            window = state.windows[name]
            whole = wholes.setdefault(window.owner, torch.empty_like(own[window.owner].data))
            whole.as_strided(window.shape, window.stride, window.offset).copy_(values)
        self._reads: dict[int, Reads] = {}
        for entry in plan.low_bit():
            owner = state.windows[entry.name].owner
            self._reads[own[owner].untyped_storage().data_ptr()] = Reads(
                entry.activation, entry.shape[0], wholes.get(owner)
            )

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        if func is not F.linear:
            return func(*args, **(kwargs or {}))
        x, w, *bias = args
        reads = self._reads.get(w.untyped_storage().data_ptr())
        if reads is None:
            return func(*args, **(kwargs or {}))
        y = _Linear.apply(x, w, reads, self._how)  # type: ignore[no-untyped-call]
        return y if not bias or bias[0] is None else y + bias[0]


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, reads: Reads, how: Trainer) -> Tensor:
        x_TK = x.reshape(-1, x.shape[-1])
        read_TK = x_TK if how.fprop.left == "original" else through(x_TK, reads.activation)
        ctx.save_for_backward(x_TK, read_TK, w)
        ctx.reads, ctx.how, ctx.shape = reads, how, x.shape
        return (read_TK @ w.T).view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x_TK, read_TK, w = ctx.saved_tensors
        reads, dgrad, wgrad = ctx.reads, ctx.how.dgrad, ctx.how.wgrad
        g_TN = grads[0].reshape(-1, w.shape[0])
        w_NK = w if reads.dgrad is None else reads.dgrad.as_strided(w.shape, w.stride(), w.storage_offset())
        left_TN = g_TN
        if dgrad.left != "original":
            left_TN = torch.cat(
                [through(part, reads.activation) for part in torch.split(g_TN, reads.rows, 1)], 1
            )
        g_NT = g_TN.T if wgrad.left == "original" else through(g_TN.T, reads.activation)
        match wgrad.right:
            case "original":
                right_TK = x_TK
            case "reconstructed":
                right_TK = read_TK
            case _:
                right_TK = through(x_TK.T, reads.activation).T
        return (left_TN @ w_NK).view(ctx.shape), g_NT @ right_TK, None, None


def through(x: Tensor, scheme: Scheme | None) -> Tensor:
    """`x` [R, C] through `scheme`'s codes, row by row; zeros fill the last block where a format wants it whole."""
    assert scheme is not None, "the contract's rules see to it"
    if not len(x):
        return x
    padded = F.pad(x.detach(), (0, -x.shape[1] % (BLOCK[scheme.format] or 1)))
    outer = [outer_scale([row], scheme) if scheme.format == "nvfp4" else None for row in padded]
    rows = zip(padded[:, None], outer, strict=True)
    held = [dequantize(quantize(row.contiguous(), scheme, "row", most)) for row, most in rows]
    return torch.cat(held)[:, : x.shape[1]]


def weights_through(plan: PrecisionPlan, views: Mapping[str, Tensor], *, along_n: bool) -> dict[str, Tensor]:
    """Low-bit checkpoint tensor -> what its codes stand for, those along K or those along N; shaped as the tensor."""
    groups: dict[str, list[str]] = {}
    for entry in plan.low_bit():
        groups.setdefault(entry.outer or entry.name, []).append(entry.name)
    schemes = {entry.name: entry.weight for entry in plan.low_bit()}
    found = {}
    for names in groups.values():
        scheme = schemes[names[0]]
        assert scheme is not None
        outer = outer_scale([views[n] for n in names], scheme) if scheme.format == "nvfp4" else None
        for name in names:
            values = views[name].detach()
            turned = values.T.contiguous() if along_n else values
            held = dequantize(quantize(turned, scheme, name, outer))
            found[name] = held.T if along_n else held
    return found
