"""One session's arithmetic: ids, segments, chunks and expert ids of all its turns. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

from syncline.contract.token_path import Segment
from syncline.contract.turns import Message, Turn, TurnsSpec
from syncline.environments.environment import Step
from syncline.rollout.engine import Chunk, Experts, Request
from syncline.rollout.spans import Sampled
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
class Session:
    """A session that has not ended."""

    prompt: int  # index
    request: Request  # of the present turn
    tokens: list[int]  # that the present turn began with
    segments: list[Segment]
    moved: str = ""  # why it is not with the worker that began it
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

    def end_turn(self) -> list[int]:
        """The present turn's last chunk is there: count it. Returns the turn's ids."""
        new = [id for chunk in self.chunks for id in chunk.tokens][self.sampled :]
        last, edge = self.chunks[-1], len(self.tokens)
        self.tokens += new
        self.segments.append(Segment(kind="sampled", start=edge, end=edge + len(new)))
        self.sampled += len(new)
        self.prefill += last.prefill
        self.decode += last.decode
        if last.experts is not None:
            self._take_experts(last.experts)
        return new

    def observe(self, ids: list[int], wanted: int, context: int) -> None:
        """Put an observation behind what was sampled, and make the request of the next turn.

        wanted    sampled tokens that the turn may have, if the `context` leaves them
        """
        edge = len(self.tokens)
        self.tokens += ids
        if ids:
            self.segments.append(Segment(kind="observed", start=edge, end=edge + len(ids)))
        most = min(wanted, context - len(self.tokens))
        self.clipped = most < wanted
        before = self.request
        self.request = msgspec.structs.replace(
            before,
            prompt=tuple(self.tokens),
            seed=(*before.seed[:4], len(self.turns)),
            sampling=msgspec.structs.replace(
                before.sampling, max_tokens=most, min_tokens=min(before.sampling.min_tokens, most)
            ),
        )

    def note(self, **changes: object) -> None:
        """Say more of the latest turn."""
        self.turns[-1] = msgspec.structs.replace(self.turns[-1], **changes)

    def _take_experts(self, experts: Experts) -> None:
        """Of each turn the ids of the tokens that it fed first: those under which their followers were sampled."""
        rows = experts.shape[0]
        size = len(experts.data) // rows
        self.experts.append(experts.data[self.fed * size :])
        self.fed = rows


def turn_tokens(spec: TurnsSpec, otherwise: int, turn: int) -> int:
    """Sampled tokens that turn number `turn` (from 0) may have."""
    return spec.max_tokens[min(turn, len(spec.max_tokens) - 1)] if spec.max_tokens else otherwise


def branched(request: Request, spec: TurnsSpec) -> Request:
    """The request as it is drawn: in the turns that branches share, by the seed of the first of them.

    The same seed, ids and weights give the same tokens, whoever asks, and in whichever attempt.
    """
    job, group, index, _, *turn = request.seed
    if spec.branches == 1 or (turn or [0])[0] >= spec.branch_at:
        return request
    return msgspec.structs.replace(request, seed=(job, group, index - index % spec.branches, 0, *turn))


def step_of(outcome: Outcome) -> Step:
    """The environment's step. A tool that was killed, or said too much, is told to the policy as an error."""
    if outcome.kind in _TOLD:
        content = f"error: {outcome.kind}: {outcome.reason}"
        return Step(done=False, observed=(Message(role="tool", content=content),))
    if outcome.kind != "value":
        raise ValueError(f"its environment: {outcome.kind}: {outcome.reason}")
    return msgspec.convert(outcome.value, Step)


def joined(session: Session) -> list[Chunk]:
    """The chunks of all turns as those of one request."""
    chunks = [msgspec.structs.replace(chunk, finish=None, experts=None) for chunk in session.chunks[:-1]]
    last = session.chunks[-1]
    experts = last.experts and msgspec.structs.replace(last.experts, data=b"".join(session.experts))
    return [
        *chunks,
        msgspec.structs.replace(last, experts=experts, prefill=session.prefill, decode=session.decode),
    ]
