"""A random history of one job, from its seed alone, and its end: everything heals and everyone serves the newest."""

from __future__ import annotations

import gc
import logging
import sys
import tempfile
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from random import Random
from typing import NamedTuple

import torch
import true_weights
from true_world import WAIT, Clock, World, clock_of_histories

from syncline.contract.version_path import VersionId
from syncline.rollout.engine import CommitPolicy

NAMES = ("w0", "w1", "w2")
STEPS = 40
ROUNDS = 45  # of the end, a second each: a lost answer is waited for


def policy(random: Random) -> CommitPolicy:
    """One of the ways to commit under running requests."""
    kind = random.choice(("drain", "continue_old", "in_place", "in_place"))
    if kind != "in_place":
        return CommitPolicy(kind="drain" if kind == "drain" else "continue_old")
    kv = random.choice(("recomputed", "carried", "carried"))
    return CommitPolicy(
        kind="in_place",
        kv="carried" if kv == "carried" else "recomputed",
        carried_age=random.choice((1, 2, 4)),
    )


class History:
    """See `run`."""

    def __init__(self, seed: int, url: str, runs: Path, models: Path, clock: Clock) -> None:
        self.random = Random(seed)
        mode = self.random.choice(("colocated", "disjoint"))
        self.world = World(
            url, f"j{seed:010x}", runs, models, clock, "colocated" if mode == "colocated" else "disjoint"
        )
        self.policy = policy(self.random)
        self.version: VersionId | None = None
        self.serial = 0
        for name in NAMES[: self.random.randint(1, 3)]:
            self.world.add(name, self.policy)

    def run(self) -> None:
        """All of it. Raises `AssertionError` where something was not as it must be."""
        actions = [method for method, weight in ACTIONS for _ in range(weight)]
        self.mint()
        for _ in range(STEPS):
            self.random.choice(actions)(self)
            self.everybody()
        self.heal()

    def everybody(self) -> None:
        """Sync and the seats, each with some probability, in any order."""
        turns: list[Callable[[], None]] = [self.world.sync_turn] if self.random.random() < 0.75 else []
        for seat in self.world.seats.values():
            if self.random.random() < 0.6:
                seat.hands.finish()
            if self.random.random() < 0.8:
                turns.append(partial(seat.turn, self.random.choice((1, 1, 2, 4))))
            if self.random.random() < 0.5:
                prompt = tuple(self.random.randrange(90) for _ in range(self.random.randint(1, 5)))
                seat.ask(prompt, self.random.randint(1, 14))
        self.random.shuffle(turns)
        for turn in turns:
            turn()

    # ---- what may happen
    def mint(self) -> None:
        """An update, or a trainer that resumed further back; now and then with the very same weights."""
        if self.version is None:
            self.version = VersionId(0, 0)
        elif self.random.random() < 0.1:
            self.version = VersionId(
                self.version.epoch + 1, max(0, self.version.number - self.random.randint(0, 2))
            )
        else:
            self.version = VersionId(
                self.version.epoch, self.version.number + self.random.choice((1, 1, 1, 2))
            )
        if self.random.random() < 0.9:
            self.serial += 1
        canary, damaged = self.random.random() < 0.5, self.random.random() < 0.05
        self.world.mint(self.version, self.serial, canary=canary, damaged=damaged)

    def damage(self) -> None:
        self.world.damage_blob(self.random.randrange(100))

    def lie(self) -> None:
        for seat in self.some():
            seat.lie(self.random.randrange(12))

    def add(self) -> None:
        """A new worker, or another process in the place of one."""
        self.world.add(self.random.choice(NAMES), self.policy)

    def remove(self) -> None:
        if self.world.seats:
            self.world.remove(self.random.choice(sorted(self.world.seats)))

    def switch(self) -> None:
        self.world.want("colocated" if self.world.mode == "disjoint" else "disjoint", self.world.awake)

    def nap(self) -> None:
        self.world.want(self.world.mode, not self.world.awake)

    def kill_sync(self) -> None:
        """At once, or at one of the next places where it changes something."""
        if self.random.random() < 0.3:
            self.world.control = None
        else:
            self.world.fuse.left = self.random.randrange(40)

    def mumble(self) -> None:
        for seat in self.some():
            seat.mouth.fate = self.random.choice(("send", "drop", "hold"))

    def release(self) -> None:
        for seat in self.some():
            seat.mouth.fate = "send"
            seat.mouth.release()

    def repeat(self) -> None:
        for seat in self.some():
            seat.mouth.repeat(self.random.randrange(6))

    def wait(self) -> None:
        self.world.clock.at += self.random.choice((0.6, 4.0, 6.0, WAIT / 2 + 1, WAIT + 1))
        for seat in self.world.seats.values():
            seat.beat()

    def some(self) -> list:  # type: ignore[type-arg]
        """One seat, if there is one."""
        return [self.world.seats[self.random.choice(sorted(self.world.seats))]] if self.world.seats else []

    # ---- the end
    def heal(self) -> None:
        """Nothing fails any more; a clean version must reach every seat, and every seat must sample with it."""
        world = self.world
        world.fuse.left = None
        for seat in world.seats.values():
            seat.mouth.fate, seat._lie = "send", None
            seat.mouth.release()
        if not world.seats:
            world.add("w0", self.policy)
        world.want(world.mode, awake=True)
        assert self.version is not None
        self.version, self.serial = VersionId(self.version.epoch, self.version.number + 1), self.serial + 1
        world.mint(self.version, self.serial, canary=True, damaged=False)
        for _ in range(ROUNDS):
            self.round()
            if all(
                seat.engine.serving and seat.engine.serving[0] == self.version
                for seat in world.seats.values()
            ):
                break
        stuck = {n: (s.engine.serving, s.orders.trouble) for n, s in world.seats.items()}
        assert all(s and s[0] == self.version for s, _ in stuck.values()), f"{self.version} not on {stuck}"
        for seat in world.seats.values():
            seat.ask((5, 6), 3)
        before = world.tokens
        while any(seat.engine.running for seat in world.seats.values()):
            self.round()
        assert world.tokens >= before + 3 * len(world.seats)

    def round(self) -> None:
        self.world.clock.at += 1.0
        self.world.sync_turn()
        for seat in self.world.seats.values():
            seat.hands.finish()
            seat.turn()


ACTIONS = (
    (History.mint, 4),
    (History.damage, 1),
    (History.lie, 2),
    (History.add, 1),
    (History.remove, 1),
    (History.switch, 1),
    (History.nap, 1),
    (History.kill_sync, 2),
    (History.mumble, 2),
    (History.release, 1),
    (History.repeat, 1),
    (History.wait, 2),
    (lambda _: None, 8),
)


class Told(NamedTuple):
    """What some histories went through."""

    histories: int = 0
    tokens: int = 0  # judged
    spans: int = 0
    carried: int = 0  # of them
    kills: int = 0  # of sync
    refusals: int = 0  # versions that a worker did not take


def histories(seeds: Iterable[int], url: str, folder: Path) -> Told:
    """Run them. Raises `AssertionError` naming the seed of the first that went wrong."""
    models = true_weights.model_root(folder / "models")
    torch.set_num_threads(1)
    logging.disable(logging.CRITICAL)  # thousands of refusals, all of them wanted
    gc.collect()
    gc.freeze()  # an engine that sleeps collects what is garbage, and looks at everything for it
    told = Told()
    try:
        for seed in seeds:
            told = Told(*map(sum, zip(told, _one(seed, url, folder / "runs", models), strict=True)))
    finally:
        gc.unfreeze()
        logging.disable(logging.NOTSET)
    return told


def _one(seed: int, url: str, runs: Path, models: Path) -> Told:
    with clock_of_histories() as clock:
        history = History(seed, url, runs, models, clock)
        world = history.world
        try:
            history.run()
        except (AssertionError, ValueError, LookupError, RuntimeError) as error:
            raise AssertionError(f"history of seed {seed}: {type(error).__name__}: {error}") from error
        finally:
            world.close()
        return Told(1, world.tokens, world.spans, world.carried, world.kills, world.refusals)


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO)
    with tempfile.TemporaryDirectory() as scratch:
        _one(
            int(sys.argv[2]),
            sys.argv[1],
            Path(scratch) / "runs",
            true_weights.model_root(Path(scratch) / "models"),
        )
