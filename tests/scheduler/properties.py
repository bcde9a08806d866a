"""What must hold of the machine in every story, as functions that a mutant can be put to as well."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from typing import NamedTuple

from hypothesis import strategies as st
from machine_world import Group, Machine, World, Wrong

from syncline.contract import events as e


class Story(NamedTuple):
    """A world, and the choices made in it."""

    mode: e.Mode
    updates: int
    max_lag: int
    seed: int  # of the choices
    length: int  # number of choices
    calm: int  # about one choice in `calm` is a disturbance
    taste: int  # which kinds of disturbance
    slow: str  # process that seldom reads its orders; "": none


def stories() -> st.SearchStrategy[Story]:
    return st.builds(
        Story,
        mode=st.sampled_from(["colocated", "disjoint"]),
        updates=st.integers(1, 5),
        max_lag=st.integers(1, 2),
        seed=st.integers(0, 2**32),
        length=st.integers(50, 500),
        calm=st.sampled_from([3, 8, 25]),
        taste=st.sampled_from([0, 0, 1, 2, 3, 4, 5, 6, 6]),
        slow=st.sampled_from(["", "w0", "trainer"]),
    )


def told(on: Machine, story: Story) -> World:
    """The world after the story. Choices come from the seed: long stories go deep, short ones are what shrinks."""
    world = World(on, story.updates, story.mode, story.max_lag, story.slow)
    dice = random.Random(story.seed)
    for _ in range(story.length):
        world.act(dice, story.calm, story.taste)
    return world


def safe(on: Machine, story: Story) -> None:
    """No invariant breaks, no two engines share a device, nothing is trained beyond the bound."""
    told(on, story)


def repeats(on: Machine, story: Story) -> None:
    """An event that was taken once changes nothing at any later time. A user's wishes are no such events."""
    world = World(on, story.updates, story.mode, story.max_lag, story.slow)
    dice = random.Random(story.seed)
    for turn in range(story.length):
        world.act(dice, story.calm, story.taste)
        for event in set(world.log) if turn % 12 == 0 else ():
            if isinstance(event, e.SwitchTo | e.Pause | e.Resume | e.ScaleTo):
                continue
            again = on.machine.step(world.state, event)
            if again != (world.state, ()):
                raise Wrong(f"{event} again, in {world.state}, gives {again}")


def live(on: Machine, story: Story) -> None:
    """Whatever happened, a fair world afterwards brings the job to its end."""
    told(on, story).settle()


def switches_end(on: Machine, story: Story) -> None:
    """The mode last asked for is the mode, unless the job ended first."""
    world = told(on, story)
    world.settle(stop=lambda: not world.coming and world.state.mode == world.state.wanted)


def pools_settle(on: Machine, story: Story) -> None:
    """In the end there are as many workers as were last wanted, each with a process, unless the job ended first."""
    world = told(on, story)
    world.settle(stop=lambda: not world.coming and not on.stages.leaving(world.state))
    if world.result is None:
        fleet = {name for name in world.state.engines if name != "trainer"}
        wanted = {f"w{i}" for i in range(world.state.pool)}
        if fleet != wanted or {name for name in world.processes if name != "trainer"} != wanted:
            raise Wrong(f"{world.state.pool} workers are wanted, and there are {sorted(fleet)}")


def folds(on: Machine, story: Story) -> None:
    """Folding the log gives the state again, also from a state that was saved and loaded on the way."""
    world = told(on, story)
    if on.machine.fold(world.first, world.log) != world.state:
        raise Wrong("folding the log gives another state")
    half = len(world.log) // 2
    middle = on.machine.fold(world.first, world.log[:half])
    loaded = on.stages.restored(on.stages.saved(middle))
    if on.machine.fold(loaded, world.log[half:]) != world.state:
        raise Wrong("a state that was saved and loaded goes another way")


def pauses_hold(on: Machine, story: Story) -> None:
    """A pause that nobody ends comes to rest: nothing in flight, all asleep, nothing more to do."""
    told(on, story).rest()


def late_losses(on: Machine, story: Story) -> None:
    """A trainer lost between its last update and its word that it has finished is woken again to say so."""
    world = told(on, story)
    world.coming = [event for event in world.coming if not isinstance(event, e.Pause)]
    world.coming.append(e.Resume())
    world.fair(lambda: world.result is not None or world.version() >= story.updates)
    trainer = world.processes["trainer"]
    if trainer.alive and not world.state.finished:
        world.kill(trainer)
    world.settle()


def late_listeners(on: Machine, story: Story) -> None:
    """A worker that hears late of a shut gate begins something: rollout must not be asleep by then."""
    world = told(on, story)
    world.coming = [event for event in world.coming if not isinstance(event, e.Pause)]
    world.coming.append(e.Resume())
    world.fair(lambda: world.result is not None or (world.allowed and not world.coming))
    if world.result is None:
        world.groups.append(Group())
        world.coming.append(e.Pause())
        world.fair(lambda: world.result is not None, still="w0")
        world.wake_up("w0")
        world.settle()


PROPERTIES: Mapping[str, Callable[[Machine, Story], None]] = {
    "safe": safe,
    "repeats": repeats,
    "live": live,
    "late losses": late_losses,
    "late listeners": late_listeners,
    "switches end": switches_end,
    "pools settle": pools_settle,
    "folds": folds,
    "pauses hold": pauses_hold,
}
