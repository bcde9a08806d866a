"""The precision contract on this engine: what the model holds of a master, and what is refused, with the reason."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from syncline.contract.compile.megatron import megatron_flags
from syncline.contract.precision import PrecisionContract
from syncline.contract.sharding.pieces import Sharding


def check_contract(contract: PrecisionContract) -> None:
    """Raise `ValueError` naming the key of what this engine does not carry out, and why.

    Flags are compiled first, so that what Megatron could not do either is said by its own name. Without Transformer
    Engine megatron-core fails on FP8 flags and ignores FP4 flags in silence: both are refused here.
    """
    where, trainer = f"precision contract {contract.name!r}", contract.trainer
    settings = megatron_flags(contract)
    if contract.compute == "bf16" and (trainer.parameters, contract.rollout.wide) != ("bf16", "bf16"):
        raise ValueError(f"{where}: compute 'bf16' needs trainer.parameters and rollout.wide 'bf16' too")
    low = [flag for flag in settings.flags if flag.startswith(("--fp8", "--fp4"))]
    if low:
        here = "CUDA" if torch.cuda.is_available() else "CPU"
        raise ValueError(
            f"{where}: {' '.join(settings.flags)} need Transformer Engine, which this {here} process has not; "
            "megatron-core would ignore FP4 flags without a word. trainer.engine 'torch' emulates the contract"
        )
    if contract.families:
        raise ValueError(
            f"{where}: families: the megatron engine has no fake quantization; trainer.engine 'torch' has"
        )
    if contract.compute == "bf16" and contract.adapter is not None:
        raise ValueError(f"{where}: compute 'bf16' with an adapter is not offered: its products are FP32")
    if trainer.adam_offload:
        raise ValueError(f"{where}: trainer.adam_offload: the engine keeps Adam where the model is")


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
    def as_rollout(self, tensors: Mapping[str, Tensor]) -> Iterator[None]:
        """Inside, the live `tensors` hold what rollout will hold of them, and afterwards exactly what they held."""
        if self._narrow or self._contract.rollout.wide != "bf16":
            yield
            return
        kept = {name: t.clone() for name, t in tensors.items()}
        for t in tensors.values():
            if t.is_floating_point():
                t.copy_(t.to(torch.bfloat16))
        try:
            yield
        finally:
            for name, t in tensors.items():
                t.copy_(kept[name])
