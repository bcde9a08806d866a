"""The quantised attention context: what is stored is codes and scales, what is read is their values.

A stored vector (one token, one head) is D float8_e4m3fn codes and one float32 scale; which tensors of a layer are
stored so is data in `contract/schemes.py`. Every forward pass reads the stored values, those of the tokens that it
feeds included, so prefill, decode and scoring see one and the same context. The wide values live no longer than
the layer's own part of the forward pass. Quantisation is that of `numerics`.

A layer's storage is a dict: `keys` (codes, or the wide tensor) and, if quantised, `keys.scale`; likewise `values`
and `indexer_keys`. Time is dimension -2 of each.

Legend: N contexts or rows, H heads, T tokens, D width of a stored vector.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import (
    DynamicIndexedLayer,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionLayer,
)

from syncline.contract.schemes import KV_QUANTISED, KvFormat, KvTensor, kv_scheme
from syncline.numerics.quantized import Quantized, dequantize, quantize

_SCALE = ".scale"


class CacheBytes(msgspec.Struct, frozen=True):
    """Bytes allocated for a context: E4M3 codes, their FP32 scales, and what is stored in the compute dtype."""

    codes: int = 0
    scales: int = 0
    wide: int = 0

    def __add__(self, other: CacheBytes) -> CacheBytes:
        return CacheBytes(self.codes + other.codes, self.scales + other.scales, self.wide + other.wide)


class UnknownLayer(ValueError):
    """A cache layer of a kind for which the reference engine has no storage."""

    def __init__(self, layer: Any) -> None:
        super().__init__(f"the reference engine does not know cache layers of kind {type(layer).__name__}")


def encode(name: KvTensor, new: Tensor, where: str) -> dict[str, Tensor]:
    """Codes [.., T, D] float8_e4m3fn and scales [.., T, 1] float32 of `new` [.., T, D].

    Raises `NotQuantizable` naming `where`, the tensor and the flat index of a value that is not finite.
    """
    stored = quantize(new, kv_scheme(new.shape[-1]), f"{name} of {where}")
    return {name: stored.codes, name + _SCALE: stored.scale}


def decode(name: KvTensor, stored: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
    """Values [.., T, D] of what `encode` made."""
    codes = stored[name]
    scheme = kv_scheme(codes.shape[-1])
    return dequantize(Quantized(scheme, codes, stored[name + _SCALE], None, tuple(codes.shape)), dtype)


def parts(name: KvTensor) -> tuple[str, str]:
    """Names under which a quantised tensor is stored."""
    return name, name + _SCALE


def nbytes(stored: Mapping[Any, Tensor]) -> CacheBytes:
    """Bytes of a layer's storage, by kind."""
    total = CacheBytes()
    for name, tensor in stored.items():
        size = tensor.numel() * tensor.element_size()
        if tensor.dtype == torch.float8_e4m3fn:
            total += CacheBytes(codes=size)
        elif isinstance(name, str) and name.endswith(_SCALE):
            total += CacheBytes(scales=size)
        else:
            total += CacheBytes(wide=size)
    return total


def stored_of(layer: Any) -> dict[str, Tensor]:
    """The storage of a prefilled attention layer, wide or quantised."""
    if isinstance(layer, QuantisedLayer):
        return layer.stored
    stored = {"keys": layer.keys, "values": layer.values}
    if isinstance(layer, DynamicIndexedLayer) and layer.indexer_keys is not None:
        stored["indexer_keys"] = layer.indexer_keys
    return stored


class QuantisedLayer(DynamicIndexedLayer):
    """A growing attention layer for prefill and scoring, which `transformers` uses as its own.

    window   tokens that a query sees; of more than window - 1 past ones nothing is kept. None: all
    """

    def __init__(self, kv: KvFormat, where: str, window: int | None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.stored: dict[str, Tensor] = {}
        self.length = 0  # tokens seen
        self.is_sliding = window is not None
        self.sliding_window = window
        self._kv, self._where = kv, where

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        self.length += key_states.shape[-2]
        self.is_initialized = True
        return self._append("keys", key_states), self._append("values", value_states)

    def update_indexer(self, indexer_key_states: Tensor) -> Tensor:
        self.is_indexer_initialized = True
        return self._append("indexer_keys", indexer_key_states)

    def _append(self, name: KvTensor, new: Tensor) -> Tensor:
        quantised = name in KV_QUANTISED[self._kv]
        fresh = encode(name, new, self._where) if quantised else {name: new}
        whole = {
            part: torch.cat([self.stored[part], tensor], dim=-2) if part in self.stored else tensor
            for part, tensor in fresh.items()
        }
        for part, tensor in whole.items():
            length = tensor.shape[-2]
            kept = length if self.sliding_window is None else min(length, self.sliding_window - 1)
            self.stored[part] = tensor.narrow(-2, length - kept, kept)
        return decode(name, whole, new.dtype) if quantised else whole[name]

    def get_seq_length(self) -> int:
        return self.length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        if self.sliding_window is None or self.length < self.sliding_window:
            return self.length + query_length, 0
        return self.sliding_window - 1 + query_length, self.length - self.sliding_window + 1


def growing_cache(config: Any, kv: KvFormat) -> DynamicCache:
    """An empty cache of the model's layer kinds that stores its attention context as `kv`.

    Linear-attention states are recurrences that are read, changed and written at every token: they stay wide.
    """
    cache = DynamicCache(config=config)
    if kv != "wide":
        cache.layers = [_quantised(layer, kv, f"layer {i}") for i, layer in enumerate(cache.layers)]
    return cache


def _quantised(layer: Any, kv: KvFormat, where: str) -> QuantisedLayer | LinearAttentionLayer:
    match layer:
        case DynamicSlidingWindowLayer():
            return QuantisedLayer(kv, where, layer.sliding_window)
        case DynamicLayer() if type(layer) in (DynamicLayer, DynamicIndexedLayer):
            return QuantisedLayer(kv, where, None)
        case LinearAttentionLayer() if type(layer) is LinearAttentionLayer:
            return layer
        case _:
            raise UnknownLayer(layer)
