"""Disjoint against colocated on two cores, against the bound of each, and what the policy makes of it.

The real machine, lag bound, activation and policy in virtual time (`sim_world.py`, `sim_switching.py`): exact, and the
same on every machine. Sampling takes some two minutes of an update when both cores sample; training takes a third,
as much, or three times that.

    shared   every phase uses both cores: on one core of its own (disjoint) it takes twice as long
    apart    no phase gets faster by a second core (decoding waits for memory, training for its own order): disjoint
             overlaps the two for nothing
    mixed    sampling takes twice as long on one core, training does not: which mode is better depends on the ratio

Bounds, per update, of sampling S (slot-seconds over slots) and training T in that mode: colocated S + T, disjoint
the longer of them. Nothing is added for waking, sleeping, publishing, or for slots that empty while the last requests
end. "Best fixed" is the mode that makes the same updates sooner. A drift moves training from a third of sampling to
three times, by the same factor each update.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import mean

import msgspec
from rows import Row, Say, note, table
from sim_cases import Case, Fleet, Mode
from sim_switching import Switching

COMMAND = "python bench/schedules.py"
MODES: tuple[Mode, ...] = ("colocated", "disjoint")
FIRST = 2  # updates that fill the pipeline
SAMPLING = 120.0
RATIOS = {"1:1": 1.0, "3:1": 1 / 3, "1:3": 3.0}  # rollout:train -> training over sampling
# how many times longer sampling and training take in disjoint mode
SLOWER = {"shared": (2.0, 2.0), "apart": (1.0, 1.0), "mixed": (2.0, 1.0)}
FLEET = Fleet(workers=2, train=0.0, publish=1.0, stage=1.0, commit=0.1, wake=1.0, sleep=1.0)
CASE = Case(
    name="two cores",
    source="none: phases shaped to ratios",
    assumed="8 slots, 64 requests of some 15 s",
    groups=8,
    members=8,
    median=1_500,
    sigma=0.2,
    longest=3_000,
    token=0.01,
    slots=4,
    fleets={mode: FLEET for mode in MODES},
)
Shape = Callable[[int], float]


def steady(ratio: float) -> Shape:
    """Training over sampling, the same at every update."""
    return lambda _: ratio


def drift(updates: int, back: bool) -> Shape:
    """Training over sampling at an update: from 1/3 to 3 (or back), by the same factor each update."""
    return lambda update: 3.0 ** ((2 * update / updates - 1) * (-1 if back else 1))


def measure(updates: int, machines: Sequence[str] = tuple(SLOWER)) -> list[Row]:
    """The rows of this part, all in virtual time. `machines`: names of `SLOWER`."""
    say = Say("schedules", f"{COMMAND} --updates {updates}")
    for cores in machines:
        for name, ratio in RATIOS.items():
            note(f"schedules: {cores}, {name}")
            shaped = steady(ratio)
            fixed = {mode: run(cores, mode, updates, shaped, False) for mode in MODES}
            case = f"cores {cores}, rollout:train {name}"
            for mode, world in fixed.items():
                bound, step = limit(world, cores, mode, ratio), seconds_per_update(world)
                say.share(case, f"bound over step, {mode}", bound / step, f"the bound of {mode}")
                say.count(case, f"step, {mode}", step, "virtual s")
            judged(say, case, cores, updates, shaped, fixed)
        for back in (False, True):
            note(f"schedules: {cores}, drift")
            shaped = drift(updates, back)
            fixed = {mode: run(cores, mode, updates, shaped, False) for mode in MODES}
            way = "1:3 to 3:1" if back else "3:1 to 1:3"
            judged(say, f"cores {cores}, rollout:train drifts {way}", cores, updates, shaped, fixed)
    return say.rows


def judged(
    say: Say, case: str, cores: str, updates: int, shaped: Shape, fixed: dict[Mode, Switching]
) -> None:
    """The policy's run from either mode, against the better of the fixed ones."""
    best = min(fixed, key=lambda mode: fixed[mode].now)
    for mode in MODES:
        world = run(cores, mode, updates, shaped, True)
        against = f"fixed {best}"
        say.ratio(
            case,
            f"time of all updates, policy from {mode} over best fixed",
            [world.now / fixed[best].now],
            against,
        )
        share = sum(metric.mode == best for metric in world.metrics) / len(world.metrics)
        say.share(case, f"updates in the better mode, policy from {mode}", share, against)
        note(f"{case}: from {mode}: best {best}, changes {world.changes}")


def run(cores: str, mode: Mode, updates: int, shaped: Shape, policy: bool) -> Switching:
    """A job to its end."""
    world = Switching(
        CASE,
        mode,
        updates,
        train=lambda update, mode: SAMPLING * shaped(update) * slower(cores, mode)[1],
        slow=lambda mode: slower(cores, mode)[0],
        policy=policy,
    )
    world.run()
    return world


def slower(cores: str, mode: Mode) -> tuple[float, float]:
    return SLOWER[cores] if mode == "disjoint" else (1.0, 1.0)


def limit(world: Switching, cores: str, mode: Mode, ratio: float) -> float:
    """Seconds per update that nothing in this mode can beat."""
    sampling = world.busy / world.submitted_updates / (CASE.slots * FLEET.workers)
    training = SAMPLING * ratio * slower(cores, mode)[1]
    return sampling + training if mode == "colocated" else max(sampling, training)


def seconds_per_update(world: Switching) -> float:
    return mean(after - before for before, after in pairwise(world.mints[FIRST:]))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--updates", type=int, default=200, help="updates of each run (default: 200)")
    parser.add_argument("--cores", choices=tuple(SLOWER), nargs="*", help="only these")
    parser.add_argument("--json", type=Path, help="write all rows there")
    given = parser.parse_args()
    if given.updates < FIRST + 2:
        parser.error(f"--updates {given.updates}: at least {FIRST + 2}, since the first {FIRST} are left out")
    found = measure(given.updates, given.cores or tuple(SLOWER))
    print(table(found))
    if given.json is not None:
        given.json.write_bytes(msgspec.json.encode(found))
