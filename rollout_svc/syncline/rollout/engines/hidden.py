"""What the rows of a batch may not look at, as attention adds it.

A row sees the columns from its own start on, and starts stay where they are until a row joins, leaves or grows beyond
the longest: between two such steps the window gains a column that all see. So the bias is made with columns to spare
and handed out column by column.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_SPARE = 64  # columns


class Hidden:
    """`heads`: heads of keys; each row's bias is repeated for them."""

    def __init__(self, heads: int) -> None:
        self._heads = heads
        self._starts: NDArray[np.int64] = np.zeros(0, np.int64)
        self._bias = torch.zeros(0, 1, 0)

    def bias(self, starts_R: NDArray[np.int64], columns: int) -> Tensor | None:
        """-inf before each row's start, else 0, [R x heads, 1, columns] float32; None: every row sees everything."""
        if not starts_R.any():
            return None
        if columns > self._bias.shape[2] or not np.array_equal(starts_R, self._starts):
            width = columns + _SPARE
            starts_N1 = np.repeat(starts_R, self._heads)[:, None]
            hidden_NC = np.where(np.arange(width)[None, :] < starts_N1, np.float32(-np.inf), np.float32(0))
            self._starts, self._bias = starts_R, torch.from_numpy(hidden_NC)[:, None]
        return self._bias.narrow(2, 0, columns)
