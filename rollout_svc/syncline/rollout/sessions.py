"""A trajectory between its prompt and its record: turns of the policy, and what its environment answers to them.

Each turn is a request of its own whose prompt is every id so far, so no id is ever made from text, and an engine need
know nothing of turns. What follows from it: the context of a later turn is computed anew (`recomputed`) by the version
that serves when it begins, and a version that came between two turns is a span boundary. A session stays with the
worker that began it; if that one is lost, the next attempt begins at the prompt.

Between turns a session holds its place: the worker begins nothing that would leave it no room. No clock of its own, no
Redis. `Tools` takes the steps.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from syncline.contract.token_path import Segment
from syncline.contract.turns import Ended, Message, Turn, TurnsSpec
from syncline.environments.environment import Step
from syncline.environments.turns import parse_calls
from syncline.reference.model import TextCodec
from syncline.reference.observations import observed_ids
from syncline.rollout.engine import Chunk, Experts, Request, RolloutEngine
from syncline.rollout.spans import Sampled, fold
from syncline.rollout.tools import Answer, Tools
from syncline.runtime.sandbox import Outcome

_TOLD = ("timeout", "memory", "unreadable")  # ends of a step that are the tool's own, and told to the policy


class Closed(msgspec.Struct, frozen=True, kw_only=True):
    """A session that has ended: all that its record needs of it. `turns` is empty for a task of one turn."""

    trajectory: str
    tokens: tuple[int, ...]
    segments: tuple[Segment, ...]
    sampled: Sampled
    turns: tuple[Turn, ...]


@dataclass
class _Session:
    prompt: int  # index
    request: Request  # of the present turn
    tokens: list[int]  # that the present turn began with
    segments: list[Segment]
    most: int  # sampled tokens that the present turn may have
    clipped: bool = False  # the context left less than the turn's own limit
    chunks: list[Chunk] = field(default_factory=list)  # of all turns
    sampled: int = 0  # tokens that ended turns sampled
    turns: list[Turn] = field(default_factory=list)
    experts: list[bytes] = field(default_factory=list)
    fed: int = 0  # tokens whose expert ids are there
    prefill: float = 0.0
    decode: float = 0.0
    tries: int = 0  # at the present step

    @property
    def key(self) -> str:
        return f"{self.request.trajectory}/{self.request.seed[3]}"


class Sessions:
    """The sessions of one worker.

    multi_turn   whether the environment is asked for a step after each turn
    context      ids that the model can hold
    stops        ids that end a turn
    """

    def __init__(
        self,
        spec: TurnsSpec,
        codec: TextCodec,
        tools: Tools,
        worker: str,
        *,
        multi_turn: bool,
        tokens: int,
        context: int,
        stops: Sequence[int],
    ) -> None:
        self._spec, self._codec, self._tools, self._worker = spec, codec, tools, worker
        self._multi_turn, self._stops, self._tokens = multi_turn, tuple(stops), tokens
        self._context = min(context, spec.context or context)
        self._all: dict[str, _Session] = {}
        self._next: deque[_Session] = deque()  # turns that wait for room in the engine
        self._stepping: dict[str, _Session] = {}  # by key: those that wait for their environment
        self._closed: list[Closed] = []
        self._failed: list[tuple[str, str]] = []

    @property
    def between(self) -> int:
        """Sessions between two turns: they hold no place in the engine and will need one."""
        return len(self._next) + len(self._stepping)

    def begin(self, request: Request, prompt: int) -> None:
        """A first turn was submitted; `prompt` is its index."""
        edge = len(request.prompt)
        self._all[request.trajectory] = _Session(
            prompt=prompt,
            request=request,
            tokens=list(request.prompt),
            segments=[Segment(kind="prompt", start=0, end=edge)],
            most=request.sampling.max_tokens,
            clipped=request.sampling.max_tokens < turn_tokens(self._spec, self._tokens, 0),
        )

    def forget(self, trajectory: str) -> None:
        """It is another worker's now: nothing of it is published."""
        session = self._all.pop(trajectory, None)
        if session is not None:
            self._tools.cancel(session.key)
            self._stepping.pop(session.key, None)
            self._next = deque(waiting for waiting in self._next if waiting is not session)

    def take(self, chunks: Sequence[Chunk]) -> None:
        """Note what was sampled."""
        for chunk in chunks:
            session = self._all[chunk.trajectory]
            session.chunks.append(msgspec.structs.replace(chunk, start=session.sampled + chunk.start))
            if chunk.finish is not None:
                self._turn_ended(session)

    def go_on(self, engine: RolloutEngine) -> None:
        """Hear what environments answered, and begin the turns that follow as far as there is room."""
        if self._stepping:
            for answer in self._tools.answers():
                self._answered(self._stepping.pop(answer.key), answer)
        while self._next and engine.room > 0:
            session = self._next.popleft()
            try:
                engine.submit(session.request)
            except ValueError as error:
                self._fail(session, str(error))

    def closed(self) -> list[Closed]:
        """Sessions that have ended since; they are forgotten here."""
        closed, self._closed = self._closed, []
        return closed

    def failed(self) -> list[tuple[str, str]]:
        """(trajectory, why) of sessions that cannot go on, since; they are forgotten here."""
        failed, self._failed = self._failed, []
        return failed

    # ---- a turn's end
    def _turn_ended(self, session: _Session) -> None:
        count = sum(len(chunk.tokens) for chunk in session.chunks) - session.sampled
        last = session.chunks[-1]
        new = [id for chunk in session.chunks for id in chunk.tokens][session.sampled :]
        edge = len(session.tokens)
        session.tokens += new
        session.segments.append(Segment(kind="sampled", start=edge, end=edge + count))
        session.sampled += count
        session.prefill += last.prefill
        session.decode += last.decode
        self._take_experts(session, last.experts)
        text = self._codec.decode(new)
        finish = last.finish or "length"
        session.turns.append(Turn(text=text, calls=parse_calls(text), sampled=count, finish=finish))
        ended = self._last(session, finish)
        if ended:
            self._close(session, ended)
        else:
            session.tries = 0
            self._ask(session)

    def _last(self, session: _Session, finish: str) -> Ended:
        if not self._multi_turn:
            return "done"
        if finish == "length" and session.clipped:
            return "context"
        if finish == "length" and self._spec.on_length == "end":
            return "length"
        return "turns" if len(session.turns) == self._spec.most else ""

    def _ask(self, session: _Session) -> None:
        self._stepping[session.key] = session
        self._tools.ask(session.key, session.prompt, tuple(session.turns))

    # ---- the environment's answer
    def _answered(self, session: _Session, answer: Answer) -> None:
        outcome = answer.outcome
        self._note(session, seconds=session.turns[-1].seconds + outcome.seconds)
        if outcome.kind == "lost" or outcome.passing:
            session.tries += 1
            if session.tries <= self._spec.tool_retries:
                self._ask(session)
            else:
                self._fail(session, f"its environment: {outcome.kind}: {outcome.reason}")
            return
        try:
            step = _step(outcome)
            if step.done:
                self._close(session, "done")
            else:
                self._observe(session, step.observed, "" if outcome.kind == "value" else outcome.reason)
        except ValueError as error:
            self._fail(session, str(error))

    def _observe(self, session: _Session, observed: tuple[Message, ...], trouble: str) -> None:
        """Put the observation behind what was sampled, and have the next turn wait for room."""
        ids, shown, cut = self._fit(session.tokens[-1], observed)
        if ids is None:
            self._close(session, "observation")
            return
        edge, end = len(session.tokens), len(session.tokens) + len(ids)
        wanted = turn_tokens(self._spec, self._tokens, len(session.turns))
        if end >= self._context:
            self._close(session, "context")
            return
        self._note(session, observed=shown, cut=cut, trouble=trouble)
        session.tokens += ids
        if ids:
            session.segments.append(Segment(kind="observed", start=edge, end=end))
        session.most = min(wanted, self._context - end)
        session.clipped = session.most < wanted
        before = session.request
        session.request = msgspec.structs.replace(
            before,
            prompt=tuple(session.tokens),
            seed=(*before.seed[:4], len(session.turns)),
            sampling=msgspec.structs.replace(
                before.sampling,
                max_tokens=session.most,
                min_tokens=min(before.sampling.min_tokens, session.most),
            ),
        )
        self._next.append(session)

    def _fit(
        self, last: int, observed: tuple[Message, ...]
    ) -> tuple[list[int] | None, tuple[Message, ...], int]:
        """(ids, messages as shown, characters cut). No ids: it is too long, and nothing may be cut."""
        shown, cut = observed, 0
        while True:
            ids = observed_ids(self._codec, msgspec.to_builtins(shown), last, self._stops)
            if len(ids) <= self._spec.observed_tokens:
                return ids, shown, cut
            content = shown[-1].content if shown else ""
            if self._spec.on_long == "end" or not content:
                return None, observed, 0
            keep = min(len(content) - 1, len(content) * self._spec.observed_tokens // len(ids))
            shown = (*shown[:-1], msgspec.structs.replace(shown[-1], content=content[:keep]))
            cut += len(content) - keep

    # ---- the end
    def _note(self, session: _Session, **changes: object) -> None:
        session.turns[-1] = msgspec.structs.replace(session.turns[-1], **changes)

    def _close(self, session: _Session, ended: Ended) -> None:
        self._note(session, ended=ended)
        name = session.request.trajectory
        del self._all[name]
        self._closed.append(
            Closed(
                trajectory=name,
                tokens=tuple(session.tokens),
                segments=tuple(session.segments),
                sampled=fold(_joined(session), self._worker),
                turns=tuple(session.turns) if self._multi_turn else (),
            )
        )

    def _fail(self, session: _Session, why: str) -> None:
        name = session.request.trajectory
        del self._all[name]
        self._failed.append((name, why))

    def _take_experts(self, session: _Session, experts: Experts | None) -> None:
        """Of each turn the ids of the tokens that it fed first: those under which their followers were sampled."""
        if experts is None:
            return
        rows = experts.shape[0]
        size = len(experts.data) // rows
        session.experts.append(experts.data[session.fed * size :])
        session.fed = rows


def turn_tokens(spec: TurnsSpec, otherwise: int, turn: int) -> int:
    """Sampled tokens that turn number `turn` (from 0) may have."""
    return spec.max_tokens[min(turn, len(spec.max_tokens) - 1)] if spec.max_tokens else otherwise


def _step(outcome: Outcome) -> Step:
    """The environment's step. A tool that was killed, or said too much, is told to the policy as an error."""
    if outcome.kind in _TOLD:
        content = f"error: {outcome.kind}: {outcome.reason}"
        return Step(done=False, observed=(Message(role="tool", content=content),))
    if outcome.kind != "value":
        raise ValueError(f"its environment: {outcome.kind}: {outcome.reason}")
    return msgspec.convert(outcome.value, Step)


def _joined(session: _Session) -> list[Chunk]:
    """The chunks of all turns as those of one request."""
    chunks = [msgspec.structs.replace(chunk, finish=None, experts=None) for chunk in session.chunks[:-1]]
    last = session.chunks[-1]
    experts = last.experts and msgspec.structs.replace(last.experts, data=b"".join(session.experts))
    return [
        *chunks,
        msgspec.structs.replace(last, experts=experts, prefill=session.prefill, decode=session.decode),
    ]
