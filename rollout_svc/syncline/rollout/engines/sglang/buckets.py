"""Tensors as one flat bucket in the form that `/update_weights_from_tensor` takes, without importing SGLang.

The server's wire form is a pickle that it opens with a list of allowed classes. Nothing here ever reads one.
"""

from __future__ import annotations

import base64
import dataclasses
import io
import pickle
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

_SERVERS = b"sglang.srt.weight_sync.tensor_bucket"


@dataclasses.dataclass
class FlattenedTensorMetadata:
    """As SGLang's class of that name: offsets are bytes of the flat tensor."""

    name: str
    shape: torch.Size
    dtype: torch.dtype
    start_idx: int
    end_idx: int
    numel: int


class _ByName(pickle._Pickler):
    """Names the stand-in as the server's own class, which a pickler would want to import."""

    def save_global(self, obj: Any, name: str | None = None) -> None:
        if obj is FlattenedTensorMetadata:
            self.write(pickle.GLOBAL + _SERVERS + b"\n" + obj.__name__.encode() + b"\n")  # type: ignore[attr-defined]
            self.memoize(obj)  # type: ignore[attr-defined]
        else:
            super().save_global(obj, name)  # type: ignore[misc]


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


def named(tensors: Mapping[str, Tensor]) -> str:
    """Base64 of wide tensors by name, as `/load_lora_adapter_from_tensors` takes them."""
    return base64.b64encode(pickle.dumps(dict(tensors), protocol=4)).decode()


def encoded(tensors: Mapping[str, Tensor]) -> str:
    """Base64 of one bucket. Any dtype: the flat tensor is bytes."""
    flat, rows, at = [], [], 0
    for name, tensor in tensors.items():
        raw = tensor.contiguous().reshape(-1).view(torch.uint8)
        rows.append(
            FlattenedTensorMetadata(name, tensor.shape, tensor.dtype, at, at + raw.numel(), raw.numel())
        )
        flat.append(raw)
        at += raw.numel()
    out = io.BytesIO()
    _ByName(out, protocol=4).dump({"flattened_tensor": torch.cat(flat), "metadata": rows})
    return base64.b64encode(out.getvalue()).decode()
