"""Whole fleets in virtual time: `python bench/simulate.py [--workers N ...] [--updates N] [--json PATH] [--short]`.

The real scheduler machine, lag bound and activation machine (`sim_world.py`) among simulated engines, with the phase
times of published runs (`sim_cases.py`) and with up to 10,000 workers, stragglers and failures. A speed-up is that of
the disjoint run over the colocated one of the same case, first updates left out. Needs neither torch nor Redis.

What the model leaves out is said in `docs/scale.md`.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from statistics import mean, median, quantiles

import msgspec
import sim_cases
import sim_wire
from rows import Row, Say, note, table
from sim_cases import Case, Mode
from sim_world import World

COMMAND = "python bench/simulate.py"
FIRST = 2  # updates that fill the pipeline
SCALES = (100, 1_000, 10_000)
MODES: tuple[Mode, ...] = ("colocated", "disjoint")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--workers", type=int, nargs="+", default=list(SCALES), help="sizes of fleet to simulate"
    )
    parser.add_argument("--updates", type=int, default=12, help="updates of each run (default: 12)")
    parser.add_argument("--json", type=Path, help="write all rows there")
    parser.add_argument("--short", action="store_true", help="20 workers and one published case")
    given = parser.parse_args()
    if given.updates < FIRST + 2:
        parser.error(f"--updates {given.updates}: at least {FIRST + 2}, since the first {FIRST} are left out")
    if min(given.workers) < 2:
        parser.error(f"--workers {min(given.workers)}: at least 2")
    rows = (
        measure((20,), (sim_cases.thirty_b,), 4)
        if given.short
        else measure(given.workers, None, given.updates)
    )
    print(table(rows))
    if given.json is not None:
        given.json.write_bytes(msgspec.json.format(msgspec.json.encode(rows), indent=1) + b"\n")


def measure(workers: Sequence[int], cases: Sequence[sim_cases.Make] | None, updates: int) -> list[Row]:
    """Published cases, then fleets by size."""
    say = Say("simulate", COMMAND)
    for make in cases or sim_cases.PUBLISHED:
        _published(say, make(), updates)
    for count in workers:
        _scale(say, sim_cases.wide(count), min(updates, 5))
    return say.rows


def _published(say: Say, case: Case, updates: int) -> None:
    step: dict[Mode, float] = {}
    for mode in MODES:
        note(f"{case.name}, {mode}: {updates} updates")
        world = World(case, mode, updates)
        world.run()
        step[mode] = _told(say, f"{case.name}, {mode}", world)
    against = "colocated" if case.published is None else f"colocated; published {case.published:.2f}"
    say.ratio(case.name, "speed-up of disjoint", [step["colocated"] / step["disjoint"]], against)


def _scale(say: Say, case: Case, updates: int) -> None:
    for mode in MODES:
        note(f"{case.name}, {mode}: {updates} updates")
        world = World(case, mode, updates)
        world.run()
        name = f"{case.name}, {mode}"
        _told(say, name, world)
        say.count(name, "failures", world.failures, "workers")
        say.count(name, "begun anew", world.lost, "requests")
        say.count(name, "events through the machine", world.decisions["machine"], "events")
        say.time(name, "one decision, with its invariants", [_each(world, "machine")], "us CPU")
        say.time(
            name,
            "sync's part of one answer",
            [world.spent["sync"] / world.decisions["sync answers"] * 1e6],
            "us CPU",
        )


def _each(world: World, what: str) -> float:
    return world.spent[what] / world.decisions[what] * 1e6


def _told(say: Say, name: str, world: World) -> float:
    """The rows of one run; returns seconds per update."""
    ends = world.mints[FIRST:]
    step = mean(after - before for before, after in pairwise(ends))
    fleet, case = world.fleet, world.case
    say.count(name, "step", step, "virtual s")
    say.count(name, "goodput", world.tokens / world.now, "trained tokens per virtual s")
    say.share(name, "trainer at work", world.training / world.now, "time")
    say.share(name, "slots decoding", world.busy / (world.now * case.slots * fleet.workers), "slots")
    say.count(name, "mean lag", _mean(world.lags), "updates")
    say.count(name, "largest lag", max(world.lags), f"updates of {case.max_lag} allowed")
    first, last = _fan_out(world)
    say.count(name, "minted to active on the first worker", median(first), "virtual s")
    say.count(name, "minted to active on 99 % of workers", median(last), "virtual s")
    say.count(
        name, "trajectory stream", sim_wire.trajectories(world) / len(world.mints) / 1e6, "MB per update"
    )
    say.count(
        name, "orders and answers of sync", sim_wire.control(world) / len(world.mints) / 1e3, "KB per update"
    )
    return step


def _mean(lags: Counter[int]) -> float:
    return sum(lag * count for lag, count in lags.items()) / lags.total()


def _fan_out(world: World) -> tuple[list[float], list[float]]:
    """Per version: seconds until the first worker, and until all but 1 % of those that got it, served it."""
    first, last = [], []
    for version, times in sorted(world.actives.items())[1:]:
        since = [at - world.mints[version] for at in times]
        first.append(min(since))
        last.append(quantiles(since, n=100)[-1] if len(since) > 1 else since[0])
    return first, last


if __name__ == "__main__":
    main()
