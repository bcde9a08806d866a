"""The precision contract on this engine: what the model holds of a master, and what is refused, with the reason."""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from syncline.contract.precision import PrecisionContract
from syncline.contract.sharding.pieces import Sharding
from syncline.contract.trainer_rules import megatron_refusals


def check_contract(contract: PrecisionContract) -> None:
    """Raise `ValueError` naming the key of what this engine does not carry out, and why."""
    for key, message, hint in megatron_refusals(contract):
        raise ValueError(f"precision contract {contract.name!r}: {key}: {message}; {hint}")


def compute_dtype(contract: PrecisionContract) -> torch.dtype:
    """Of the model's parameters, and so of its GEMMs."""
    return torch.bfloat16 if contract.compute == "bf16" else torch.float32


class Rounded:
    """What the model holds of an FP32 value: `rounded(name, value)`."""

    def __init__(self, contract: PrecisionContract, sharding: Sharding) -> None:
        self._contract, self._sharding = contract, sharding
        self.values = contract.trainer.parameters
        self._narrow = contract.trainer.parameters == "bf16"

    def __call__(self, name: str, value: Tensor) -> Tensor:
        return value.to(torch.bfloat16) if self._narrow else value

    @contextmanager
    def as_rollout(self, tensors: Mapping[str, Tensor], low_bit: Container[str]) -> Iterator[None]:
        """Inside, the live `tensors` hold what rollout will hold of them, and afterwards exactly what they held.

        low_bit   names of those that are low-bit there: an artefact is made of the export as it is
        """
        if self._narrow or self._contract.rollout.wide != "bf16":
            yield
            return
        exact = low_bit if self._contract.convert.route == "artefact" else ()
        kept = {name: t.clone() for name, t in tensors.items()}
        for name, t in tensors.items():
            if t.is_floating_point() and name not in exact:
                t.copy_(t.to(torch.bfloat16))
        try:
            yield
        finally:
            for name, t in tensors.items():
                t.copy_(kept[name])
