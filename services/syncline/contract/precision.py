"""`PrecisionContract`: the one declaration of numerics that every component is compiled from.

This file holds the part that the BF16 loop needs. Formats, module patterns and the compile step join it here.
"""

from __future__ import annotations

import hashlib
from typing import Literal

import msgspec


class PrecisionContract(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Which numbers the policy is made of, per component.

    `rollout` is what the rollout engine holds and what sync converts to; `trainer` what FProp reads; `master`
    what the optimizer updates. `compute` is the dtype of GEMM operands after widening (on CPU a BF16-valued
    tensor is multiplied in FP32: the values are BF16, the arithmetic is wider, and the contract says so).
    """

    name: str
    rollout: Literal["bf16"] = "bf16"
    trainer: Literal["bf16", "fp32"] = "bf16"
    master: Literal["fp32"] = "fp32"
    compute: Literal["fp32", "bf16"] = "fp32"
    kv_cache: Literal["fp32", "bf16"] = "fp32"
    canary_tolerance: float = 1e-3  # largest |trainer - rollout| log-prob gap at one version

    def digest(self) -> str:
        """sha256 hex of the canonical JSON form."""
        return hashlib.sha256(msgspec.json.encode(self)).hexdigest()


RECIPES: dict[str, PrecisionContract] = {
    "bf16": PrecisionContract(name="bf16"),
    "fp32": PrecisionContract(name="fp32", trainer="fp32"),
}
"""Shipped recipes by name. `fp32`: trainer FProp in FP32 against a BF16 rollout, a nonzero known mismatch."""
