"""A trajectory between its prompt and its record: turns of the policy, and what its environment answers to them.

Each turn is a request of its own whose prompt is every id so far, so no id is ever made from text, and an engine need
know nothing of turns. What follows from it: the context of a later turn is computed anew (`recomputed`) by the version
that serves when it begins, and a version that came between two turns is a span boundary. A session stays with the
worker that began it, which an engine that keeps prefixes makes use of; if that one is lost, the next attempt begins at
the prompt, and its first turn says why.

Between turns a session holds its place: the worker begins nothing that would leave it no room. No clock of its own, no
Redis. `Tools` takes the steps.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Protocol

import msgspec

from syncline.contract.token_path import Segment
from syncline.contract.turns import Ended, Message, Turn, TurnsSpec
from syncline.environments.turns import parse_calls
from syncline.reference.model import TextCodec
from syncline.reference.observations import observed_ids
from syncline.rollout.engine import Chunk, Request, RolloutEngine
from syncline.rollout.session import Closed, Session, branched, joined, step_of, turn_tokens
from syncline.rollout.spans import fold
from syncline.rollout.tools import Answer
from syncline.runtime.sandbox import Outcome


class Steps(Protocol):
    """What a session needs of its environment: `tools.Tools`."""

    def ask(self, key: str, index: int, turns: tuple[Turn, ...]) -> None: ...

    def cancel(self, key: str) -> None: ...

    def answers(self) -> list[Answer]: ...


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
        tools: Steps,
        worker: str,
        *,
        multi_turn: bool,
        tokens: int,
        context: int,
        stops: Sequence[int],
    ) -> None:
        self._spec, self._codec, self._tools, self._worker = spec, codec, tools, worker
        self._multi_turn, self._stops, self._tokens = multi_turn, tuple(stops), tokens
        if spec.branches > 1 and not multi_turn:
            raise ValueError("turns.branches: the environment has one turn, so there is nothing to share")
        self._context = min(context, spec.context or context)
        self._all: dict[str, Session] = {}
        self._next: deque[Session] = deque()  # turns that wait for room in the engine
        self._stepping: dict[str, Session] = {}  # by key: those that wait for their environment
        self._closed: list[Closed] = []
        self._failed: list[tuple[str, str]] = []

    @property
    def between(self) -> int:
        """Sessions between two turns: they hold no place in the engine and will need one."""
        return len(self._next) + len(self._stepping)

    def drawn(self, request: Request) -> Request:
        """The request as the engine is to draw it: `session.branched`."""
        return branched(request, self._spec)

    def begin(self, request: Request, prompt: int, moved: str = "") -> None:
        """A first turn was submitted as `drawn`. `moved`: what ended the attempt before.

        prompt  its index
        """
        edge = len(request.prompt)
        self._all[request.trajectory] = Session(
            prompt=prompt,
            request=request,
            moved=moved,
            tokens=list(request.prompt),
            segments=[Segment(kind="prompt", start=0, end=edge)],
            clipped=request.sampling.max_tokens < turn_tokens(self._spec, self._tokens, 0),
        )

    def forget(self, trajectory: str) -> None:
        """It is another worker's now: nothing of it is published."""
        session = self._all.pop(trajectory, None)
        if session is not None:
            self._tools.cancel(session.key)
            self._stepping.pop(session.key, None)
            self._next = deque(waiting for waiting in self._next if waiting is not session)
        self._closed = [closed for closed in self._closed if closed.trajectory != trajectory]

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
                self._answered(self._stepping.pop(answer.key), answer.outcome)
        while self._next and engine.room > 0:
            session = self._next.popleft()
            try:
                engine.submit(self.drawn(session.request))
            except ValueError as error:
                self._fail(session, str(error))

    @property
    def ended(self) -> int:
        """Sessions that `closed` would return."""
        return len(self._closed)

    def closed(self) -> list[Closed]:
        """Sessions that have ended since; they are forgotten here."""
        closed, self._closed = self._closed, []
        return closed

    def failed(self) -> list[tuple[str, str]]:
        """(trajectory, why) of sessions that cannot go on, since; they are forgotten here."""
        failed, self._failed = self._failed, []
        return failed

    # ---- a turn's end
    def _turn_ended(self, session: Session) -> None:
        finish = session.chunks[-1].finish or "length"
        new = session.end_turn()
        text = self._codec.decode(new)
        moved = "" if session.turns else session.moved
        session.turns.append(
            Turn(text=text, calls=parse_calls(text), sampled=len(new), finish=finish, moved=moved)
        )
        ended = self._last(session, finish)
        if ended:
            self._close(session, ended)
        else:
            session.tries = 0
            self._ask(session)

    def _last(self, session: Session, finish: str) -> Ended:
        if not self._multi_turn:
            return "done"
        if finish == "length" and session.clipped:
            return "context"
        if finish == "length" and self._spec.on_length == "end":
            return "length"
        return "turns" if len(session.turns) == self._spec.most else ""

    def _ask(self, session: Session) -> None:
        self._stepping[session.key] = session
        self._tools.ask(session.key, session.prompt, tuple(session.turns))

    # ---- the environment's answer
    def _answered(self, session: Session, outcome: Outcome) -> None:
        session.note(seconds=session.turns[-1].seconds + outcome.seconds)
        if outcome.kind == "lost" or outcome.passing:
            session.tries += 1
            if session.tries <= self._spec.tool_retries:
                self._ask(session)
            else:
                self._fail(session, f"its environment: {outcome.kind}: {outcome.reason}")
            return
        try:
            step = step_of(outcome)
            if step.done:
                self._close(session, "done")
            else:
                self._observe(session, step.observed, "" if outcome.kind == "value" else outcome.reason)
        except ValueError as error:
            self._fail(session, str(error))

    def _observe(self, session: Session, observed: tuple[Message, ...], trouble: str) -> None:
        """Go on behind the observation, once there is room, or end before it."""
        ids, shown, cut = self._fit(session.tokens[-1], observed)
        if ids is None:
            self._close(session, "observation")
        elif len(session.tokens) + len(ids) >= self._context:
            self._close(session, "context")
        else:
            session.note(observed=shown, cut=cut, trouble=trouble)
            wanted = turn_tokens(self._spec, self._tokens, len(session.turns))
            session.observe(ids, wanted, self._context)
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
    def _close(self, session: Session, ended: Ended) -> None:
        session.note(ended=ended)
        name = session.request.trajectory
        del self._all[name]
        self._closed.append(
            Closed(
                trajectory=name,
                tokens=tuple(session.tokens),
                segments=tuple(session.segments),
                sampled=fold(joined(session), self._worker),
                turns=tuple(session.turns) if self._multi_turn else (),
            )
        )

    def _fail(self, session: Session, why: str) -> None:
        name = session.request.trajectory
        del self._all[name]
        self._failed.append((name, why))
