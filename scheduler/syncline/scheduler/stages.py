"""The stages of a job as data: what each orders, which facts a state holds, which facts lead where.

`machine.py` tells the story and does the stepping; whoever wants to know what can follow what reads `ROWS`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, NamedTuple

import msgspec
from immutables import Map

from syncline.contract import events as e
from syncline.contract.version_path import VersionId

Stage = Literal["train", "yield", "sync", "sample", "drain", "clear", "join", "flow", "paused", "done"]
TRAINER = "trainer"


def worker(number: int) -> str:
    """The name of a rollout worker."""
    return f"w{number}"


def number(name: str) -> int:
    """The number of a rollout worker; -1: it is none."""
    return int(name[1:]) if name[:1] == "w" and name[1:].isdecimal() else -1


class Engine(msgspec.Struct, frozen=True, kw_only=True):
    """The newest orders that an engine has acknowledged by sleeping, and by being awake; 0: none.

    first   the order with which it came; an acknowledgement of an older one is of another that had its name
    """

    slept: int = 0
    woke: int = 0
    first: int = 0

    @property
    def newest(self) -> int:
        """The newest order acknowledged in either way."""
        return max(self.slept, self.woke)


Engines = Map[str, Engine]


class End(msgspec.Struct, frozen=True, kw_only=True):
    """Command: the job has ended."""

    state: Literal["succeeded", "failed", "cancelled"]
    reason: str


class State(msgspec.Struct, frozen=True, kw_only=True):
    """All that the machine knows of a job.

    `engines` shares what it has in common with the state before it, and two counts follow every acknowledgement, so a
    step costs the same for ten workers as for ten thousand.
    """

    updates: int  # versions to make
    engines: Engines  # rollout workers and the trainer, by name
    mode: e.Mode
    wanted: e.Mode
    stage: Stage = "train"
    seq: int = 1  # the newest order
    rollout_since: int = 1  # first of the unbroken run of orders with the present value for rollout
    trainer_since: int = 1
    gate_since: int = 1
    sleepers: int = 0  # rollout workers that have acknowledged an order to sleep since `rollout_since`
    hearers: int = 0  # rollout workers that have acknowledged any order since `gate_since`
    minted: VersionId | None = None
    active: VersionId | None = None
    refused: VersionId | None = None  # newest version that will never be active: the next has its own chance
    base: VersionId | None = None  # newest version when `train` began
    batch: bool = False  # a batch waits, seen since the gate last opened
    short: bool = False  # no batch can be claimed, seen since the trainer was woken
    drained: bool = True  # nothing is in flight; false while the gate is open
    paused: bool = False  # a pause is wanted
    finished: bool = False  # the trainer has made its last update
    result: End | None = None
    pool: int = 0  # rollout workers wanted, the first ones by number; 0: all that there are
    pool_since: int = 1  # the order that told this number first
    emptied: tuple[str, ...] = ()  # workers that leave and, under orders since then, hold nothing


class Stance(NamedTuple):
    """What a stage orders."""

    phase: e.PhaseName
    rollout: Literal["awake", "asleep"]
    trainer: Literal["awake", "asleep"]
    gate: Literal["open", "shut"]


STANCES: Mapping[Stage, Stance] = {
    "train": Stance("train", rollout="asleep", trainer="awake", gate="shut"),
    "yield": Stance("sync", rollout="asleep", trainer="asleep", gate="shut"),
    "sync": Stance("sync", rollout="awake", trainer="asleep", gate="shut"),
    "sample": Stance("sample", rollout="awake", trainer="asleep", gate="open"),
    "drain": Stance("drain", rollout="awake", trainer="asleep", gate="shut"),
    "clear": Stance("train", rollout="asleep", trainer="asleep", gate="shut"),
    "join": Stance("sync", rollout="awake", trainer="awake", gate="shut"),
    "flow": Stance("flow", rollout="awake", trainer="awake", gate="open"),
    "paused": Stance("paused", rollout="asleep", trainer="asleep", gate="shut"),
    "done": Stance("done", rollout="asleep", trainer="asleep", gate="shut"),
}


def asleep(state: State, name: str) -> bool:
    """Whether the engine has acknowledged that it sleeps, under orders that have not changed since."""
    since = state.trainer_since if name == TRAINER else state.rollout_since
    stance = STANCES[state.stage]
    ordered = stance.trainer if name == TRAINER else stance.rollout
    return ordered == "asleep" and state.engines[name].slept >= since


def heard(state: State) -> bool:
    """Whether every rollout worker has acknowledged the gate as it is now: none acts on an older order."""
    return state.hearers == rollouts(state)


def rollouts(state: State) -> int:
    """How many rollout workers there are."""
    return len(state.engines) - (TRAINER in state.engines)


def leaving(state: State) -> tuple[str, ...]:
    """Workers that are not wanted any more and have not left, by number."""
    if not state.pool or rollouts(state) <= state.pool:
        return ()
    return tuple(sorted((name for name in state.engines if number(name) >= state.pool), key=number))


def kept(state: State) -> int:
    """How many rollout workers must have a process: those that leave, too, until they and those above hold nothing.

    The highest numbers end first, since that is how pools of pods shrink. Colocated, nothing was in flight when the
    mode came, so none of those that leave holds anything.
    """
    busy = [name for name in leaving(state) if name not in state.emptied]
    if state.mode == "colocated" or not busy:
        return state.pool or rollouts(state)
    return number(busy[-1]) + 1


def acknowledged(state: State, name: str, slept: int = 0, woke: int = 0) -> State:
    """The state once `name` has acknowledged these orders."""
    old: Engine = state.engines[name]
    if max(slept, woke) < old.first:
        return state
    new = Engine(slept=max(old.slept, slept), woke=max(old.woke, woke), first=old.first)
    engines = state.engines.set(name, new)
    if name == TRAINER:
        return msgspec.structs.replace(state, engines=engines)
    return msgspec.structs.replace(
        state,
        engines=engines,
        sleepers=state.sleepers + (old.slept < state.rollout_since <= new.slept),
        hearers=state.hearers + (old.newest < state.gate_since <= new.newest),
    )


def counted(state: State) -> State:
    """`state` with both counts made from its engines: what they must be, whatever they are."""
    workers = [engine for name, engine in state.engines.items() if name != TRAINER]
    return msgspec.structs.replace(
        state,
        sleepers=sum(engine.slept >= state.rollout_since for engine in workers),
        hearers=sum(engine.newest >= state.gate_since for engine in workers),
    )


def fleet(engines: Iterable[tuple[str, Engine]]) -> Engines:
    """Engines as a state holds them."""
    return Map(engines)


def saved(state: State) -> bytes:
    """The state as JSON."""
    return msgspec.json.encode(state, enc_hook=dict)


def restored(text: bytes) -> State:
    """The state that `saved` wrote. Raises `msgspec.MsgspecError` for anything else."""

    def engines(_: type, found: Any) -> Engines:
        return fleet(msgspec.convert(found, dict[str, Engine]).items())

    state = msgspec.json.decode(text, type=State, dec_hook=engines)
    return counted(state if state.pool else msgspec.structs.replace(state, pool=rollouts(state)))


def version_waits(state: State) -> bool:
    """Whether the newest version is not active yet, and still may be."""
    if state.minted is None or (state.refused is not None and state.refused >= state.minted):
        return False
    return state.active is None or state.active < state.minted


FACTS: Mapping[str, Callable[[State], bool]] = {
    "minted": lambda s: s.minted is not None and (s.base is None or s.base < s.minted),
    "version waits": version_waits,
    "newest active": lambda s: s.minted is not None and not version_waits(s),
    "batch": lambda s: s.batch,
    "short": lambda s: s.short,
    "drained": lambda s: s.drained,
    "rollouts asleep": lambda s: STANCES[s.stage].rollout == "asleep" and s.sleepers == rollouts(s),
    "trainer asleep": lambda s: asleep(s, TRAINER),
    "disjoint": lambda s: s.mode == "disjoint",
    "leaving": lambda s: s.paused or s.wanted != s.mode,
    "staying": lambda s: not s.paused and s.wanted == s.mode,
    "paused": lambda s: s.paused,
    "resumed": lambda s: not s.paused,
    "all made": lambda s: s.minted is not None and s.minted.number >= s.updates,
    "finished": lambda s: s.finished,
}


class Row(NamedTuple):
    """In `stage`, if all facts hold, go to `to`. The first row that fits is taken."""

    stage: Stage
    facts: tuple[str, ...]
    to: Stage | Literal["hub"]


ROWS: tuple[Row, ...] = (
    Row("train", ("minted", "disjoint", "staying"), "join"),
    Row("train", ("minted",), "yield"),
    Row("train", ("short",), "yield"),
    Row("train", ("finished",), "yield"),
    Row("yield", ("trainer asleep",), "hub"),
    Row("sync", ("newest active",), "hub"),
    Row("sample", ("batch",), "drain"),
    Row("sample", ("leaving",), "drain"),
    Row("sample", ("finished",), "drain"),
    Row("drain", ("drained", "trainer asleep"), "hub"),
    Row("clear", ("leaving", "trainer asleep"), "hub"),
    Row("clear", ("rollouts asleep",), "train"),
    Row("join", ("leaving",), "drain"),
    Row("join", ("newest active",), "flow"),
    Row("flow", ("leaving",), "drain"),
    Row("flow", ("finished",), "drain"),
    Row("paused", ("resumed", "trainer asleep"), "hub"),
)

HUB: tuple[tuple[tuple[str, ...], Stage], ...] = (
    (("paused",), "paused"),
    (("version waits",), "sync"),
    (("disjoint",), "flow"),
    (("batch",), "clear"),
    (("all made",), "clear"),
    ((), "sample"),
)
