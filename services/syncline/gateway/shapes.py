"""What the gateway says about a job, beyond the contract's own structs: the shapes of its answers."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from syncline.contract.evaluation import Evaluation
from syncline.contract.events import (
    Heartbeat,
    JobState,
    LedgerSample,
    Mode,
    Phase,
    PhaseName,
    Pool,
    UpdateMetrics,
    Wait,
    WorkerStatus,
)
from syncline.contract.token_path import Reward, SamplingConvention, Segment, Timing, VersionSpan
from syncline.contract.version_path import VersionId, VersionRecord
from syncline.gateway.diagnosed import Decomposition

State = JobState | Literal["unrecorded"]
"""`unrecorded`: the job's folder is there, Redis no longer knows it, and no summary says how it ended."""

TrajectoryState = Literal["running", "buffered", "trained", "filtered", "failed", "expired"]


class JobBrief(msgspec.Struct, frozen=True, kw_only=True):
    """A job in a listing. Times are wall-clock unix seconds; None: has not happened or is not known."""

    id: str
    name: str
    state: State
    reason: str
    mode: Mode | None
    phase: PhaseName | None
    update: int  # updates made
    updates: int  # updates asked for
    reward: float | None  # of the last update; None: none yet, or nothing was scored
    created: float | None
    started: float | None
    ended: float | None
    alarm: str = ""  # the newest alarm of the job's diagnostics; "": none was raised
    kind: Literal["train", "evaluate"] = "train"
    evaluated: Evaluation | None = None  # of the newest version that was evaluated; None: none was


class PrecisionBrief(msgspec.Struct, frozen=True, kw_only=True):
    """A job's precision in a few words; `/precision` tells the whole.

    runs   how `device.hardware` carries the contract out; `emulations` names what is not native
    plan   resolved: each tensor's treatment is known; validating: a worker will resolve it; unresolved: none ever did
    """

    contract: str
    digest: str
    representation: str
    runs: Literal["native", "emulation", "refused"]
    emulations: tuple[str, ...]
    plan: Literal["resolved", "validating", "unresolved"]
    plan_digest: str | None
    low_bit: int | None  # tensors that are stored in few bits


class JobView(JobBrief, frozen=True, kw_only=True):
    """A job. `spec` is the resolved one, with every default; `recorded`: Redis still has its streams."""

    spec_hash: str
    spec: dict[str, Any]
    waits: tuple[Wait, ...]
    recorded: bool
    evaluations: tuple[Evaluation, ...] = ()  # of the job's versions, in the order in which they ended
    precision: PrecisionBrief | None = None  # None: of a recipe that is no longer shipped
    pool: Pool | None = None  # of rollout workers; None: the job has not begun, or evaluates
    sandbox: str = ""  # "whole", or walls that do not stand around the job's code; "": none has run yet


class JobPage(msgspec.Struct, frozen=True, kw_only=True):
    """Jobs, newest first. `next`: give it as `after` for the next page; None: this was the last."""

    items: list[JobBrief]
    next: str | None


class Accepted(msgspec.Struct, frozen=True, kw_only=True):
    """The request is on its way to the scheduler; the job's state follows in its events."""

    job: str
    verb: str
    state: State


class MetricsPage(msgspec.Struct, frozen=True, kw_only=True):
    """One entry per update, in the order made. A resumed trainer repeats updates under a higher epoch."""

    items: list[UpdateMetrics]
    next: str | None


class PhasePage(msgspec.Struct, frozen=True, kw_only=True):
    """Every phase ordered, in order."""

    items: list[Phase]
    next: str | None


class SamplePage(msgspec.Struct, frozen=True, kw_only=True):
    """The ledger's sums as the scheduler saw them each second, in order."""

    items: list[LedgerSample]
    next: str | None


class LedgerView(msgspec.Struct, frozen=True, kw_only=True):
    """Trajectories by state. `holds`: the six states add up to `submitted`. `dead`: dead letters, None: forgotten."""

    submitted: int
    running: int
    buffered: int
    trained: int
    filtered: int
    failed: int
    expired: int
    holds: bool
    dead: int | None


class WaitList(msgspec.Struct, frozen=True, kw_only=True):
    """What waits now: by name, with owner and deadline."""

    items: tuple[Wait, ...]


class WorkerList(msgspec.Struct, frozen=True, kw_only=True):
    """Rollout workers as they see themselves, and the job's live processes."""

    items: list[WorkerStatus]
    processes: list[Heartbeat]


class VersionPage(msgspec.Struct, frozen=True, kw_only=True):
    """Versions, oldest first. `latest`: the newest published one of all."""

    items: list[VersionRecord]
    next: VersionId | None
    latest: VersionId | None


class HopView(msgspec.Struct, frozen=True, kw_only=True):
    """One hop that was passed. `source`: a span, or the record alone (`seconds` is then None)."""

    hop: str
    source: Literal["span", "record"]
    at: float | None  # wall-clock unix seconds at which it began
    seconds: float | None
    service: str
    instance: str
    attributes: dict[str, Any]


class VersionView(msgspec.Struct, frozen=True, kw_only=True):
    """A version with its own path: minted, converted, published; staged, verified, active per worker."""

    record: VersionRecord
    path: list[HopView]


class RewardView(msgspec.Struct, frozen=True, kw_only=True):
    """A trajectory's reward. `value` is None unless `scored`: unscored is never 0."""

    state: Literal["scored", "unscored", "failed"]
    value: float | None
    reason: str
    judge: str
    seconds: float


class TrajectoryBrief(msgspec.Struct, frozen=True, kw_only=True):
    """A trajectory in a listing."""

    trajectory: str
    group: int
    index: int
    state: TrajectoryState
    attempt: int | None  # None: the ledger is gone; the record itself knows it
    update: int | None  # the update that claimed or consumed it
    reason: str


class TrajectoryPage(msgspec.Struct, frozen=True, kw_only=True):
    """Trajectories by group and index. A page may hold fewer than asked for while `next` is not None."""

    items: list[TrajectoryBrief]
    next: str | None


class TrajectoryView(msgspec.Struct, frozen=True, kw_only=True):
    """A trajectory with its record. Arrays of sampled tokens run parallel; None: not known (yet)."""

    job: str
    trajectory: str
    group: int
    index: int
    prompt: int
    attempt: int
    state: TrajectoryState
    update: int | None
    lag: int | None  # version updated minus version of the oldest sampled token; None until claimed
    reason: str
    text: str
    finish: str
    tokens: list[int]
    segments: tuple[Segment, ...]
    logprobs: list[float]
    trainer_logprobs: list[float] | None
    loss_mask: list[int]
    spans: tuple[VersionSpan, ...]
    convention: SamplingConvention
    contract: str
    expert_shape: tuple[int, int, int] | None
    reward: RewardView | None
    advantage: float | None
    timing: Timing
    traceparent: str
    hops: list[HopView]


class TokenView(msgspec.Struct, frozen=True, kw_only=True):
    """The token itself. `text` and `piece` are None when the model's tokenizer is not at hand."""

    index: int  # counts sampled tokens
    position: int  # counts all tokens of the record
    id: int
    text: str | None
    piece: str | None


class TokenPath(msgspec.Struct, frozen=True, kw_only=True):
    """One token's whole path, from its prompt to the update that consumed it, and its version's own path."""

    job: str
    trajectory: str
    group: int
    index: int
    attempt: int
    prompt: int
    token: TokenView
    span: VersionSpan
    behaviour_logprob: float
    trainer_logprob: float | None
    gap: float | None  # trainer minus behaviour
    decomposition: Decomposition | None  # None: the trajectory was not probed, or got no answer
    convention: SamplingConvention
    loss_mask: int
    routes: list[list[int]] | None  # by routing layer, experts where it was sampled; None: not recorded
    state: TrajectoryState
    update: int | None
    lag: int | None  # version updated minus this token's version
    reward: RewardView | None
    advantage: float | None
    hops: list[HopView]  # of the token path, in order
    missing: list[
        str
    ]  # hops of the path that no span and no record tells of (not reached, or the span was lost)
    version: VersionView | None  # None: neither Redis nor a span knows the version


class Named(msgspec.Struct, frozen=True, kw_only=True):
    """Names that a spec may use."""

    items: list[str]


class RecipeList(msgspec.Struct, frozen=True, kw_only=True):
    """Precision recipes: name to contract."""

    items: dict[str, dict[str, Any]]


class Health(msgspec.Struct, frozen=True, kw_only=True):
    """Whether the gateway can do its work."""

    ready: bool
    why: str


def reward_view(reward: Reward) -> RewardView:
    """A reward as people see it."""
    return RewardView(
        state=reward.state,
        value=reward.value,
        reason=reward.reason,
        judge=reward.judge,
        seconds=reward.seconds,
    )
