"""Arithmetic on intervals of time. An interval is (start, end) in seconds; lists of them may overlap."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

Interval = tuple[float, float]


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """The same time, sorted and without overlap."""
    joined: list[Interval] = []
    for start, end in sorted(i for i in intervals if i[1] > i[0]):
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(joined[-1][1], end))
        else:
            joined.append((start, end))
    return joined


def length(intervals: Iterable[Interval]) -> float:
    """Seconds covered at least once."""
    return sum(end - start for start, end in union(intervals))


def inside(intervals: Iterable[Interval], window: Interval) -> list[Interval]:
    """The parts that lie in `window`."""
    low, high = window
    return [(max(start, low), min(end, high)) for start, end in intervals if start < high and end > low]


def overlap(left: Iterable[Interval], right: Iterable[Interval]) -> float:
    """Seconds covered by both."""
    theirs = union(right)
    return sum(length(inside(theirs, window)) for window in union(left))


def split(window: Interval, work: Sequence[tuple[str, Sequence[Interval]]]) -> dict[str, float]:
    """Seconds of `window` by what went on: each instant counts for the first of `work` that covers it.

    The seconds add up to the window, with "" for instants that nothing covers.
    """
    spent: dict[str, float] = {}
    taken: list[Interval] = []
    for name, intervals in work:
        before = length(taken)
        taken = union([*taken, *inside(intervals, window)])
        spent[name] = spent.get(name, 0.0) + length(taken) - before
    spent[""] = window[1] - window[0] - length(taken)
    return spent
