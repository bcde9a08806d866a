"""Which sequences go into one forward pass together. Pure."""

from __future__ import annotations

from collections.abc import Sequence


def micro_batches(lengths: Sequence[int], micro_tokens: int) -> list[list[int]]:
    """Indices of `lengths`, in rectangles of at most `micro_tokens` (rows x longest row).

    Longest first, so that rows of one rectangle are about equally long and little is padding. A sequence that
    is longer than `micro_tokens` goes alone. The order depends on lengths and indices alone.
    """
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    out: list[list[int]] = []
    for index in order:
        if out and (len(out[-1]) + 1) * max(1, lengths[out[-1][0]]) <= micro_tokens:
            out[-1].append(index)
        else:
            out.append([index])
    return out


def padding_share(lengths: Sequence[int], batches: Sequence[Sequence[int]]) -> float:
    """Share of the rectangles' cells that is padding, 0 to 1."""
    cells = sum(len(batch) * max(lengths[i] for i in batch) for batch in batches if batch)
    return 0.0 if cells == 0 else 1 - sum(lengths) / cells
