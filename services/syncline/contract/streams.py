"""Every Redis key, once: its name, who writes it, who reads it, and how it ends.

A key that is not in this file does not exist. Job keys carry the job id as a Redis hash tag (`{j1a2b}`), so that
all keys of one job lie in one slot and one Lua script may touch them together.
"""

from __future__ import annotations

from typing import Literal

import msgspec

PREFIX = "syncline"


class Key(msgspec.Struct, frozen=True, kw_only=True):
    """A key, or a family of keys when `scope` is "job" or "id".

    `ends` says what removes it: "forever" (small, bounded), "with the job" (deleted by retention after the
    record is on disk), or "ttl" (expires by itself).
    """

    name: str
    scope: Literal["global", "job", "id"]
    kind: Literal["string", "hash", "zset", "set", "stream", "list"]
    writers: tuple[str, ...]
    readers: tuple[str, ...]
    ends: Literal["forever", "with the job", "ttl"]
    says: str

    def at(self, which: str = "") -> str:
        """The Redis key. `which` is the job id (scope "job") or another id (scope "id"), else empty."""
        if (self.scope == "global") != (which == ""):
            raise ValueError(f"key {self.name!r} has scope {self.scope}: got id {which!r}")
        if self.scope == "global":
            return f"{PREFIX}:{self.name}"
        if self.scope == "job":
            return f"{PREFIX}:{{{which}}}:{self.name}"
        return f"{PREFIX}:{self.name}:{which}"


# ---- the whole installation -----------------------------------------------------------------------------------
JOBS = Key(
    name="jobs",
    scope="global",
    kind="zset",
    writers=("gateway", "scheduler"),
    readers=("gateway", "scheduler"),
    ends="forever",
    says="job ids by submission time (unix seconds)",
)
REQUESTS = Key(
    name="requests",
    scope="global",
    kind="stream",
    writers=("gateway",),
    readers=("scheduler",),
    ends="forever",
    says="`events.Request`: submit, cancel, pause, resume, switch, scale; deleted once the scheduler has taken them",
)
IDEMPOTENCY = Key(
    name="idempotency",
    scope="id",
    kind="string",
    writers=("gateway",),
    readers=("gateway",),
    ends="ttl",
    says="idempotency key -> job id and spec hash, 24 hours",
)
OWNED = Key(
    name="owned",
    scope="id",
    kind="zset",
    writers=("gateway", "scheduler"),
    readers=("gateway",),
    ends="forever",
    says="a tenant's jobs (id: the tenant) by submission time; one whose hash and folder are gone is taken out",
)
UNENDED = Key(
    name="unended",
    scope="id",
    kind="set",
    writers=("gateway", "scheduler"),
    readers=("gateway",),
    ends="forever",
    says="a tenant's jobs that were not over when it last submitted one; never more than its quota",
)
RATE = Key(
    name="rate",
    scope="id",
    kind="hash",
    writers=("gateway",),
    readers=("gateway",),
    ends="ttl",
    says="a tenant's bucket of requests: tokens left, and when that was, by the server's clock",
)
HEARTBEAT = Key(
    name="heartbeat",
    scope="id",
    kind="string",
    writers=("rollout", "trainer", "sync", "scheduler", "errands", "gateway", "validator"),
    readers=("gateway", "scheduler", "sync"),
    ends="ttl",
    says="`events.Heartbeat` of one process (id: job/service/name, or service/name); gone 5 s after its last beat",
)
CELERY = Key(
    name="celery",
    scope="id",
    kind="list",
    writers=("rollout", "scheduler", "errands"),
    readers=("errands",),
    ends="forever",
    says="errands on their way (id: the queue, or a name that Celery gives its own bookkeeping); empties itself",
)
JUDGED = Key(
    name="judged",
    scope="global",
    kind="zset",
    writers=("scheduler", "errands"),
    readers=("errands",),
    ends="forever",
    says="jobs with an HTTP judge, by when they began or last had something for it; a job's end removes it",
)
DEVICES = Key(
    name="devices",
    scope="id",
    kind="hash",
    writers=("rollout", "trainer"),
    readers=("scheduler", "gateway"),
    ends="forever",
    says="memory leases of one device: holder -> bytes and fencing number; field `budget` in bytes",
)

# ---- one job: control -----------------------------------------------------------------------------------------
JOB = Key(
    name="job",
    scope="job",
    kind="hash",
    writers=("gateway", "scheduler", "errands"),
    readers=("gateway", "scheduler", "rollout", "trainer", "sync", "errands"),
    ends="with the job",
    says="resolved spec (JSON), its hash, state, reason, waits (JSON), created, started, ended, folder; `pool`: "
    "`pool.Pool`, `judge`: `judging.JudgeStatus` (JSON); `sandbox`: walls that do not stand around code; `tenant`",
)
MACHINE = Key(
    name="machine",
    scope="job",
    kind="hash",
    writers=("scheduler",),
    readers=("scheduler",),
    ends="with the job",
    says="machine state (JSON), cursor in `events`, place in the data sets: written in one transaction",
)
EVENTS = Key(
    name="events",
    scope="job",
    kind="stream",
    writers=("rollout", "trainer", "sync", "gateway", "scheduler", "errands"),
    readers=("scheduler", "gateway"),
    ends="with the job",
    says="`events.Event`: what happened; folding them rebuilds the machine; also what SSE sends",
)
PHASE = Key(
    name="phase",
    scope="job",
    kind="string",
    writers=("scheduler",),
    readers=("rollout", "trainer", "sync", "gateway"),
    ends="with the job",
    says="`events.Phase` now wanted (level-triggered: a service that starts late obeys the same)",
)
PHASES = Key(
    name="phases",
    scope="job",
    kind="stream",
    writers=("scheduler",),
    readers=("rollout", "trainer", "sync", "gateway"),
    ends="with the job",
    says="each `Phase` ever wanted, in order: wakes blocked readers, and is the report's timeline",
)

# ---- one job: trajectories ------------------------------------------------------------------------------------
WORK = Key(
    name="work",
    scope="job",
    kind="stream",
    writers=("scheduler", "rollout"),
    readers=("rollout",),
    ends="with the job",
    says="`events.WorkItem`, one per trajectory to sample; group `rollout`; acknowledged by publish or finish",
)
TRAJECTORIES = Key(
    name="trajectories",
    scope="job",
    kind="stream",
    writers=("rollout",),
    readers=("trainer", "errands", "gateway"),
    ends="with the job",
    says="`token_path.Trajectory`, one per entry; the ledger keeps its id; deleted once a checkpoint holds its effect",
)
HELD = Key(
    name="held",
    scope="job",
    kind="hash",
    writers=("scheduler", "rollout", "errands", "trainer"),
    readers=("scheduler", "rollout", "errands", "trainer", "gateway"),
    ends="with the job",
    says="the ledger's lines, as in `entries`, of trajectories that have a work item or a record: small, however long "
    "the job",
)
ENTRIES = Key(
    name="entries",
    scope="job",
    kind="hash",
    writers=("scheduler", "rollout", "errands", "trainer"),
    readers=("scheduler", "rollout", "errands", "trainer", "gateway"),
    ends="with the job",
    says="the ledger: trajectory id -> its one state, attempt, versions, update (see runtime/ledger.py), of those that "
    "hold nothing any more; a job begun before there was `held` has more of them here, until they are written",
)
COUNTS = Key(
    name="counts",
    scope="job",
    kind="hash",
    writers=("scheduler", "rollout", "errands", "trainer"),
    readers=("scheduler", "gateway", "trainer"),
    ends="with the job",
    says="the ledger's sums: submitted, running, buffered, trained, filtered, failed, expired; claimed, refused; and "
    "`oldest:V`: unclaimed groups whose oldest version is V",
)
GROUPS = Key(
    name="groups",
    scope="job",
    kind="hash",
    writers=("scheduler", "rollout", "errands", "trainer"),
    readers=("trainer", "scheduler"),
    ends="with the job",
    says="open groups: group -> size, members accounted, oldest version, state; removed when the group ends",
)
READY = Key(
    name="ready",
    scope="job",
    kind="zset",
    writers=("errands", "trainer", "rollout"),
    readers=("trainer", "scheduler"),
    ends="with the job",
    says="groups whose every member is rewarded or ended, scored by oldest version number: what may be claimed",
)
REWARDS = Key(
    name="rewards",
    scope="job",
    kind="hash",
    writers=("errands",),
    readers=("trainer", "gateway"),
    ends="with the job",
    says="trajectory id -> `token_path.Reward`; removed with the trajectory's stream entry",
)
DELIVERIES = Key(
    name="deliveries",
    scope="job",
    kind="hash",
    writers=("errands",),
    readers=("errands",),
    ends="with the job",
    says="trajectory/attempt -> times its scoring began and did not end: an errand that kills its worker is counted",
)
JUDGING = Key(
    name="judging",
    scope="job",
    kind="stream",
    writers=("errands",),
    readers=("errands",),
    ends="with the job",
    says="`judging.Judgeable`: score errands for the job's HTTP judge; deleted when taken, for the ledger has them too",
)
CLAIMS = Key(
    name="claims",
    scope="job",
    kind="hash",
    writers=("trainer",),
    readers=("trainer", "scheduler", "gateway", "rollout"),
    ends="with the job",
    says="update -> trajectory ids claimed for it and not yet in a segment; field `version`: version being updated",
)
OUTCOMES = Key(
    name="outcomes",
    scope="job",
    kind="stream",
    writers=("rollout", "errands", "trainer", "scheduler"),
    readers=("scheduler",),
    ends="with the job",
    says="how each group ended, in order; dropped once the scheduler has saved what follows for the next prompts",
)
RATES = Key(
    name="rates",
    scope="job",
    kind="hash",
    writers=("scheduler",),
    readers=("scheduler",),
    ends="with the job",
    says="item of a data set -> epoch and mean reward of its newest group; written with `machine`, if prompts go by it",
)
DEAD = Key(
    name="dead",
    scope="job",
    kind="stream",
    writers=("rollout", "trainer", "errands", "scheduler", "sync"),
    readers=("gateway",),
    ends="with the job",
    says="dead letters: entries that could not be read or used up their attempts, with the reason; capped at 10,000",
)
METRICS = Key(
    name="metrics",
    scope="job",
    kind="stream",
    writers=("trainer",),
    readers=("gateway", "scheduler"),
    ends="with the job",
    says="`events.UpdateMetrics`, one per update",
)
PROBES = Key(
    name="probes",
    scope="job",
    kind="stream",
    writers=("trainer",),
    readers=("rollout",),
    ends="with the job",
    says="`diagnosis.Probe`; every worker reads all of it from its own cursor and answers its own; capped at 1,000",
)
PROBED = Key(
    name="probed",
    scope="job",
    kind="stream",
    writers=("rollout",),
    readers=("trainer",),
    ends="with the job",
    says="`diagnosis.Probed`; capped at 1,000",
)
DIAGNOSTICS = Key(
    name="diagnostics",
    scope="job",
    kind="stream",
    writers=("trainer",),
    readers=("gateway",),
    ends="with the job",
    says="`diagnosis.Diagnostics`, one per update; capped at 100,000",
)
PINS = Key(
    name="pins",
    scope="job",
    kind="hash",
    writers=("gateway", "sync"),
    readers=("sync",),
    ends="with the job",
    says="evaluating job -> version that is kept in the store for it; removed once that job has ended",
)
GUEST = Key(
    name="guest",
    scope="job",
    kind="string",
    writers=("scheduler",),
    readers=("rollout", "scheduler"),
    ends="with the job",
    says="`evaluation.Guest` whose samples the job's workers may begin now; absent: none",
)
EVALUATIONS = Key(
    name="evaluations",
    scope="job",
    kind="hash",
    writers=("scheduler",),
    readers=("gateway",),
    ends="with the job",
    says="evaluating job/version -> `evaluation.Evaluation` (JSON), with the training job and with the evaluation",
)
SAMPLES = Key(
    name="samples",
    scope="job",
    kind="stream",
    writers=("scheduler",),
    readers=("gateway",),
    ends="with the job",
    says="`events.LedgerSample`, one per second: the conservation law as observed; capped at 100,000",
)

# ---- one job: versions ----------------------------------------------------------------------------------------
MINTED = Key(
    name="minted",
    scope="job",
    kind="stream",
    writers=("trainer",),
    readers=("sync", "gateway"),
    ends="with the job",
    says="`version_path.Minted`; group `sync`; acknowledged when a newer one took its place",
)
VERSIONS = Key(
    name="versions",
    scope="job",
    kind="hash",
    writers=("sync", "trainer"),
    readers=("gateway", "rollout", "trainer", "sync"),
    ends="with the job",
    says="`str(VersionId)` -> `VersionRecord` (JSON); field `latest`: the newest published version",
)
SYNC = Key(
    name="sync",
    scope="job",
    kind="stream",
    writers=("sync",),
    readers=("rollout",),
    ends="with the job",
    says="`version_path.SyncOrder`, in order; every worker reads all of it from its own cursor; capped at 10,000",
)
ACKS = Key(
    name="acks",
    scope="job",
    kind="stream",
    writers=("rollout",),
    readers=("sync",),
    ends="with the job",
    says="`version_path.Ack`; group `sync`",
)
PROOFS = Key(
    name="proofs",
    scope="job",
    kind="stream",
    writers=("sync", "validator"),
    readers=("validator", "sync"),
    ends="with the job",
    says="`validation.Wanted` and `validation.Proof`: versions that must pass level 6 before they are active; capped "
    "at 10,000",
)
WORKERS = Key(
    name="workers",
    scope="job",
    kind="hash",
    writers=("rollout", "sync"),
    readers=("gateway", "sync", "scheduler"),
    ends="with the job",
    says="worker -> `events.WorkerStatus`; the worker writes it, sync removes one that left",
)
LOCK = Key(
    name="lock",
    scope="id",
    kind="string",
    writers=("scheduler", "trainer", "sync", "validator"),
    readers=("scheduler", "trainer", "sync", "validator"),
    ends="ttl",
    says="single-writer lease (id: job/service): holder's incarnation, 10 s, renewed while alive",
)

KEYS: tuple[Key, ...] = tuple(value for value in list(globals().values()) if isinstance(value, Key))
"""All keys, in file order. `docs/keys.md` is generated from this tuple."""

GROUP_ROLLOUT = "rollout"
GROUP_SYNC = "sync"
GROUP_SCHEDULER = "scheduler"
