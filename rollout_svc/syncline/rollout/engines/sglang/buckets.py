"""Tensors as one flat bucket in the form that `/update_weights_from_tensor` takes, without importing SGLang.

The server's wire form is a pickle that it opens with a list of allowed classes. Nothing here ever reads one.
"""

from __future__ import annotations

import base64
import dataclasses
import pickle
import sys
import types
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor


@dataclasses.dataclass
class FlattenedTensorMetadata:
    """As SGLang's class of that name: offsets are bytes of the flat tensor."""

    name: str
    shape: torch.Size
    dtype: torch.dtype
    start_idx: int
    end_idx: int
    numel: int


def _stand_in() -> None:
    """A pickle names a class by its module, and the pickler wants to find it there: SGLang itself is not installed here."""
    module = types.ModuleType("sglang.srt.weight_sync.tensor_bucket")
    module.__dict__["FlattenedTensorMetadata"] = FlattenedTensorMetadata
    FlattenedTensorMetadata.__module__ = module.__name__
    sys.modules.setdefault(module.__name__, module)


_stand_in()


def buckets(tensors: Mapping[str, Tensor], limit: int) -> Iterator[dict[str, Tensor]]:
    """Consecutive tensors of at most `limit` bytes together; a larger one goes alone."""
    held: dict[str, Tensor] = {}
    size = 0
    for name, tensor in tensors.items():
        if held and size + tensor.nbytes > limit:
            yield held
            held, size = {}, 0
        held[name] = tensor
        size += tensor.nbytes
    if held:
        yield held


def encoded(tensors: Mapping[str, Tensor]) -> str:
    """Base64 of one bucket. Any dtype: the flat tensor is bytes."""
    flat, rows, at = [], [], 0
    for name, tensor in tensors.items():
        raw = tensor.contiguous().reshape(-1).view(torch.uint8)
        rows.append(FlattenedTensorMetadata(name, tensor.shape, tensor.dtype, at, at + raw.numel(), raw.numel()))
        flat.append(raw)
        at += raw.numel()
    return base64.b64encode(pickle.dumps({"flattened_tensor": torch.cat(flat), "metadata": rows}, protocol=4)).decode()
