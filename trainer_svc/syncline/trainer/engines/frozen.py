"""The frozen base under an adapter: its digest from loading to unloading, and what a checkpoint says of it."""

from __future__ import annotations

import hashlib
from pathlib import Path

import torch
from torch import Tensor, nn

from syncline.reference.adapter import Adapters

DIGEST = "base.sha256"
"""Name of the base's digest among a checkpoint's tensors."""


class BaseMoved(RuntimeError):
    """A frozen base that changed while it was held. Nothing of it is exported or saved."""


class FrozenBase:
    """Everything in `model` but `adapters`, as it is now."""

    def __init__(self, model: nn.Module, adapters: Adapters) -> None:
        self.adapters = adapters
        self._model = model
        self._loaded = self._digest()

    def check(self) -> Tensor:
        """Digest of the base, uint8 [32]. Raises `BaseMoved` if it is not what it was when it was loaded."""
        now = self._digest()
        if not torch.equal(now, self._loaded):
            raise BaseMoved(
                f"the frozen base was {_hex(self._loaded)} when it was loaded and is {_hex(now)} now"
            )
        return now

    def refuse_other(self, path: Path, found: Tensor) -> None:
        """Raise `ValueError` if the file at `path`, which says `found`, belongs to another base."""
        if not torch.equal(found, self._loaded):
            raise ValueError(
                f"{path}: it belongs to the frozen base {_hex(found)}, the model's is {_hex(self._loaded)}"
            )

    def _digest(self) -> Tensor:
        """sha256 over names, dtypes, shapes and bytes as they are held."""
        digest = hashlib.sha256()
        for name, tensor in sorted(self._model.state_dict().items()):
            if name not in self.adapters.parameters:
                digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
                digest.update(tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
        return torch.frombuffer(bytearray(digest.digest()), dtype=torch.uint8)


def _hex(digest: Tensor) -> str:
    return bytes(digest.tolist()).hex()
