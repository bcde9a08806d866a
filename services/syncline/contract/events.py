"""What the services and the scheduler say to one another, apart from trajectories and versions.

Each message names who stamps it. Times: `at` is wall-clock unix seconds (for people); durations are seconds from
a monotonic clock. Order comes from the stream, never from `at`.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from syncline.contract.pool import Emptied as Emptied
from syncline.contract.pool import Pool as Pool
from syncline.contract.pool import ScaleTo as ScaleTo
from syncline.contract.pool import WorkerLeft as WorkerLeft
from syncline.contract.precision_trace import ComponentTrace
from syncline.contract.validation import VersionRefused as VersionRefused
from syncline.contract.version_path import VersionId

Mode = Literal["colocated", "disjoint"]
PhaseName = Literal["sample", "drain", "train", "sync", "flow", "paused", "done"]
JobState = Literal[
    "queued", "validating", "starting", "running", "paused", "succeeded", "failed", "cancelled"
]
TERMINAL_JOB_STATES = frozenset({"succeeded", "failed", "cancelled"})


# ---- gateway -> scheduler -------------------------------------------------------------------------------------
class Request(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What a user asked for. Stamped by the gateway, read from `requests`."""

    verb: Literal["submit", "cancel", "pause", "resume", "switch", "scale"]
    job: str
    mode: Mode | None = None  # with `switch`
    workers: int | None = None  # with `scale`
    at: float


# ---- scheduler -> services ------------------------------------------------------------------------------------
class Phase(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The placement now wanted of a job's engines. Stamped by the scheduler; level-triggered.

    `gate` open: rollout may begin requests that it holds or takes from `work`. Shut: requests already begun go on
    to their end, none begins. `rollout` asleep is only ever ordered with nothing in flight.
    `trainer` awake is permission to claim and step; in `colocated` mode for one update per `train` phase.
    Every engine acknowledges the newest order that it has read with that order's `seq`, also when it changes
    nothing for that engine (a shut gate counts as shut once all have said so). A process that starts obeys the
    newest order alone and never an older one.
    A rollout worker whose number is not below `workers` leaves: whatever the gate says it begins nothing, hands back
    what it has not begun, ends the rest and then says that it is `Emptied`.
    """

    seq: int  # rises by one with each order of the job: the fencing token of the phase
    mode: Mode
    phase: PhaseName
    rollout: Literal["awake", "asleep"]
    trainer: Literal["awake", "asleep"]
    gate: Literal["open", "shut"]
    update: int  # updates made when this phase was ordered
    workers: int = 0  # 0: all that there are
    at: float


class WorkItem(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, gc=False):
    """One trajectory to sample. Stamped by the scheduler at submission, read from `work`."""

    job: str
    trajectory: str
    group: int
    index: int
    prompt: int  # index into the task's data set; the rollout worker makes prompt text and ids from it
    traceparent: str  # context of the trajectory's trace (its `prompted` hop)
    submitted_at: float


# ---- services -> scheduler ------------------------------------------------------------------------------------
class Slept(msgspec.Struct, frozen=True, tag="slept", forbid_unknown_fields=True, kw_only=True):
    """An engine has given its memory back. Stamped by rollout and trainer when they obey `asleep`."""

    who: str  # worker name, or "trainer"
    seq: int  # the Phase.seq obeyed
    resident: int  # resident bytes after
    baseline: int  # resident bytes before the engine first loaded


class Woke(msgspec.Struct, frozen=True, tag="woke", forbid_unknown_fields=True, kw_only=True):
    """An engine is loaded and may work. Stamped by rollout and trainer."""

    who: str
    seq: int
    version: VersionId | None  # None: holds no verified version (a rollout worker then waits for sync)
    resident: int
    seconds: float


class BatchReady(msgspec.Struct, frozen=True, tag="batch_ready", forbid_unknown_fields=True, kw_only=True):
    """Enough rewarded groups wait for one update. Stamped by the scheduler from the ledger."""

    groups: int
    seq: int  # the order under which this was seen


class BatchShort(msgspec.Struct, frozen=True, tag="batch_short", forbid_unknown_fields=True, kw_only=True):
    """The trainer is awake, nothing is claimed and nothing can be. Stamped by the scheduler from the ledger."""

    groups: int
    seq: int


class Drained(msgspec.Struct, frozen=True, tag="drained", forbid_unknown_fields=True, kw_only=True):
    """Nothing is being sampled and no reward is outstanding. Stamped by the scheduler from the ledger, once every
    rollout worker has acknowledged an order with the gate shut that is not older than this gate's first."""

    seq: int


class Minted(msgspec.Struct, frozen=True, tag="minted", forbid_unknown_fields=True, kw_only=True):
    """An update was made and its version handed to sync. Stamped by the trainer (version 0 included)."""

    version: VersionId


class Active(msgspec.Struct, frozen=True, tag="active", forbid_unknown_fields=True, kw_only=True):
    """A version's commit scope is complete. Stamped by sync."""

    version: VersionId
    workers: tuple[str, ...]


class SyncFailed(msgspec.Struct, frozen=True, tag="sync_failed", forbid_unknown_fields=True, kw_only=True):
    """A version could not be activated anywhere. Stamped by sync; the job fails with this reason."""

    version: VersionId
    reason: str


class SwitchTo(msgspec.Struct, frozen=True, tag="switch_to", forbid_unknown_fields=True, kw_only=True):
    """Another mode is wanted. Stamped by the scheduler, for a user's request, the spec's plan or the policy."""

    mode: Mode
    why: Literal["request", "plan", "policy"]


class Pause(msgspec.Struct, frozen=True, tag="pause", forbid_unknown_fields=True, kw_only=True):
    """Stop after what is in flight."""


class Resume(msgspec.Struct, frozen=True, tag="resume", forbid_unknown_fields=True, kw_only=True):
    """Go on."""


class Cancel(msgspec.Struct, frozen=True, tag="cancel", forbid_unknown_fields=True, kw_only=True):
    """End the job now; its open trajectories end as `expired` with the reason "cancelled"."""


class Finished(msgspec.Struct, frozen=True, tag="finished", forbid_unknown_fields=True, kw_only=True):
    """The trainer has made the last update and its checkpoint is on disk. Stamped by the trainer."""

    updates: int


class WorkerUp(msgspec.Struct, frozen=True, tag="worker_up", forbid_unknown_fields=True, kw_only=True):
    """A process has started and reads its orders. Stamped by rollout and trainer."""

    who: str
    incarnation: str


class WorkerLost(msgspec.Struct, frozen=True, tag="worker_lost", forbid_unknown_fields=True, kw_only=True):
    """A process died; the launcher starts another. Stamped by the scheduler from the launcher's view."""

    who: str
    exit: int | None


class Alarm(msgspec.Struct, frozen=True, tag="alarm", forbid_unknown_fields=True, kw_only=True):
    """A measured term has drifted from its baseline. Changes nothing in the job; people should look.

    Stamped by the trainer, once per update, and by errands when a judge's version changes; the scheduler repeats it in
    the job's hash.
    """

    who: str
    update: int
    what: str  # the terms, each with its figure and its baseline


class Failed(msgspec.Struct, frozen=True, tag="failed", forbid_unknown_fields=True, kw_only=True):
    """The job cannot go on. Stamped by any service."""

    who: str
    reason: str


_OfEngines = Slept | Woke | BatchReady | BatchShort | Drained | Minted | Active | SyncFailed | VersionRefused
_OfPool = ScaleTo | Emptied | WorkerLeft
_OfUsers = SwitchTo | Pause | Resume | Cancel
Event = _OfEngines | _OfPool | _OfUsers | Finished | WorkerUp | WorkerLost | Alarm | Failed


# ---- what people look at --------------------------------------------------------------------------------------
class Heartbeat(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A process is alive and making progress. Stamped by every service each second."""

    service: str
    name: str
    incarnation: str
    pid: int
    port: int | None  # health endpoint on 127.0.0.1 (or the pod's address)
    ready: bool
    why: str  # why not ready; "" when ready
    at: float
    spans: int = 0  # trace spans that it has ended
    missing: dict[str, int] = {}  # what the traces lack of it: `tracing.losses()`


class WorkerStatus(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A rollout worker as it sees itself. Stamped by the worker about twice a second."""

    worker: str
    incarnation: str
    state: Literal["empty", "serving", "draining", "asleep", "out"]  # out: out of rotation, see `why`
    version: VersionId | None
    digest: str
    staged: VersionId | None
    running: int  # requests in the batch
    waiting: int  # claimed and not begun
    tokens: int  # sampled since the process began
    tokens_per_second: float  # over the last two seconds
    device: str
    resident: int
    why: str
    at: float
    busy: float = 0.0  # seconds since the process began in which requests ran


class UpdateMetrics(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One optimizer step. Stamped by the trainer. Rewards are means over groups; log-probs are natural logs."""

    update: int  # the version minted
    epoch: int
    mode: Mode
    groups: int
    trajectories: int
    tokens: int  # sampled tokens in the loss
    reward: float | None  # mean of group means over scored members; None: nothing was scored
    unscored: int
    lag_max: int
    lag_mean: float
    lag_counts: dict[str, int]  # lag -> trajectories
    loss: float | None
    grad_norm: float | None
    entropy: float | None
    ratio_mean: float | None
    clip_fraction: float | None
    gap_mean: float | None  # mean |trainer - behaviour| log-prob
    gap_max: float | None
    same_version_gap: float | None  # the same over tokens of lag 0 alone; None: there were none
    kl: float | None  # to the reference policy; None: not asked for
    response_mean: float  # sampled tokens per trajectory
    masked_tokens: int  # by `mask_old_tokens`
    expired: int  # groups that the lag policy dropped since the last update
    waited: float  # seconds the trainer waited for this batch
    seconds: float  # of scoring and stepping
    non_finite: int  # tensors that the guard found non-finite (the step was then skipped and says so)
    skipped: bool
    clamped: int = 0  # exponents of log-ratios that the overflow guard clamped
    outside: int = 0  # tokens whose importance weight lay outside the correction's interval
    trace: tuple[ComponentTrace, ...] = ()  # fprop, dgrad, wgrad, optimizer: what this step really used
    # per routing layer: share of the fed tokens that the trainer would route as recorded; None: nothing recorded
    route_agreement: tuple[float, ...] | None = None
    route_diverged: tuple[int, ...] | None = None  # per routing layer: tokens that diverge there first
    at: float


class LedgerSample(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The ledger's sums at one moment. Stamped by the scheduler each second."""

    submitted: int
    running: int
    buffered: int
    trained: int
    filtered: int
    failed: int
    expired: int
    holds: bool  # submitted == running + buffered + trained + filtered + failed + expired
    at: float


class Wait(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Something waits. Kept in the job's status while it lasts, so that slow and never look different."""

    name: str  # "device", "batch", "lag", "drain", "activation", "worker", "reward", "validation", ...
    owner: str
    since: float
    deadline: float
    detail: str
