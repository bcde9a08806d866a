"""Random histories of several turns under both real engines: what the trainer scores is what the engine sampled.

Sessions, engine and trainer are the loop's own. The test plays the environment, the ledger and the clock: tools answer
late, too much, not at all or never; versions come at any moment under any in-flight policy; attempts are lost and made
again. Each version is one that the trainer made by training on the trajectories that had ended.
"""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from syncline.contract.events import WorkItem
from syncline.contract.job import JobSpec
from syncline.contract.token_path import Reward, Trajectory, trajectory_id
from syncline.contract.trajectory_wire import decode, encode
from syncline.contract.turns import Message, Turn
from syncline.contract.version_path import VersionId
from syncline.environments.environment import Step
from syncline.lab.pair import JOB, Pair, one_thread, samples
from syncline.reference.model import TextCodec
from syncline.reference.observations import observed_ids
from syncline.rollout.engine import Chunk, CommitPolicy
from syncline.rollout.engines.reference import ReferenceEngine
from syncline.rollout.prompts import convention_of
from syncline.rollout.session import Closed
from syncline.rollout.sessions import Sessions
from syncline.rollout.spans import trajectory
from syncline.rollout.tools import Answer
from syncline.runtime.sandbox import Outcome

MODELS = Path(__file__).resolve().parents[2] / "examples" / "models"
NOISE = 2e-5  # nats: FP32 sums in another order
MEMBERS = 4


@pytest.fixture(scope="module", autouse=True)
def _threads() -> None:
    one_thread()


@dataclass
class Plan:
    """One history."""

    turns: dict[str, Any]
    answers: list[str]
    slow: list[int]
    events: list[str]


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    turns = {
        "most": draw(st.integers(1, 4)),
        "max_tokens": tuple(draw(st.lists(st.integers(1, 5), min_size=1, max_size=3))),
        "context": draw(st.sampled_from([None, 12, 20])),
        "on_length": draw(st.sampled_from(["go_on", "go_on", "go_on", "end"])),
        "observed_tokens": draw(st.integers(2, 8)),
        "on_long": draw(st.sampled_from(["cut", "end"])),
        "tool_retries": 1,
    }
    answer = st.sampled_from(["", "7=", "7=", "an answer too long", "done", "lost", "timeout"])
    event = st.sampled_from(["step"] * 4 + ["drain", "continue_old", "in_place", "carry", "lose"])
    return Plan(
        turns=turns,
        answers=draw(st.lists(answer, min_size=2, max_size=6)),
        slow=draw(st.lists(st.integers(0, 3), min_size=1, max_size=4)),
        events=draw(st.lists(event, min_size=8, max_size=24)),
    )


@dataclass
class Tools:
    """Answers as the plan tells, each after some ticks."""

    answers_: Iterator[str]
    slow: Iterator[int]
    waiting: list[tuple[str, list[int]]] = field(default_factory=list)

    def ask(self, key: str, index: int, turns: tuple[Turn, ...]) -> None:
        self.waiting.append((key, [next(self.slow)]))

    def cancel(self, key: str) -> None:
        self.waiting = [asked for asked in self.waiting if asked[0] != key]

    def answers(self) -> list[Answer]:
        due = [key for key, ticks in self.waiting if ticks[0] <= 0]
        self.waiting = [(key, [ticks[0] - 1]) for key, ticks in self.waiting if key not in due]
        return [Answer(key, self._outcome(next(self.answers_))) for key in due]

    def _outcome(self, answer: str) -> Outcome:
        if answer == "lost":
            return Outcome(kind="lost", reason="killed")
        if answer == "timeout":
            return Outcome(kind="timeout", reason="late")
        observed = (Message(role="tool", content=answer),) if answer not in ("", "done") else ()
        return Outcome(
            kind="value", value=msgspec.to_builtins(Step(done=answer == "done", observed=observed))
        )


class History:
    """A pair, its sessions, and what the engine handed out."""

    def __init__(self, plan: Plan, root: Path) -> None:
        given = {"turns": plan.turns, "task": {"environment": "calculator"}, "sampling": {"max_tokens": 4}}
        loss = {"optimizer": {"lr": 0.02}, "batch": {"groups": 1, "group_size": MEMBERS}}
        self.spec = JobSpec.model_validate({"name": "h", "model": {"name": "tiny-moe"}, **given, **loss})
        self.root = root
        self.pair = Pair(self.spec, MODELS, root / "pair")
        self.codec = TextCodec(MODELS / "tiny-moe")
        self.stops = self.pair.rollout.describe().stop_ids
        self.tools = Tools(itertools.cycle(plan.answers), itertools.cycle(plan.slow))
        self.sessions = Sessions(
            self.spec.turns,
            self.codec,
            self.tools,
            "w0",
            multi_turn=True,
            tokens=self.spec.sampling.max_tokens,
            context=1024,
            stops=self.stops,
        )
        self.chunks: dict[str, list[Chunk]] = {}
        self.attempts: dict[str, int] = {}
        self.ended: dict[str, Trajectory] = {}
        self.failed: dict[str, str] = {}
        self.trained: set[str] = set()

    @staticmethod
    def index(name: str) -> int:
        return int(name.rpartition("-")[2])

    def item(self, index: int) -> WorkItem:
        name = trajectory_id(JOB, 0, index)
        told = {"job": JOB, "trajectory": name, "group": 0, "index": index, "prompt": 0}
        return WorkItem(**told, traceparent="", submitted_at=1.0)  # type: ignore[arg-type]

    def begin(self, index: int) -> None:
        item = self.item(index)
        self.attempts[item.trajectory] = attempt = self.attempts.get(item.trajectory, 0) + 1
        request = self.pair.prompter.request(item, attempt)
        self.pair.rollout.submit(request)
        self.sessions.begin(request, item.prompt)
        self.chunks[item.trajectory] = []

    def tick(self) -> None:
        if self.pair.rollout.running:
            chunks = self.pair.rollout.step()
            for chunk in chunks:
                self.chunks[chunk.trajectory].append(chunk)
            self.sessions.take(chunks)
        self.sessions.go_on(self.pair.rollout)
        for closed in self.sessions.closed():
            assert closed.trajectory not in self.ended | self.failed
            self.ended[closed.trajectory] = self.record(closed)
        for name, why in self.sessions.failed():
            assert name not in self.ended | self.failed
            self.failed[name] = why

    def record(self, closed: Closed) -> Trajectory:
        """Written and read back."""
        made = trajectory(
            self.item(self.index(closed.trajectory)),
            self.attempts[closed.trajectory],
            (),
            closed.sampled,
            convention=convention_of(self.spec),
            contract=self.pair.contract.digest(),
            text=self.codec.decode(closed.sampled.tokens),
            traceparent="",
            queued=0.0,
            tokens=closed.tokens,
            segments=closed.segments,
            turns=closed.turns,
        )
        assert decode(encode(made)) == made
        return made

    def lose(self) -> None:
        """Another attempt begins at the prompt; nothing of this one is left."""
        open_ones = [name for name in self.attempts if name not in self.ended | self.failed]
        if open_ones:
            self.pair.rollout.abort(open_ones[0])
            self.sessions.forget(open_ones[0])
            self.begin(self.index(open_ones[0]))

    def version(self, event: str) -> None:
        """Train on what has ended, if it can teach anything, and serve the new weights under the policy."""
        records = [record for name, record in self.ended.items() if name not in self.trained]
        if len(records) >= 2:
            rewards = {
                r.trajectory: Reward(
                    trajectory=r.trajectory, attempt=r.attempt, state="scored", value=float(place)
                )
                for place, r in enumerate(records)
            }
            trained = self.pair.train(records, rewards)
            assert len(trained.rows) == len(records)
            self.trained |= {record.trajectory for record in records}
            for row, scored in zip(trained.rows, trained.result.logprobs, strict=True):
                assert len(scored) == row.trajectory.sampled
        else:
            self.pair.updates += 1  # the same weights once more
        self.keep()
        kind, kv = ("in_place", "carried") if event == "carry" else (event, "recomputed")
        policy = msgspec.convert({"kind": kind, "kv": kv, "carried_age": 3}, CommitPolicy)
        wanted = VersionId(0, self.pair.updates)
        self.pair.publish(policy)
        while (serving := self.pair.rollout.serving) is None or serving[0] != wanted:
            self.tick()
            self.pair.rollout.commit(policy)

    def keep(self) -> None:
        folder = self.root / f"version-{self.pair.updates}"
        folder.mkdir()
        self.pair.trainer.save(folder)

    # ---- what must hold
    def consistent(self, record: Trajectory) -> None:
        """Lengths, masks, spans and ids are those of what was sampled and observed, in order."""
        chunks = self.chunks[record.trajectory]
        sampled = [id for chunk in chunks for id in chunk.tokens]
        prompt = self.codec.encode(str(self.pair.environment.prompt(0).text))
        expected, left = list(prompt), iter(sampled)
        for turn in record.turns:
            expected += [next(left) for _ in range(turn.sampled)]
            if turn.observed:
                expected += observed_ids(
                    self.codec, msgspec.to_builtins(turn.observed), expected[-1], self.stops
                )
        assert next(left, None) is None
        assert list(record.tokens) == expected
        edges = [0, *(segment.end for segment in record.segments)]
        assert [segment.start for segment in record.segments] == edges[:-1]
        assert edges[-1] == len(expected)
        assert record.attempt == self.attempts[record.trajectory]
        assert bytes(record.loss_mask) == b"\x01" * len(sampled)
        assert record.logprobs.tolist() == [p for chunk in chunks for p in chunk.logprobs]
        said = [chunk.version for chunk in chunks for _ in chunk.tokens]
        assert [record.span_of(i).version for i in range(len(sampled))] == said
        assert [span.start for span in record.spans] == [0, *(span.end for span in record.spans)][:-1]
        assert record.spans[-1].end == len(sampled)
        [sample] = samples([record])
        owners = [s.kind for s in record.segments for _ in range(s.start, s.end)]
        assert list(sample.positions) == [place for place, kind in enumerate(owners) if kind == "sampled"]
        assert [sample.tokens[place] for place in sample.positions] == sampled

    def scores_agree(self) -> int:
        """The trainer, with each version's weights again, scores that version's tokens as they were sampled."""
        records, compared = list(self.ended.values()), 0
        for number in range(self.pair.updates + 1):
            self.pair.trainer.load(self.root / f"version-{number}")
            for record, scored in zip(records, self.pair.score_trainer(records), strict=True):
                for span in record.spans:
                    if span.version.number == number and span.context == "recomputed":
                        mine, theirs = scored[span.start : span.end], record.logprobs[span.start : span.end]
                        assert max(abs(a - b) for a, b in zip(mine, theirs, strict=True)) < NOISE
                        compared += len(mine)
        return compared


SEEN = {"versions": 0, "turns": 0, "retried": 0, "compared": 0}


# an example takes a second: one that fails is shown as it was found
@settings(
    max_examples=12,
    deadline=None,
    derandomize=True,
    phases=[Phase.generate],
    suppress_health_check=[HealthCheck.too_slow],
)
@given(plan=plans())
def _histories(plan: Plan) -> None:
    with tempfile.TemporaryDirectory() as root:
        history = History(plan, Path(root))
        history.keep()
        history.pair.publish()
        for index in range(MEMBERS):
            history.begin(index)
        for event in plan.events:
            if event == "step":
                history.tick()
            elif event == "lose":
                history.lose()
            elif history.pair.updates < 4:
                assert isinstance(history.pair.rollout, ReferenceEngine)
                several = history.pair.rollout.running and len(history.pair.rollout._lanes) > 1
                history.version("drain" if several and event in ("in_place", "carry") else event)
        for _ in range(2000):
            if not history.pair.rollout.running and not history.sessions.between:
                break
            history.tick()
        assert set(history.ended) | set(history.failed) == set(history.attempts)
        assert all("lost" in why for why in history.failed.values())
        for record in history.ended.values():
            history.consistent(record)
        SEEN["compared"] += history.scores_agree()
        SEEN["versions"] += max((len(record.spans) for record in history.ended.values()), default=0) > 1
        SEEN["turns"] += any(len(record.turns) > 1 for record in history.ended.values())
        SEEN["retried"] += any(record.attempt > 1 for record in history.ended.values())


def test_what_the_trainer_scores_is_what_the_engine_sampled() -> None:
    _histories()
    assert min(SEEN.values()) >= 3, f"the histories hold too little: {SEEN}"
