"""The token path: which weight version sampled each token, how it was scored, which update consumed it.

Legend of array lengths: `P` prompt tokens, `S` sampled tokens, `T` all tokens of the record.

A trajectory is one immutable record. Its lengths are checked when it is written and again when it is read; a
record that does not add up is refused (`BadTrajectory`), never repaired, padded or re-encoded from text.
"""

from __future__ import annotations

from array import array
from itertools import pairwise
from typing import Literal

import msgspec

from syncline.contract.hops import Hop
from syncline.contract.logprobs import impossible
from syncline.contract.recorded import (
    SamplingMask,
    expert_contradiction,
    mask_contradiction,
)
from syncline.contract.turns import Turn, contradiction
from syncline.contract.version_path import VersionId

PROMPTED = Hop(
    name="token.prompted",
    done_by="scheduler",
    writes=("work", "entries"),
    attributes=("trajectory", "group", "index"),
)
SAMPLED = Hop(
    name="token.sampled",
    done_by="rollout",
    reads=("work", "engine"),
    attributes=("trajectory", "attempt", "worker", "version", "digest", "context", "start", "end"),
)
PUBLISHED = Hop(
    name="token.published",
    done_by="rollout",
    writes=("trajectories", "entries"),
    attributes=("trajectory", "attempt", "worker", "tokens", "spans"),
)
REWARDED = Hop(
    name="token.rewarded",
    done_by="errands",
    reads=("trajectories",),
    writes=("rewards", "entries"),
    attributes=("trajectory", "attempt", "state", "reward"),
)
ADMITTED = Hop(
    name="token.admitted",
    done_by="trainer",
    reads=("ready", "rewards"),
    writes=("entries",),
    attributes=("trajectory", "update", "lag"),
)
SCORED = Hop(
    name="token.scored",
    done_by="trainer",
    reads=("engine",),
    attributes=("trajectory", "update", "version", "mean_abs_logprob_gap"),
)
TRAINED = Hop(
    name="token.trained",
    done_by="trainer",
    writes=("segment", "entries"),
    attributes=("trajectory", "update", "minted", "advantage"),
)

TOKEN_PATH: tuple[Hop, ...] = (PROMPTED, SAMPLED, PUBLISHED, REWARDED, ADMITTED, SCORED, TRAINED)
"""Every hop of one token, in order. `sampled` occurs once per version span."""


class BadTrajectory(ValueError):
    """A trajectory record whose parts contradict one another. The message names the trajectory and the part."""


# gc=False, here and wherever thousands of small records live: they hold no cycle, and Python's collector looked through
# them again and again for half of what taking a batch cost.
class VersionSpan(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, gc=False):
    """Half-open range `[start, end)` of sampled tokens that one version sampled over one context.

    Stamped by the engine between decode steps, by nobody else. Indices count sampled tokens (0 is the first).
    """

    start: int
    end: int
    version: VersionId
    digest: str  # manifest digest of the weights that the engine held
    adapter: str | None = None  # versioned adapter name; None: no adapter
    context: Literal["recomputed", "carried"] = "recomputed"
    # versions between the oldest KV read and `version`; 0 unless carried. Where the spans before tell of older KV, it
    # was made anew by version - carried_age, which itself sampled nothing
    carried_age: int = 0
    worker: str


class Segment(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, gc=False):
    """Half-open range `[start, end)` of the record's tokens that came from one side."""

    kind: Literal["prompt", "sampled", "observed"]
    start: int
    end: int


class SamplingConvention(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, gc=False):
    """Under which distribution a behaviour log-probability was recorded.

    `scaled`: log-softmax(logits / temperature) at the sampled id, before top-p and top-k cut the support.
    `processed`: the same after the cut and renormalisation (the true sampling distribution).
    """

    logprob: Literal["scaled", "processed"] = "scaled"
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0: no cut


class Timing(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, gc=False):
    """Durations in seconds from a monotonic clock; `started` is wall-clock unix seconds, for people only."""

    started: float
    queued: float
    prefill: float
    decode: float


class Trajectory(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One sampled response with its record. Stamped by the rollout worker that sampled it.

    tokens        array('i') [T]  prompt, sampled and observed ids in order; `segments` partition it
    logprobs      array('f') [S]  behaviour log-probabilities under `convention`
    loss_mask     bytes      [S]  1: the token takes part in the loss
    expert_ids    bytes or None   [expert_tokens, layers, topk] of uint8 or uint16, little-endian, C order;
                                  expert_tokens = T - 1 (the last sampled token is never fed back)
    mask          what top-p and top-k left at each sampled token; None: not recorded
    """

    job: str
    trajectory: str
    group: int
    index: int  # place inside the group, 0-based
    attempt: int  # which try at this (group, index) this is; the ledger fences older ones
    prompt: int  # index of the prompt in the task's data set
    tokens: array[int]
    segments: tuple[Segment, ...]
    logprobs: array[float]
    loss_mask: bytes
    spans: tuple[VersionSpan, ...]
    convention: SamplingConvention
    finish: Literal["stop", "length"]
    contract: str  # digest of the precision contract
    text: str  # the sampled tokens decoded, for rewards and for people; never encoded again
    traceparent: str
    timing: Timing
    turns: tuple[Turn, ...] = ()  # one per sampled segment; empty: the task has one turn
    expert_ids: bytes | None = None
    expert_shape: tuple[int, int, int] | None = None
    expert_dtype: Literal["u1", "u2"] | None = None
    mask: SamplingMask | None = None

    @property
    def sampled(self) -> int:
        """Number of sampled tokens, S."""
        return len(self.logprobs)

    @property
    def oldest(self) -> VersionId:
        """Version of the oldest sampled token. Spans never fall, so it is the first span's."""
        return self.spans[0].version

    def sampled_ids(self) -> array[int]:
        """The sampled ids in order, [S]."""
        out: array[int] = array("i")
        for segment in self.segments:
            if segment.kind == "sampled":
                out.extend(self.tokens[segment.start : segment.end])
        return out

    def span_of(self, token: int) -> VersionSpan:
        """The span that holds sampled token `token`. Raises `IndexError` naming the legal range."""
        for span in self.spans:
            if span.start <= token < span.end:
                return span
        raise IndexError(f"{self.trajectory}: token {token} is outside [0, {self.sampled})")


def check(trajectory: Trajectory) -> Trajectory:
    """Return `trajectory` if all its parts agree, else raise `BadTrajectory` naming the part."""
    for complaint in (_segments(trajectory), _spans(trajectory), _extras(trajectory)):
        if complaint:
            raise BadTrajectory(f"trajectory {trajectory.trajectory}: {complaint}")
    return trajectory


def _segments(t: Trajectory) -> str:
    edge, sampled = 0, []
    for segment in t.segments:
        if segment.start != edge or segment.end <= segment.start:
            return f"segment {segment.kind} [{segment.start}, {segment.end}) does not continue at {edge}"
        if segment.kind == "sampled":
            sampled.append(segment.end - edge)
        edge = segment.end
    if edge != len(t.tokens):
        return f"segments end at {edge}, tokens at {len(t.tokens)}"
    if not t.segments or t.segments[0].kind != "prompt":
        return "the first segment must be the prompt"
    if t.segments[-1].kind == "observed":
        return "nothing was sampled after the last observation"
    return contradiction(t.turns, sampled) or _arrays(t, sum(sampled))


def _arrays(t: Trajectory, sampled: int) -> str:
    if sampled == 0:
        return "no sampled token"
    if len(t.logprobs) != sampled:
        return f"{len(t.logprobs)} log-probs for {sampled} sampled tokens"
    if len(t.loss_mask) != sampled:
        return f"loss mask of {len(t.loss_mask)} for {sampled} sampled tokens"
    return impossible(t.logprobs)


def _spans(t: Trajectory) -> str:
    edge = 0
    for span in t.spans:
        if span.start != edge or span.end <= span.start:
            return f"span [{span.start}, {span.end}) does not continue at {edge}"
        edge = span.end
    if edge != t.sampled:
        return f"spans end at {edge}, sampled tokens at {t.sampled}"
    for before, after in pairwise(t.spans):
        if after.version < before.version:
            return f"version falls from {before.version} to {after.version} at token {after.start}"
        if msgspec.structs.replace(before, start=after.start, end=after.end) == after:
            return f"neighbouring spans at token {after.start} do not differ"
    return ""


def _extras(t: Trajectory) -> str:
    experts = expert_contradiction(len(t.tokens), t.expert_ids, t.expert_shape, t.expert_dtype)
    processed = t.convention.logprob == "processed"
    return experts or mask_contradiction(t.mask, t.sampled_ids() if t.mask else (), processed)


class Reward(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, gc=False):
    """A trajectory's reward. Stamped by the errand that ran the scorer.

    `scored`: `value` is finite. `unscored`: the scorer could not tell (timeout, lost sandbox, None, NaN), which
    is never 0. `failed`: the scorer itself is broken and retries are used up. `value` is None unless scored.
    """

    trajectory: str
    attempt: int
    state: Literal["scored", "unscored", "failed"]
    value: float | None
    reason: str = ""
    judge: str = ""  # name and version of the scorer
    seconds: float = 0.0


def trajectory_id(job: str, group: int, index: int) -> str:
    """The server-made id of the trajectory at `(group, index)` of `job`."""
    return f"{job}-{group}-{index}"


def parse_trajectory_id(trajectory: str) -> tuple[str, int, int]:
    """Inverse of `trajectory_id`. Raises `ValueError` that shows the legal form."""
    job, _, rest = trajectory.partition("-")
    group, _, index = rest.partition("-")
    if not job or not group.isdecimal() or not index.isdecimal():
        raise ValueError(
            f"trajectory id {trajectory!r} is not of the form JOB-GROUP-INDEX, such as j1a2b3c-12-3"
        )
    return job, int(group), int(index)
