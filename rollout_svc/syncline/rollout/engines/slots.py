"""Per-request state of a decode batch: one row per request, all layer kinds, no padding in any recurrent
state.

Rows are slots 0..rows-1 of preallocated tensors. Attention layers store each token at one column shared by
all rows: a row of length n occupies the columns [column - n, column), so a decode step writes one column and
reads one window, and `transformers` sees what it knows as left padding. Linear-attention layers have one
state per row; a decode step feeds each row exactly one real token, and prefill takes prompts of equal length
only, so nothing that is padding ever reaches them.

A quantised context lies in slots as codes and scales (`kv.py`): placing, moving, shifting and growing copy both as
they are, and only a forward pass makes values of them.

Legend: S slots, R live rows, C columns, H heads, D width, P tokens of a prefilled context.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import (
    Cache,
    DynamicIndexedLayer,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionLayer,
)

from syncline.contract.schemes import KV_QUANTISED, KvFormat, KvTensor
from syncline.rollout.engines.kv import (
    CacheBytes,
    UnknownLayer,
    decode,
    encode,
    nbytes,
    parts,
    stored_of,
)
from syncline.rollout.engines.states import Geometry, StateLayer

_BLOCK = 64  # columns by which attention buffers grow at least


class ColumnLayer(DynamicIndexedLayer):  # type: ignore[no-untyped-call]
    """Keys and values [S, H, C, D] (and index keys [S, C, D]) of one attention layer.

    across   keys lie in memory as [S, H, D, C], which a product with one query per row reads in half the time
    """

    def __init__(self, geometry: Geometry, window: int | None, across: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.geometry = geometry
        self._across = across
        self.window = window
        self.is_sliding = window is not None
        self.sliding_window = window
        self.buffers: dict[str, Tensor] = {}
        self.live: dict[str, Tensor] = {}

    def place(self, rows: Tensor, source: Any, index: Tensor) -> None:
        """Copy the prefilled contexts `index` of `source` to slots `rows`, ending at the shared column."""
        for name, context in stored_of(source).items():
            kept = context.shape[-2]
            if name not in self.buffers:
                shape = (self.geometry.slots, *context.shape[1:-2], self.geometry.columns, context.shape[-1])
                self.buffers[name] = self._zeros(name, shape, context.dtype)
            end = self.geometry.column
            self.buffers[name].narrow(-2, end - kept, kept)[rows] = context.index_select(0, index)

    def resize(self, slots: int, columns: int) -> None:
        for name, old in self.buffers.items():
            new = self._zeros(name, (slots, *old.shape[1:-2], columns, old.shape[-1]), old.dtype)
            new[: old.shape[0]].narrow(-2, 0, old.shape[-2]).copy_(old)
            self.buffers[name] = new

    def _zeros(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Zeros: a masked column is multiplied by 0, and 0 times an undefined value may be NaN."""
        if self._across and name == "keys":
            return torch.zeros((*shape[:-2], shape[-1], shape[-2]), dtype=dtype).transpose(-1, -2)
        return torch.zeros(shape, dtype=dtype)

    def shift(self, source: int, target: int, count: int) -> None:
        for buffer in self.buffers.values():
            buffer.narrow(-2, target, count).copy_(buffer.narrow(-2, source, count).clone())

    def move(self, source: int, target: int) -> None:
        low, count = self.geometry.low, self.geometry.column - self.geometry.low
        for buffer in self.buffers.values():
            buffer[target].narrow(-2, low, count).copy_(buffer[source].narrow(-2, low, count))

    def refresh(self) -> None:
        self.live = {name: buffer[: self.geometry.rows] for name, buffer in self.buffers.items()}

    # ---- what transformers calls during a forward pass
    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        return self._append("keys", key_states), self._append("values", value_states)

    def update_indexer(self, indexer_key_states: Tensor) -> Tensor:
        return self._append("indexer_keys", indexer_key_states)

    def _append(self, name: KvTensor, new: Tensor) -> Tensor:
        buffer, column = self.live[name], self.geometry.column
        buffer.select(-2, column).copy_(new.select(-2, 0))
        length, _ = self.get_mask_sizes(1)
        return buffer.narrow(-2, column + 1 - length, length)

    def extend(self, k_RHD: Tensor, v_RHD: Tensor) -> tuple[Tensor, Tensor]:
        """Write one more column: keys [R x H, D, C] and values [R x H, C, D] of the whole windows.

        For a layer without a window whose keys lie across.
        """
        g, (rows, heads, width) = self.geometry, k_RHD.shape
        self.live["keys"].select(2, g.column).copy_(k_RHD)
        self.live["values"].select(2, g.column).copy_(v_RHD)
        seen, each = g.column + 1 - g.low, g.columns * width
        return (
            self.buffers["keys"].as_strided((rows * heads, width, seen), (each, g.columns, 1), g.low),
            self.buffers["values"].as_strided((rows * heads, seen, width), (each, width, 1), g.low * width),
        )

    def get_seq_length(self) -> int:
        return self.geometry.column - self.geometry.low

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        seen = self.geometry.column - self.geometry.low
        if self.window is None or seen < self.window:
            return seen + query_length, 0
        return self.window - 1 + query_length, seen - self.window + 1


class QuantisedColumnLayer(ColumnLayer):  # type: ignore[no-untyped-call]
    """The same with E4M3 codes [S, H, C, D] and scales [S, H, C, 1] float32 for what `kv` quantises."""

    def __init__(self, geometry: Geometry, window: int | None, kv: KvFormat, where: str) -> None:
        super().__init__(geometry, window)
        self._kv, self._where = kv, where

    def _append(self, name: KvTensor, new: Tensor) -> Tensor:
        if name not in KV_QUANTISED[self._kv]:
            return super()._append(name, new)
        column = self.geometry.column
        for part, tensor in encode(name, new, self._where).items():
            self.live[part].select(-2, column).copy_(tensor.select(-2, 0))
        length, _ = self.get_mask_sizes(1)
        window = {part: self.live[part].narrow(-2, column + 1 - length, length) for part in parts(name)}
        return decode(name, window, new.dtype)


class SlotCache(Cache):
    """The whole batch's state as the `cache` argument of a decode step, attention context stored as `kv`.

    across   wide keys of whole contexts lie as `Direct` reads them
    """

    def __init__(self, config: Any, kv: KvFormat = "wide", across: bool = False) -> None:
        self.geometry = Geometry()
        self.slot_layers: list[ColumnLayer | StateLayer] = [
            _slot_layer(layer, self.geometry, kv, across, f"layer {i}")
            for i, layer in enumerate(DynamicCache(config=config).layers)
        ]
        super().__init__(layers=list(self.slot_layers))

    @property
    def plain(self) -> bool:
        """Every layer holds wide keys and values of the whole context."""
        return all(type(layer) is ColumnLayer and not layer.is_sliding for layer in self.slot_layers)

    def place(self, rows: Tensor, source: DynamicCache, index: Tensor, length: int) -> None:
        """Give slots `rows` the contexts `index` [len(rows)] of a prefill of `length` tokens each.

        New rows follow the live ones without a gap; call `set_rows` afterwards.
        """
        self._make_room(int(rows.max()) + 1, length)
        for own, prefilled in zip(self.slot_layers, source.layers, strict=True):
            own.place(rows, prefilled, index)

    def set_rows(self, rows: int, longest: int) -> None:
        """`rows` rows are live; the longest context has `longest` tokens."""
        changed = rows != self.geometry.rows
        self.geometry.rows = rows
        self.geometry.low = self.geometry.column - longest
        for layer in self.slot_layers:
            if changed or isinstance(layer, StateLayer):  # columns are written in place: their views stay
                layer.refresh()

    def reserve(self) -> None:
        """Make sure of a free column for the next step."""
        if self.geometry.column >= self.geometry.columns:
            self._make_room(0, 0)

    def advance(self) -> None:
        """A decode step has filled the shared column."""
        self.geometry.column += 1

    def move(self, source: int, target: int) -> None:
        """Copy slot `source` over slot `target`."""
        for layer in self.slot_layers:
            layer.move(source, target)

    def nbytes(self) -> CacheBytes:
        """Bytes allocated, by kind."""
        return sum((nbytes(layer.buffers) for layer in self.slot_layers), start=CacheBytes())

    def _make_room(self, slots: int, length: int) -> None:
        """Room for `slots` slots, a context of `length` tokens, and the next token."""
        g = self.geometry
        used = g.column - g.low if g.rows else 0
        need = max(used, length)
        fits = need <= g.column < g.columns
        columns = g.columns if fits else max(g.columns, _grown(need))
        if slots > g.slots or columns > g.columns:
            g.slots = max(slots, 2 * g.slots) if slots > g.slots else g.slots
            g.columns = columns
            for layer in self.slot_layers:
                layer.resize(g.slots, g.columns)
        if not fits:
            # the window goes as far left as the longest context allows
            shift = need - g.column
            if used and shift:
                for layer in self.slot_layers:
                    layer.shift(g.low, g.low + shift, used)
            g.column += shift
            g.low += shift
        for layer in self.slot_layers:
            layer.refresh()


def _grown(need: int) -> int:
    """Columns to allocate for `need`: twice as many, in blocks, so that moving and growing are rare."""
    return -(-2 * (need + 1) // _BLOCK) * _BLOCK


def _slot_layer(
    layer: Any, geometry: Geometry, kv: KvFormat, across: bool, where: str
) -> ColumnLayer | StateLayer:
    window: int | None = None
    match layer:
        case DynamicSlidingWindowLayer():
            window = layer.sliding_window
        case DynamicLayer() if type(layer) in (DynamicLayer, DynamicIndexedLayer):
            pass
        case LinearAttentionLayer() if type(layer) is LinearAttentionLayer:
            return StateLayer(geometry, layer.number_of_states)
        case _:
            raise UnknownLayer(layer)
    if kv == "wide":
        return ColumnLayer(geometry, window, across and window is None)
    return QuantisedColumnLayer(geometry, window, kv, where)
