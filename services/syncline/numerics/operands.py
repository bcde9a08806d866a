"""How a low-bit weight is multiplied, what is made of it for that, and what its GEMMs report.

Legend: see `gemm.py`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from syncline.contract.precision import Gemm
from syncline.contract.precision_trace import Held
from syncline.contract.schemes import Scheme
from syncline.numerics import gemm
from syncline.numerics.quantized import Quantized, dequantize

GemmName = Literal["fprop", "dgrad", "wgrad"]


@dataclass(frozen=True)
class How:
    """How one weight is multiplied. `held`: dtype of dequantised operands; `activation` None: weight-only."""

    fprop: Gemm
    dgrad: Gemm
    wgrad: Gemm
    weight: Scheme
    activation: Scheme | None
    held: torch.dtype = torch.float32


def problem(how: How) -> str:
    """What no GEMM can carry out, with the key; empty if nothing."""
    for name, pair in (("fprop", how.fprop), ("dgrad", how.dgrad), ("wgrad", how.wgrad)):
        acts = [("left", pair.left)] + ([("right", pair.right)] if name == "wgrad" else [])
        for side, kind in acts:
            if how.activation is None and kind != "original":
                return f"{name}.{side} is {kind!r} and the family has no activation scheme"
        if name != "fprop" and pair.left == "reconstructed":
            return f"{name}.left is 'reconstructed': FProp has no codes of the upstream gradient"
        if pair.left == "codes" and pair.right != "codes":
            return f"{name}.left is 'codes' and {name}.right {pair.right!r}: no kernel takes codes on the left alone"
        both = pair.left == pair.right == "codes" and name != "wgrad"
        if both and how.activation is not None and how.activation.columns != how.weight.columns:
            return (
                f"{name}: blocks of {how.activation.columns} and {how.weight.columns} share no partial sums"
            )
    return ""


class Copies:
    """What is made of one weight [E, N, K] or [E, P, N, K] at one moment; each copy when it is first asked for.

    Raises `NotQuantizable` naming `name` when a copy cannot be made.
    """

    def __init__(self, w: Tensor, how: How, name: str, outer: Tensor | None = None) -> None:
        self._w, self._how, self._name, self._outer = w.detach(), how, name, outer
        self._codes: Quantized | None = None
        self._reconstructed: Tensor | None = None
        self._transposed: Quantized | None = None
        self._requantised: Tensor | None = None

    @property
    def parts(self) -> int:
        """P."""
        return self._w.shape[1] if self._w.dim() == 4 else 1

    def original(self) -> Tensor:
        """[E, P x N, K]."""
        return self._w.flatten(1, 2) if self._w.dim() == 4 else self._w

    def codes(self) -> Quantized:
        """Quantised along K."""
        if self._codes is None:
            self._codes = gemm.quantize_stack(self._w, self._how.weight, self._name, self._outer)
        return self._codes

    def reconstructed(self) -> Tensor:
        """What `codes` stand for, [E, P x N, K]."""
        if self._reconstructed is None:
            self._reconstructed = gemm.values(self.codes(), self._how.held)
        return self._reconstructed

    def transposed(self) -> Quantized:
        """Quantised along N: [E, P, K, N]."""
        if self._transposed is None:
            w = self._w if self._w.dim() == 4 else self._w.unsqueeze(1)
            outer = self._outer if self._outer is None or self._outer.dim() == 4 else self._outer.unsqueeze(1)
            name = f"{self._name} along N"
            self._transposed = gemm.quantize_stack(
                w.transpose(-2, -1).contiguous(), self._how.weight, name, outer
            )
        return self._transposed

    def requantised(self) -> Tensor:
        """What `transposed` stand for, as [E, P x N, K]."""
        if self._requantised is None:
            wide = dequantize(self.transposed(), self._how.held)
            self._requantised = wide.transpose(-2, -1).flatten(1, 2).contiguous()
        return self._requantised

    def bytes(self, which: GemmName) -> dict[Held, int]:
        """Of the copies that exist now and `which` GEMM reads: those along K count for FProp, along N for DGrad."""
        out: dict[Held, int] = {}
        if which == "fprop":
            if self._codes is not None:
                out["codes"] = self._codes.codes.numel() * self._codes.codes.element_size()
                out["scales"] = self._codes.nbytes() - out["codes"]
            if self._reconstructed is not None:
                out["reconstructed"] = self._reconstructed.numel() * self._reconstructed.element_size()
        if which == "dgrad":
            if self._transposed is not None:
                out["transposed"] = self._transposed.nbytes()
            if self._requantised is not None:
                out["reconstructed"] = self._requantised.numel() * self._requantised.element_size()
        return out


class Ran(NamedTuple):
    """One GEMM as it was carried out.

    operands   such as "X codes 1x128, W codes 128x128";  kernel  what multiplied
    encoded    what its right operand (W, or X in WGrad) was stored in: `described`; empty: wide values
    """

    operands: str
    kernel: str
    encoded: str


_ELEMENTS = {"fp8_block": "E4M3", "mxfp8": "E4M3", "int4": "INT4", "mxfp4": "E2M1", "nvfp4": "E2M1"}
_SCALES = {torch.float32: "FP32", torch.uint8: "E8M0", torch.float8_e4m3fn: "E4M3"}


def described(q: Quantized) -> str:
    """Codes and scales in words, such as "E4M3, FP32 scale per 128x128"."""
    scheme = q.scheme
    text = f"{_ELEMENTS[scheme.format]}, {_SCALES[q.scale.dtype]} scale per {scheme.rows}x{scheme.columns}"
    if q.outer is None:
        return text
    return f"{text}, FP32 outer scale per {'row' if scheme.outer == 'row' else 'tensor'}"


class Meter:
    """What the GEMMs of several weights really did since `reset`.

    seen        gemm -> weight's name -> what ran
    workspace   gemm -> bytes of the largest temporaries of one call
    saved       bytes of saved activations at their highest; a tensor that several weights save counts once
    """

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forget everything."""
        self.seen: dict[GemmName, dict[str, set[Ran]]] = {"fprop": {}, "dgrad": {}, "wgrad": {}}
        self.workspace: dict[GemmName, int] = {"fprop": 0, "dgrad": 0, "wgrad": 0}
        self.saved = 0
        self._held: dict[int, tuple[int, int]] = {}  # address -> (users, bytes)
        self._now = 0

    def saw(self, which: GemmName, name: str, ran: Ran, workspace: int) -> None:
        """One GEMM ran."""
        self.seen[which].setdefault(name, set()).add(ran)
        self.workspace[which] = max(self.workspace[which], workspace)

    def keep(self, tensors: Iterable[Tensor]) -> None:
        """`tensors` are held for the backward pass."""
        for t in tensors:
            users, _ = self._held.get(t.data_ptr(), (0, 0))
            size = t.numel() * t.element_size()
            self._held[t.data_ptr()] = (users + 1, size)
            self._now += 0 if users else size
        self.saved = max(self.saved, self._now)

    def release(self, tensors: Iterable[Tensor]) -> None:
        """One user of each has read it."""
        for t in tensors:
            users, size = self._held.pop(t.data_ptr(), (1, 0))
            if users > 1:
                self._held[t.data_ptr()] = (users - 1, size)
            else:
                self._now -= size
