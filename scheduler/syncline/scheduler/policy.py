"""Which mode would be faster, from what was measured: pure decisions, and the reader that brings the measurements.

Colocated, an update takes sampling + training + the cost of alternating. Disjoint, sampling and training overlap, so
it takes about the longer of the two; groups that the lag policy drops make it dearer. What a mode really took
counts more than what is predicted of it. A switch must pay: by a margin, several updates in a row, and in the
updates that are left more than it costs.
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
STEADY = 3  # newest updates in a row by which it must
WINDOW = 5  # updates that a measurement is the median of
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
    if (other == "disjoint" and not fits) or since_switch < WINDOW or len(here) < STEADY:
        return None
    recent = here[-WINDOW:]
    there = _expected(history, other, recent)
    if there is None:
        return None
    dear = [_cost(cycle) * (1 - MARGIN) > there for cycle in here[-STEADY:]]
    saved = median(_cost(cycle) for cycle in recent) - there
    toll = median(cycle.alternating for cycle in history if cycle.mode == "colocated") if history else 0.0
    return other if all(dear) and saved * left > 2 * toll + there else None


def _cost(cycle: Cycle) -> float:
    """Seconds per update, with what dropped groups add."""
    return cycle.whole / (1 - min(cycle.wasted, 0.9))


def _expected(history: Sequence[Cycle], other: Mode, recent: Sequence[Cycle]) -> float | None:
    """Seconds that an update would take in the other mode. None: nothing is known of it."""
    measured = [cycle for cycle in history if cycle.mode == other][-WINDOW:]
    if measured:
        return median(_cost(cycle) for cycle in measured)
    if other == "colocated":
        return None  # how long sampling takes alone cannot be told while both overlap
    return median(max(cycle.sampling, cycle.training) for cycle in recent)


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
