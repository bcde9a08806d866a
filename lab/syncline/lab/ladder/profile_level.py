"""Level 9: where the time of an update goes, phase by phase and, inside the trainer, operand by operand.

Measured on this machine by the interpreter's own profiler, so that shares mean something and seconds little. Counts
mean the same anywhere: a weight's codes are made once per version and side, whatever the number of micro-batches.
"""

from __future__ import annotations

import cProfile
import pstats
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

from syncline.lab.ladder.records import Check
from syncline.lab.ladder.subject import Subject, learn, narrow
from syncline.lab.pair import Pair

UPDATES = 3
SIDES = 2
"""A weight's codes along K for FProp, along N for DGrad."""
REST = 0.15
"""Of an update: what lies between its phases."""
Shares = dict[str, float]
T = TypeVar("T")
INSIDE = {
    "scale construction and codes": ("numerics/quantized.py", "quantize"),
    "values of codes": ("numerics/quantized.py", "dequantize"),
    "products of codes": ("numerics/gemm.py", "from_codes"),
    "wide products of low-bit operands": ("numerics/gemm.py", "wide"),
}
"""What is looked at inside a training step -> file and function whose time, with all they call, is its."""


def checks(subject: Subject) -> Iterator[Check]:
    """A few updates after one that warms everything up."""
    pair = Pair(narrow(subject.spec), subject.models, subject.new_folder("profiled"))
    _update(pair, {}, 0)
    spent: Shares = {}
    profile, began = cProfile.Profile(), time.perf_counter()
    for update in range(1, UPDATES + 1):
        _update(pair, spent, update, profile)
    whole = time.perf_counter() - began
    for phase, seconds in spent.items():
        yield _told(f"share of {phase}", seconds / whole)
    yield Check(
        name="time between the phases",
        found=1 - sum(spent.values()) / whole,
        bound=REST,
        source="the phases are the update",
        unit="of an update",
    )
    stats = pstats.Stats(profile)
    training = spent["training"]
    for name, (file, function) in INSIDE.items():
        yield _told(f"training: {name}", _of(stats, file, function)[1] / training)
    yield _repeats(subject, stats)


def _update(pair: Pair, spent: Shares, update: int, profile: cProfile.Profile | None = None) -> None:
    """Publish, sample, score and train, each phase timed; the training under `profile`."""
    spec = pair.spec
    first = update * spec.batch.groups
    _timed(spent, "publishing and staging", pair.publish)
    records = _timed(
        spent, "sampling", lambda: pair.sample(range(first, first + spec.batch.groups), spec.batch.group_size)
    )
    _timed(spent, "scoring", lambda: pair.score_trainer(records))

    def train() -> None:
        if profile is None:
            learn(pair, records)
        else:
            profile.runcall(learn, pair, records)

    _timed(spent, "training", train)


def _timed(spent: Shares, phase: str, work: Callable[[], T]) -> T:
    began = time.perf_counter()
    done = work()
    spent[phase] = spent.get(phase, 0.0) + time.perf_counter() - began
    return done


def _told(name: str, share: float) -> Check:
    """A figure to read: nothing that it may not be."""
    return Check(name=name, found=share, bound=1.0, source="measured here, to be read", unit="of its whole")


def _of(stats: pstats.Stats, file: str, function: str) -> tuple[int, float]:
    """Calls of a function, and seconds with all that it calls."""
    found = [
        (row[1], row[3])
        for (path, _, name), row in stats.stats.items()  # type: ignore[attr-defined]  # typeshed leaves it out
        if name == function and path.endswith(file)
    ]
    return sum(calls for calls, _ in found), sum(seconds for _, seconds in found)


def _repeats(subject: Subject, stats: pstats.Stats) -> Check:
    owners = len(subject.serving().packed.stacks)
    made, _ = _of(stats, "numerics/gemm.py", "quantize_stack")
    each = made / (owners * UPDATES) if owners else 0.0
    return Check(
        name="codes made of a weight, per version",
        found=each,
        bound=SIDES,
        source="once along K, once along N",
        unit="times",
        where="" if each <= SIDES else "scales are constructed anew for every micro-batch",
    )
