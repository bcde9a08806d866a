"""Every number of /metrics about jobs, once: name, kind, labels, meaning. `python -m` prints docs/metrics.md.

Labels are bounded: `job_id` by the jobs shown (`metrics_jobs.py`), `worker` by the spec, the others by closed lists or,
where a spec names them, by `MOST_VALUES`. A label never holds a trajectory, a version or a text that a user wrote,
but for a job's `name`, of which each job has one. (`job` is a label that Prometheus itself sets to the scraped job.)
"""

from __future__ import annotations

from typing import Literal

import msgspec

Kind = Literal["counter", "gauge", "histogram"]
MOST_VALUES = 32
"""Values that one label of one job may have where no closed list bounds it; what is beyond is summed as `other`."""


class Metric(msgspec.Struct, frozen=True):
    """One family. A counter's samples end in `_total`, as Prometheus wants it."""

    name: str
    kind: Kind
    labels: tuple[str, ...]
    says: str
    buckets: tuple[float, ...] = ()


_JOB = ("job_id",)
_SECONDS = (0.01, 0.05, 0.1, 0.5, 1.0, 5.0, 15.0, 60.0, 300.0, 1800.0)
_PAUSES = (0.0001, 0.001, 0.005, 0.02, 0.1, 0.5, 2.0, 10.0, 60.0)
_LAGS = (0.0, 1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 16.0, 32.0, 64.0)


def _gauge(name: str, labels: tuple[str, ...], says: str) -> Metric:
    return Metric(f"syncline_{name}", "gauge", labels, says)


def _counter(name: str, labels: tuple[str, ...], says: str) -> Metric:
    return Metric(f"syncline_{name}", "counter", labels, says)


def _histogram(name: str, labels: tuple[str, ...], says: str, buckets: tuple[float, ...]) -> Metric:
    return Metric(f"syncline_{name}", "histogram", labels, says, buckets)


# ---- the installation ------------------------------------------------------------------------------------------
REDIS_UP = _gauge("redis_up", (), "1: Redis answered this scrape; 0: all below is absent")
REDIS_BYTES = _gauge("redis_memory_bytes", (), "Memory that Redis uses")
JOBS = _gauge("jobs", ("state",), "Jobs that Redis knows, by state")
JOBS_LEFT_OUT = _gauge(
    "jobs_left_out", (), "Jobs that run or have just ended and are not shown: there are too many"
)
ERRANDS_QUEUED = _gauge("errands_queued", (), "Messages that wait for an errands worker")
PROCESS_UP = _gauge(
    "process_up",
    ("job_id", "service", "process"),
    "1: its heartbeat is not older than 5 s (job_id may be empty)",
)
PROCESS_READY = _gauge("process_ready", ("job_id", "service", "process"), "1: it can do its work")
SPANS = _counter("spans", ("job_id", "service", "process"), "Trace spans that the process has ended")
SPANS_MISSING = _gauge(
    "spans_missing",
    ("job_id", "service", "process", "why"),
    "What the traces lack: by exporter, spans ended and not taken (those of the last second included); "
    "`incomplete` and `skewed` spans; `links` beyond a span's limit",
)

# ---- a job -----------------------------------------------------------------------------------------------------
INFO = _gauge("job_info", ("job_id", "name", "state", "mode", "phase", "recipe"), "1")
UPDATES_WANTED = _gauge("updates_wanted", _JOB, "Updates that the spec asks for")
WAIT = _gauge("wait_seconds", ("job_id", "wait"), "Age of what the job waits for now")
PHASE_SECONDS = _counter(
    "phase_seconds", ("job_id", "mode", "phase"), "Seconds spent in a phase, the present one included"
)
PHASES = _counter("phases", ("job_id", "mode", "phase"), "Times that a phase was ordered")
AWAKE_SECONDS = _counter(
    "awake_seconds",
    ("job_id", "side"),
    "Seconds in which a side (rollout, trainer) was ordered awake, times its engines",
)
BUSY_SECONDS = _counter(
    "busy_seconds",
    ("job_id", "side", "worker"),
    "Seconds of those that an engine worked: a worker while requests ran, the trainer while it scored and stepped",
)

# ---- updates ---------------------------------------------------------------------------------------------------
UPDATES = _counter("updates", _JOB, "Optimizer steps made, repeated ones included")
UPDATE = _gauge("update", _JOB, "Newest update")
UPDATES_SKIPPED = _counter("updates_skipped", _JOB, "Steps that the guard skipped")
UPDATE_SECONDS = _histogram("update_seconds", _JOB, "Scoring and stepping", _SECONDS)
BATCH_WAIT = _histogram("batch_wait_seconds", _JOB, "What the trainer waited for a batch", _SECONDS)
TRAINED_TOKENS = _counter("trained_tokens", _JOB, "Sampled tokens in the loss")
TRAINED = _counter("trained_trajectories", _JOB, "Trajectories in updates")
LAG = _histogram("lag", _JOB, "Lag of trained trajectories", _LAGS)
LAG_BOUND = _gauge("lag_bound", _JOB, "max_lag of the spec")
REWARD = _gauge("reward", _JOB, "Mean reward of the newest update's groups")
LOSS = _gauge("loss", _JOB, "Loss of the newest update")
GRAD_NORM = _gauge("grad_norm", _JOB, "Gradient norm of the newest update")
ENTROPY = _gauge("entropy", _JOB, "Entropy of the newest update")
KL = _gauge("kl", _JOB, "KL to the reference policy, newest update")
RATIO = _gauge("ratio_mean", _JOB, "Mean importance ratio, newest update")
CLIPPED = _gauge("clip_fraction", _JOB, "Share of clipped tokens, newest update")
RESPONSE = _gauge("response_tokens_mean", _JOB, "Sampled tokens per trajectory, newest update")
GAP = _gauge(
    "logprob_gap",
    ("job_id", "over"),
    "|trainer - behaviour| log-prob, newest update: mean, max, same_version",
)
ROUTES = _gauge(
    "route_agreement", ("job_id", "over"), "Share of tokens routed as recorded over layers: mean, min"
)
TOKENS_CUT = _counter(
    "tokens_cut", ("job_id", "why"), "Tokens that an update did not use as sampled: masked, outside, clamped"
)

# ---- trajectories and queues -----------------------------------------------------------------------------------
SUBMITTED = _counter("submitted_trajectories", _JOB, "Trajectories submitted")
TRAJECTORIES = _gauge("trajectories", ("job_id", "state"), "Trajectories by state of the ledger")
GROUPS_DROPPED = _counter(
    "groups_dropped",
    ("job_id", "how", "why"),
    "Groups that ended untrained: filtered, failed, expired, unused; and why",
)
GROUPS_OVER_LAG = _counter("groups_over_lag", _JOB, "Groups that the lag policy dropped")
UNSCORED = _counter("unscored_trajectories", _JOB, "Trajectories of updates without a score")
LEDGER_CALLS = _counter(
    "ledger_calls",
    ("job_id", "what"),
    "Calls of the ledger that changed nothing or began anew: fenced, refused, ...",
)
DEAD_LETTERS = _gauge("dead_letters", _JOB, "Entries given up, with their reasons in the stream `dead`")
VIOLATIONS = _counter("conservation_violations", _JOB, "Samples in which the conservation law did not hold")
QUEUE = _gauge(
    "queue_depth",
    ("job_id", "queue"),
    "work: trajectories to sample; records: not yet forgotten; open, ready: groups; judging: at an HTTP judge",
)
CREDITS = _gauge("credits", _JOB, "Groups that may still be submitted: (max_lag + 1) x batch - open ones")

# ---- workers ---------------------------------------------------------------------------------------------------
WORKER_STATE = _gauge(
    "worker_state", ("job_id", "worker", "state"), "1: empty, serving, draining, asleep or out"
)
WORKER_REQUESTS = _gauge(
    "worker_requests", ("job_id", "worker", "state"), "Requests running, and claimed and not begun"
)
POOL = _gauge(
    "pool_workers",
    ("job_id", "which"),
    "Rollout workers of the job: wanted, coming, leaving; least and most are its bounds",
)
SAMPLED_TOKENS = _counter("sampled_tokens", ("job_id", "worker"), "Tokens sampled since the worker began")
TOKENS_PER_SECOND = _gauge("tokens_per_second", ("job_id", "worker"), "Over the worker's last two seconds")
RESIDENT = _gauge("worker_resident_bytes", ("job_id", "worker"), "Resident memory of the worker")

# ---- versions --------------------------------------------------------------------------------------------------
VERSION = _gauge("version", ("job_id", "at"), "Newest version number minted, published, active")
EPOCH = _gauge("epoch", _JOB, "Epoch of the newest version: rises when a trainer resumes")
WORKER_VERSION = _gauge(
    "worker_version", ("job_id", "worker"), "Number of the version that the worker samples under"
)
WORKER_BEHIND = _gauge(
    "worker_versions_behind", ("job_id", "worker"), "Newest minted number minus the worker's"
)
VERSION_AGE = _gauge(
    "version_age_seconds", ("job_id", "worker"), "Seconds since the worker's version was minted"
)
VERSION_SECONDS = _histogram(
    "version_seconds",
    ("job_id", "stage"),
    "From minting to converted, published, staged, verified, active",
    _SECONDS,
)
VERSION_REACHED = _gauge(
    "version_reached_seconds",
    ("job_id", "worker", "stage"),
    "The same of the newest version that the worker made active",
)
VERSIONS_FAILED = _counter("versions_failed", _JOB, "Versions that no worker took")
SYNC_PAUSE = _histogram("sync_pause_seconds", _JOB, "What a commit stopped a worker for", _PAUSES)
SYNC_BYTES = _counter(
    "sync_bytes",
    ("job_id", "kind"),
    "whole: bytes of versions; new: not in the store before; full, deltas: travelled to workers; held: were there",
)
PULL_SECONDS = _histogram("pull_seconds", _JOB, "Time of a worker's transfer", _SECONDS)
CHANGED = _gauge("version_changed_share", _JOB, "Share of elements that the newest compared version changed")

# ---- precision against staleness -------------------------------------------------------------------------------
TERM = _gauge(
    "mismatch",
    ("job_id", "term", "quantile"),
    "|difference| of log-probs per term, newest measured update (quantile 1: max)",
)
TERM_MEAN = _gauge("mismatch_mean", ("job_id", "term"), "Mean of the same")
TERM_LAG = _gauge("mismatch_by_lag", ("job_id", "term", "lag", "quantile"), "The same by lag of the token")
TERM_LAG_MEAN = _gauge("mismatch_by_lag_mean", ("job_id", "term", "lag"), "Mean of the same")
TERM_UNMEASURED = _gauge(
    "mismatch_unmeasured", ("job_id", "term"), "1: not measured in that update; the record says why"
)
PROBED = _counter("probed_tokens", _JOB, "Tokens of which the terms were measured")
BASELINE = _gauge("mismatch_baseline", _JOB, "The contract's own same-version mean |mismatch|")
ALARMS = _counter("mismatch_alarms", _JOB, "Terms out of line with their baseline")
ESS = _gauge("effective_sample_size", _JOB, "Of the importance weights, as a share of the tokens")
TRUNCATED = _gauge("weights_truncated", _JOB, "Share of tokens whose weight was cut or masked")
EXACT = _gauge("mismatch_exact", _JOB, "Share of tokens with mismatch exactly 0")

METRICS: tuple[Metric, ...] = tuple(value for value in list(globals().values()) if isinstance(value, Metric))
"""All of them, in file order. `docs/metrics.md` is generated from this tuple."""


def page() -> str:
    """docs/metrics.md."""
    rows = [
        f"| `{m.name}{'_total' if m.kind == 'counter' else ''}` | {m.kind} | {', '.join(m.labels)} | {m.says} |"
        for m in METRICS
    ]
    head = [
        "# Numbers for Prometheus",
        "",
        "Generated: `python -m syncline.gateway.metrics_names > docs/metrics.md`. The gateway serves them under",
        "`/metrics`, with its own (`syncline_gateway_*`, `process_*`). What is shown of which job: docs/seeing.md.",
        "",
        "| name | kind | labels | meaning |",
        "|---|---|---|---|",
    ]
    return "\n".join([*head, *rows]) + "\n"


if __name__ == "__main__":
    print(page(), end="")  # noqa: T201 - its purpose
