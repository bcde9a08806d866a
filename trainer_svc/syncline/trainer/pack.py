"""Which sequences go into one forward pass together. Pure."""

from __future__ import annotations

from collections.abc import Sequence

PASS_CELLS = 256
"""What one more forward and backward pass costs, in cells of padding that it may save."""
_STEPS = 128  # lengths are told apart to so many parts of the longest


def micro_batches(
    lengths: Sequence[int], micro_tokens: int, pass_cells: int | None = None
) -> list[list[int]]:
    """Indices of `lengths`, in rectangles of at most `micro_tokens` (rows x longest row).

    Longest first, so that rows of one rectangle are about equally long. A sequence that is longer than `micro_tokens`
    goes alone. The order depends on lengths and indices alone.

    pass_cells   with it, rectangles are as many as make the fewest cells, `pass_cells` for each rectangle counted in:
                 short rows are not padded beside a long one. None: each is filled before the next begins
    """
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    out: list[list[int]] = []
    for part in [order] if pass_cells is None else _parts(order, lengths, micro_tokens, pass_cells):
        fresh = True
        for index in part:
            if not fresh and (len(out[-1]) + 1) * max(1, lengths[out[-1][0]]) <= micro_tokens:
                out[-1].append(index)
            else:
                out.append([index])
                fresh = False
    return out


def _parts(
    order: Sequence[int], lengths: Sequence[int], micro_tokens: int, pass_cells: int
) -> list[Sequence[int]]:
    """`order` cut where that saves more padding than another pass costs: the cheapest cuts between unlike lengths."""
    if not order:
        return []
    grain = max(1, lengths[order[0]] // _STEPS)
    edges = [0]
    for at in range(1, len(order)):
        if -(-lengths[order[at]] // grain) != -(-lengths[order[at - 1]] // grain):
            edges.append(at)
    edges.append(len(order))
    # best[j]: cost of all before edges[j], and the edge where the last part begins
    best: list[tuple[int, int]] = [(0, 0)]
    for j in range(1, len(edges)):
        costs = []
        for i in range(j):
            rows, width = edges[j] - edges[i], max(1, lengths[order[edges[i]]])
            passes = -(-rows // max(1, micro_tokens // width))
            costs.append((best[i][0] + rows * width + passes * pass_cells, i))
        best.append(min(costs))
    parts, j = [], len(edges) - 1
    while j:
        i = best[j][1]
        parts.append(order[edges[i] : edges[j]])
        j = i
    return parts[::-1]


def padding_share(lengths: Sequence[int], batches: Sequence[Sequence[int]]) -> float:
    """Share of the rectangles' cells that is padding, 0 to 1."""
    cells = sum(len(batch) * max(lengths[i] for i in batch) for batch in batches if batch)
    return 0.0 if cells == 0 else 1 - sum(lengths) / cells
