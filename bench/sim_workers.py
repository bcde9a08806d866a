"""What a simulated fleet is made of: groups, requests, workers."""

from __future__ import annotations

from dataclasses import dataclass, field

from syncline.runtime.ledger_shapes import OpenGroup


@dataclass
class Group:
    """A group that is open. `oldest`: version of its first token; -1: none was sampled."""

    name: int
    lengths: list[int]  # tokens of each member
    oldest: int = -1
    done: int = 0

    @property
    def ready(self) -> bool:
        return self.done == len(self.lengths)

    def line(self) -> OpenGroup:
        """The group as the ledger has it."""
        return OpenGroup(len(self.lengths), self.done, 0, self.oldest, "ready" if self.ready else "open", -1)


@dataclass
class Running:
    """A request that a worker decodes. `paused`: the worker's pauses that its end accounts for."""

    group: Group
    member: int
    paused: float


@dataclass
class Worker:
    """One engine. `life` rises with each failure: what an earlier life had begun comes to nothing."""

    name: str
    slots: int
    slow: float
    alive: bool = True
    life: int = 0
    awake: bool = False
    gate: bool = False
    seq: int = 0
    version: int = -1
    paused: float = 0.0  # seconds that commits have taken in all
    running: dict[tuple[int, int], Running] = field(default_factory=dict)

    def die(self) -> None:
        self.alive, self.awake, self.gate, self.version = False, False, False, -1
        self.life += 1
        self.running = {}
