"""Which mode would be faster, from what was measured: pure decisions, and the reader that brings the measurements.

Colocated, an update takes sampling + training + the cost of alternating. Disjoint, sampling and training overlap, so
it takes about the longer of the two; groups that the lag policy drops make it dearer. What a mode really took
counts more than what is predicted of it, at what its phases have become since. A switch must pay: by a margin,
several updates in a row, and in the updates that are left more than it costs. A job that began disjoint tries
colocated where one side waits so much that it may pay, and where there is enough left to pay for the trial.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from statistics import median

import msgspec

from syncline.contract.events import Event, Mode, Phase, UpdateMetrics, Woke
from syncline.contract.job import JobSpec
from syncline.contract.streams import METRICS, PHASES
from syncline.runtime.bus import Bus, unpack
from syncline.scheduler.stages import State

MARGIN = 0.15  # share of an update's time that the other mode must save
TRIED = 0.03  # the same, to go back from the first stay in the other mode
STEADY = 3  # newest updates in a row by which it must
WINDOW = 5  # updates that a measurement is the median of
DEAREST = 0.05  # share of what is left that trying a mode may cost at worst
BUSY = 0.97  # share of a disjoint update from which on the trainer counts as what is waited for
SAMPLING = ("sample", "drain")


class Cycle(msgspec.Struct, frozen=True, kw_only=True):
    """One update as it was. All in seconds, from the mint before to its own."""

    mode: Mode
    whole: float
    sampling: float  # colocated: time with the gate open or draining; disjoint: the whole
    training: float  # scoring and stepping
    wasted: float = 0.0  # share of sampled groups that the lag policy dropped

    @property
    def alternating(self) -> float:
        """What neither sampling nor training accounts for."""
        return max(0.0, self.whole - self.sampling - self.training)


def cycles(metrics: Sequence[UpdateMetrics], phases: Sequence[Phase]) -> list[Cycle]:
    """The updates whose neighbours show how long they took: same mode, nothing paused in between."""
    found = []
    ends = [phase.at for phase in phases[1:]] + [float("inf")]
    for before, now in pairwise(metrics):
        if now.update != before.update + 1 or now.mode != before.mode or now.at <= before.at:
            continue
        inside = [
            (phase.phase, min(end, now.at) - max(phase.at, before.at))
            for phase, end in zip(phases, ends, strict=True)
            if phase.at < now.at and end > before.at
        ]
        if any(name == "paused" for name, _ in inside):
            continue
        whole = now.at - before.at
        sampling = sum(seconds for name, seconds in inside if name in SAMPLING)
        found.append(
            Cycle(
                mode=now.mode,
                whole=whole,
                sampling=sampling if now.mode == "colocated" else whole,
                training=now.seconds,
                wasted=now.expired / (now.expired + now.groups),
            )
        )
    return found


def decide(
    history: Sequence[Cycle], mode: Mode, left: int, fits: bool | None, since_switch: int
) -> Mode | None:
    """The mode to switch to, or None: stay.

    history        measured updates, oldest first
    left           updates still to make
    fits           whether both engines fit into the memory budget together; None: not known yet
    since_switch   updates made since the mode last changed
    """
    if mode == "disjoint" and fits is False:
        return "colocated"
    other: Mode = "disjoint" if mode == "colocated" else "colocated"
    here = [cycle for cycle in history if cycle.mode == mode]
    if (other == "disjoint" and not fits) or since_switch <= STEADY or len(here) < STEADY:
        return None
    recent = here[-WINDOW:]
    there = _expected(history, other, recent, left)
    if there is None:
        return None
    first = sum(before.mode != after.mode for before, after in pairwise(history)) == 1  # a trial, until now
    margin = TRIED if first else MARGIN
    dear = [_cost(cycle) * (1 - margin) > there for cycle in here[-STEADY:]]
    saved = median(_cost(cycle) for cycle in recent) - there
    tolls = [cycle.alternating for cycle in history if cycle.mode == "colocated"]
    toll = median(tolls) if tolls else 0.0
    return other if all(dear) and saved * left > 2 * toll + there else None


def _cost(cycle: Cycle) -> float:
    """Seconds per update, with what dropped groups add."""
    return cycle.whole / (1 - min(cycle.wasted, 0.9))


class _Middle(msgspec.Struct, frozen=True):
    """Medians of several updates in one mode. `busy`: the trainer is what the others wait for (disjoint)."""

    cost: float
    sampling: float
    training: float
    alternating: float

    @property
    def busy(self) -> bool:
        return self.training > BUSY * self.cost


def _middle(several: Sequence[Cycle]) -> _Middle:
    return _Middle(
        cost=median(_cost(cycle) for cycle in several),
        sampling=median(cycle.sampling for cycle in several),
        training=median(cycle.training for cycle in several),
        alternating=median(cycle.alternating for cycle in several),
    )


def _expected(history: Sequence[Cycle], other: Mode, recent: Sequence[Cycle], left: int) -> float | None:
    """Seconds that an update would take in the other mode. None: nothing is known of it, and trying it is too dear."""
    last = max((i for i, cycle in enumerate(history) if cycle.mode == other), default=None)
    now = _middle(recent)
    if last is None:
        return (
            median(max(c.sampling, c.training) for c in recent) if other == "disjoint" else _tried(now, left)
        )
    there = _middle([cycle for cycle in history[: last + 1] if cycle.mode == other][-WINDOW:])
    beside = history[last + 1 :][:WINDOW]  # the first updates after the other mode: the same work in this one
    if not beside:
        return there.cost
    then = _middle(beside)
    return _overlapped(there, then, now) if other == "disjoint" else _alternated(there, then, now)


def _overlapped(there: _Middle, then: _Middle, now: _Middle) -> float:
    """Disjoint, as it was measured, at what sampling and training have become since (both colocated)."""
    if then.training <= 0 or then.sampling <= 0:
        return there.cost
    slower = there.training / then.training
    sampling = min(there.cost, then.sampling * slower) if there.busy else there.cost
    return max(sampling * now.sampling / then.sampling, there.training * now.training / then.training)


def _alternated(there: _Middle, then: _Middle, now: _Middle) -> float:
    """Colocated, as it was measured, at what an update has become since (both disjoint).

    How long sampling takes is seen while the trainer waits for it; else it is taken as it last was alone. That may be
    too little, and is then measured.
    """
    if then.training <= 0:
        return there.cost
    grown = 1.0 if now.busy or then.busy else now.cost / then.cost
    return there.sampling * grown + there.training * now.training / then.training + there.alternating


def _tried(now: _Middle, left: int) -> float | None:
    """Colocated at its best, where every phase is twice as fast on both sides' hardware; None: to try costs too much.

    How long sampling takes alone cannot be told while both overlap, so a few updates have to tell. At worst each takes
    training's time more than now, and that may not cost more than `DEAREST` of the updates that are left.
    """
    if (STEADY + 1) * now.training > DEAREST * left * now.cost:
        return None
    return now.cost / 2 if now.busy else (now.cost + now.training) / 2


class Policy:
    """Reads the measurements of one job and wishes for a mode, when the spec asks for it."""

    def __init__(self, bus: Bus, job: str, spec: JobSpec) -> None:
        self._bus, self._job, self._spec = bus, job, spec
        self._resident: dict[str, int] = {}
        self._asked = 0  # the update at which it last looked

    def note(self, event: Event) -> None:
        """Remember how much memory an awake engine takes."""
        if isinstance(event, Woke):
            self._resident[event.who] = event.resident

    def wish(self, state: State) -> Mode | None:
        """The mode to switch to, asked once per update. None: stay."""
        if self._spec.schedule.policy == "fixed" or state.minted is None or state.wanted != state.mode:
            return None
        update = state.minted.number
        if update == self._asked:
            return None
        self._asked = update
        metrics = [unpack(entry, UpdateMetrics) for entry in self._bus.range(METRICS.at(self._job))]
        phases = [unpack(entry, Phase) for entry in self._bus.range(PHASES.at(self._job))]
        changed = [after.update for before, after in pairwise(phases) if before.mode != after.mode]
        return decide(
            cycles(metrics, phases),
            state.mode,
            self._spec.schedule.updates - update,
            fits(self._resident, state, self._spec.device.memory_mb << 20),
            update - (changed[-1] if changed else 0),
        )


def fits(resident: Mapping[str, int], state: State, budget: int) -> bool | None:
    """Whether all engines together stay inside `budget` bytes; None while one of them was never awake."""
    if not all(name in resident for name in state.engines):
        return None
    return sum(resident[name] for name in state.engines) <= budget
