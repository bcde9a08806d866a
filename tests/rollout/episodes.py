"""Environments that a test scripts, and sessions driven by the real engine under them."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
from conformance.forge import KEY, MODELS, Forge

from syncline.contract.events import WorkItem
from syncline.contract.job import ModelSpec
from syncline.contract.token_path import SamplingConvention, Trajectory, trajectory_id
from syncline.contract.trajectory_wire import decode, encode
from syncline.contract.turns import Message, Turn, TurnsSpec
from syncline.environments.environment import Step
from syncline.reference.model import TextCodec
from syncline.rollout.engine import Chunk, CommitPolicy, Request, Sampling
from syncline.rollout.engines.reference import ReferenceEngine
from syncline.rollout.session import Closed, turn_tokens
from syncline.rollout.sessions import Sessions
from syncline.rollout.spans import trajectory
from syncline.rollout.tools import Answer
from syncline.runtime.sandbox import Outcome

JOB = "j00000test"
Script = Callable[[str, tuple[Turn, ...]], Outcome]


def says(*contents: str) -> Outcome:
    """The environment answers with these messages."""
    observed = tuple(Message(role="tool", content=content) for content in contents)
    return Outcome(kind="value", value=msgspec.to_builtins(Step(done=False, observed=observed)), seconds=0.5)


DONE = Outcome(kind="value", value={"done": True, "observed": []})
LOST = Outcome(kind="lost", reason="killed by SIGKILL")


@dataclass
class Scripted:
    """Steps as `script` tells them, each answered when it is asked for the second time or later, as `slow` says."""

    script: Script
    slow: Callable[[], int] = lambda: 0
    asked: list[tuple[str, tuple[Turn, ...], list[int]]] = field(default_factory=list)
    cancelled: list[str] = field(default_factory=list)

    def ask(self, key: str, index: int, turns: tuple[Turn, ...]) -> None:
        self.asked.append((key, turns, [self.slow()]))

    def cancel(self, key: str) -> None:
        self.cancelled.append(key)
        self.asked = [asked for asked in self.asked if asked[0] != key]

    def answers(self) -> list[Answer]:
        due = [asked for asked in self.asked if asked[2][0] <= 0]
        for asked in self.asked:
            asked[2][0] -= 1
        self.asked = [asked for asked in self.asked if asked not in due]
        return [Answer(key, self.script(key, turns)) for key, turns, _ in due]


class Played:
    """The real engine and real sessions; the test plays ledger, sync and environment."""

    def __init__(self, root: Path, steps: Scripted, turns: TurnsSpec, model: str = "tiny-moe") -> None:
        self.forge = Forge(root, MODELS / model, JOB, KEY)
        self.engine = ReferenceEngine(MODELS, ModelSpec(name=model), JOB, KEY, 8)
        self.codec = TextCodec(MODELS / model)
        self.spec, self.steps = turns, steps
        self.sessions = Sessions(
            turns,
            self.codec,
            steps,
            "w0",
            multi_turn=True,
            tokens=6,
            context=1024,
            stops=self.engine.describe().stop_ids,
        )
        self.chunks: dict[str, list[Chunk]] = {}  # of the present attempt, as the engine handed them out
        self.attempts: dict[str, int] = {}
        self.requests: dict[str, list[Request]] = {}
        self.number = -1

    def version(self, kind: str = "drain", kv: str = "recomputed") -> bool:
        """Stage the next version and commit it. False: the policy has it wait."""
        signed = self.forge.version(self.number + 1)
        self.engine.stage(signed, self.forge.store)
        policy = msgspec.convert({"kind": kind, "kv": kv, "carried_age": 4}, CommitPolicy)
        while self.engine.commit(policy) is None:
            self.step()
        self.number += 1
        return True

    @property
    def lanes(self) -> int:
        """Versions that still have requests, with the one that serves."""
        return len(self.engine._lanes)

    def begin(self, index: int, prompt: tuple[int, ...]) -> str:
        name = trajectory_id(JOB, 0, index)
        attempt = self.attempts[name] = self.attempts.get(name, 0) + 1
        most = turn_tokens(self.spec, 6, 0)
        request = Request(
            trajectory=name,
            prompt=prompt,
            seed=(0, 0, index, attempt),
            sampling=Sampling(max_tokens=min(most, (self.spec.context or 1024) - len(prompt))),
            experts=True,
        )
        self.engine.submit(self.sessions.drawn(request))
        self.sessions.begin(request, 0)
        self.chunks[name] = []
        return name

    def lose(self, name: str) -> None:
        """Another worker has it now."""
        self.engine.abort(name)
        self.sessions.forget(name)

    def step(self) -> None:
        if self.engine.running:
            chunks = self.engine.step()
            for chunk in chunks:
                self.chunks[chunk.trajectory].append(chunk)
            self.sessions.take(chunks)
        self.sessions.go_on(self.engine)

    def record(self, closed: Closed) -> Trajectory:
        """The record of a closed session, written and read back."""
        index = int(closed.trajectory.rpartition("-")[2])
        item = WorkItem(
            job=JOB,
            trajectory=closed.trajectory,
            group=0,
            index=index,
            prompt=0,
            traceparent="",
            submitted_at=1.0,
        )
        made = trajectory(
            item,
            self.attempts[closed.trajectory],
            (),
            closed.sampled,
            convention=SamplingConvention(),
            contract="c",
            text=self.codec.decode(closed.sampled.tokens),
            traceparent="",
            queued=0.0,
            tokens=closed.tokens,
            segments=closed.segments,
            turns=closed.turns,
        )
        read = decode(encode(made))
        assert read == made
        assert isinstance(read.tokens, array)
        return read
