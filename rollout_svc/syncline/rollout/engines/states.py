"""What a batch's slots share, and the slots of linear attention: one state per row, read and written at every token.

Legend: S slots.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import LinearAttentionLayer


class Geometry:
    """What all layers share: live rows, and the window of columns in use."""

    def __init__(self) -> None:
        self.rows = 0
        self.slots = 0
        self.low = 0  # first column that any row uses
        self.column = 0  # the next token's column
        self.columns = 0  # columns allocated


class StateLayer(LinearAttentionLayer):
    """Convolution and recurrent states [S, ...] of one linear-attention layer."""

    def __init__(self, geometry: Geometry, number_of_states: int) -> None:
        super().__init__(number_of_states=number_of_states)
        self.geometry = geometry
        self.buffers: dict[tuple[str, int], Tensor] = {}

    def place(self, rows: Tensor, source: Any, index: Tensor) -> None:
        """Copy the prefilled states `index` of `source` to slots `rows`."""
        for kind, states in (("conv", source.conv_states), ("recurrent", source.recurrent_states)):
            for i, state in states.items():
                if state is None:
                    continue
                if (kind, i) not in self.buffers:
                    self.buffers[kind, i] = torch.zeros(
                        (self.geometry.slots, *state.shape[1:]), dtype=state.dtype
                    )
                self.buffers[kind, i][rows] = state.index_select(0, index)
        for i in range(self.number_of_states):
            self.conv_kernel_size[i] = source.conv_kernel_size[i]
            self.is_conv_states_initialized[i] = source.is_conv_states_initialized[i]
            self.is_recurrent_states_initialized[i] = source.is_recurrent_states_initialized[i]
            self.has_previous_state[i] = source.has_previous_state[i]
        self.device, self.dtype = source.device, source.dtype

    def resize(self, slots: int, columns: int) -> None:
        for key, old in self.buffers.items():
            self.buffers[key] = torch.zeros((slots, *old.shape[1:]), dtype=old.dtype)
            self.buffers[key][: old.shape[0]].copy_(old)

    def shift(self, source: int, target: int, count: int) -> None:
        """States have no columns."""

    def move(self, source: int, target: int) -> None:
        for buffer in self.buffers.values():
            buffer[target].copy_(buffer[source])

    def refresh(self) -> None:
        # views: transformers updates these states in place
        for (kind, i), buffer in self.buffers.items():
            states = self.conv_states if kind == "conv" else self.recurrent_states
            states[i] = buffer[: self.geometry.rows]
