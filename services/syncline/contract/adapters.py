"""The checkpoint tensors of an adapter: names and shapes, from the contract and the base's tensors. Pure.

Target `X.weight` [N, K] gets `X.lora_A.weight` [rank, K] and `X.lora_B.weight` [N, rank]. They are no part of the
precision plan: they are wide whatever a family's pattern says, and only they move.
"""

from __future__ import annotations

from collections.abc import Mapping

from syncline.contract.plan import adapter_targets
from syncline.contract.precision import Adapter

DOWN, UP = "lora_A", "lora_B"


def is_adapter(name: str) -> bool:
    """Whether checkpoint name `name` is an adapter tensor's."""
    return name.endswith((f".{DOWN}.weight", f".{UP}.weight"))


def adapter_shapes(adapter: Adapter, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, int]]:
    """Shape of each adapter tensor by checkpoint name, sorted. Raises `BadPlan` as `adapter_targets` does."""
    out: dict[str, tuple[int, int]] = {}
    for name in adapter_targets(adapter, shapes):
        n, k = shapes[name]
        down, up = tensor_names(name)
        out[down], out[up] = (adapter.rank, k), (n, adapter.rank)
    return out


def tensor_names(target: str) -> tuple[str, str]:
    """Names of A and B of the weight `target`."""
    module = target.removesuffix(".weight")
    return f"{module}.{DOWN}.weight", f"{module}.{UP}.weight"
