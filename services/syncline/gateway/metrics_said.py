"""What is said of one job: its account and where it stands, as samples."""

from __future__ import annotations

import time

from syncline.contract import lag
from syncline.contract.diagnosis import Diagnostics, Tail
from syncline.contract.events import UpdateMetrics
from syncline.contract.version_path import VersionRecord
from syncline.gateway import metrics_names as names
from syncline.gateway.metrics_account import Account, reached
from syncline.gateway.metrics_sheet import Sheet, bounded
from syncline.gateway.metrics_state import Standing
from syncline.runtime.ledger_shapes import STATES

_CALLS = ("fenced", "refused", "retried", "resubmitted", "groups_lost")


def say_job(sheet: Sheet, account: Account, state: Standing, server_time: float) -> None:
    """Everything. `server_time`: unix seconds of the Redis server's clock."""
    _say_state(sheet, account, state)
    _say_time(sheet, account, state, server_time)
    _say_updates(sheet, account)
    if account.update is not None:
        _say_newest(sheet, account.job, account.update)
    _say_trajectories(sheet, account.job, account, state)
    _say_workers(sheet, account.job, state)
    _say_versions(sheet, account, state)
    if account.measured is not None:
        _say_precision(sheet, account.job, account, account.measured)


def _say_state(sheet: Sheet, account: Account, state: Standing) -> None:
    job, record, phase = account.job, state.record, account.phase
    spec = record.spec
    now_in = ("none", "none") if phase is None else (phase.mode, phase.phase)
    sheet.say(names.INFO, 1, job, spec.name, record.state, *now_in, spec.precision.recipe or "none")
    sheet.say(names.UPDATES_WANTED, spec.schedule.updates, job)
    sheet.say(names.LAG_BOUND, spec.schedule.max_lag, job)
    for name, since in sorted({wait.name: wait.since for wait in record.waits}.items()):
        sheet.say(names.WAIT, max(0.0, time.time() - since), job, name)
    sheet.say(names.VIOLATIONS, state.violations, job)


def _say_time(sheet: Sheet, account: Account, state: Standing, server_time: float) -> None:
    job, ended = account.job, state.record.ended
    # a job that failed has no last order: its time ends with it, by the scheduler's clock
    until = min(server_time, ended) if state.over and ended is not None else server_time
    spent, awake = account.spent(until)
    for (mode, phase), seconds in sorted(spent.items()):
        sheet.say(names.PHASE_SECONDS, seconds, job, mode, phase)
    for (mode, phase), times in sorted(account.phases.items()):
        sheet.say(names.PHASES, times, job, mode, phase)
    rollout, counted = awake.get("rollout", 0.0), awake.get("counted", 0.0)
    uncounted = (rollout - counted) * state.record.spec.rollout.workers
    if awake:
        sheet.say(names.AWAKE_SECONDS, awake.get("workers", 0.0) + uncounted, job, "rollout")
        sheet.say(names.AWAKE_SECONDS, awake.get("trainer", 0.0), job, "trainer")
    for name, status in sorted(state.workers.items()):
        sheet.say(names.BUSY_SECONDS, status.busy, job, "rollout", name)
    sheet.say(names.BUSY_SECONDS, account.update_seconds.sum, job, "trainer", "trainer")


def _say_updates(sheet: Sheet, account: Account) -> None:
    job, sums = account.job, account.sums
    sheet.say(names.UPDATES, sums["updates"], job)
    sheet.say(names.UPDATES_SKIPPED, sums["skipped"], job)
    sheet.say(names.TRAINED_TOKENS, sums["tokens"], job)
    sheet.say(names.TRAINED, sums["trajectories"], job)
    sheet.say(names.UNSCORED, sums["unscored"], job)
    sheet.say(names.GROUPS_OVER_LAG, sums["over_lag"], job)
    for why in ("masked", "outside", "clamped"):
        sheet.say(names.TOKENS_CUT, account.cut[why], job, why)
    sheet.tally(account.lag, job)
    sheet.tally(account.update_seconds, job)
    sheet.tally(account.waited, job)


def _say_newest(sheet: Sheet, job: str, made: UpdateMetrics) -> None:
    sheet.say(names.UPDATE, made.update, job)
    for metric, value in (
        (names.REWARD, made.reward),
        (names.LOSS, made.loss),
        (names.GRAD_NORM, made.grad_norm),
        (names.ENTROPY, made.entropy),
        (names.KL, made.kl),
        (names.RATIO, made.ratio_mean),
        (names.CLIPPED, made.clip_fraction),
        (names.RESPONSE, made.response_mean),
    ):
        sheet.say(metric, value, job)
    gaps = (("mean", made.gap_mean), ("max", made.gap_max), ("same_version", made.same_version_gap))
    for over, gap in gaps:
        sheet.say(names.GAP, gap, job, over)
    if made.route_agreement:
        sheet.say(names.ROUTES, sum(made.route_agreement) / len(made.route_agreement), job, "mean")
        sheet.say(names.ROUTES, min(made.route_agreement), job, "min")


def _say_trajectories(sheet: Sheet, job: str, account: Account, state: Standing) -> None:
    sheet.say(names.SUBMITTED, state.counts.get("submitted", 0), job)
    for name in STATES:
        sheet.say(names.TRAJECTORIES, state.counts.get(name, 0), job, name)
    for what in _CALLS:
        sheet.say(names.LEDGER_CALLS, state.counts.get(what, 0), job, what)
    for how, reasons in _dropped(state).items():
        for why, groups in bounded(reasons).items():
            sheet.say(names.GROUPS_DROPPED, groups, job, how, why)
    sheet.say(names.DEAD_LETTERS, state.dead, job)
    for queue, depth in sorted(state.queues.items()):
        sheet.say(names.QUEUE, depth, job, queue)
    spec = state.record.spec
    credits = lag.credits(spec.schedule.max_lag, spec.batch.groups, state.queues["open"])
    sheet.say(names.CREDITS, 0 if state.over else credits, job)


def _dropped(state: Standing) -> dict[str, dict[str, float]]:
    """Groups by how and why they ended untrained; the reasons are the few that the scheduler counts by."""
    found: dict[str, dict[str, float]] = {
        "filtered": {},
        "failed": {"": 0},
        "expired": {"": 0},
        "unused": {"": 0},
    }
    for source in state.record.prompts.sources:
        for why, groups in source.filtered.items():
            found["filtered"][why] = found["filtered"].get(why, 0) + groups
        for how, groups in (
            ("failed", source.failed),
            ("expired", source.expired),
            ("unused", source.unused),
        ):
            found[how][""] += groups
    return found


def _say_workers(sheet: Sheet, job: str, state: Standing) -> None:
    if (pool := state.record.pool) is not None and not state.over:
        for which, workers in (
            ("wanted", pool.workers),
            ("coming", len(pool.coming)),
            ("leaving", len(pool.leaving)),
            ("least", pool.least),
            ("most", pool.most),
        ):
            sheet.say(names.POOL, workers, job, which)
    for name, status in sorted(state.workers.items()):
        sheet.say(names.SAMPLED_TOKENS, status.tokens, job, name)
        if state.over:  # what they said last is no more so
            continue
        sheet.say(names.WORKER_STATE, 1, job, name, status.state)
        sheet.say(names.WORKER_REQUESTS, status.running, job, name, "running")
        sheet.say(names.WORKER_REQUESTS, status.waiting, job, name, "waiting")
        sheet.say(names.TOKENS_PER_SECOND, status.tokens_per_second, job, name)
        sheet.say(names.RESIDENT, status.resident, job, name)


def _say_versions(sheet: Sheet, account: Account, state: Standing) -> None:
    job, sums, newest = account.job, account.versions(), account.newest
    for stage, tally in sums.stages.items():
        sheet.tally(tally, job, stage)
    sheet.tally(sums.pauses, job)
    sheet.tally(sums.pulls, job)
    for kind in ("whole", "new", "full", "deltas", "held"):
        sheet.say(names.SYNC_BYTES, sums.bytes[kind], job, kind)
    sheet.say(names.VERSIONS_FAILED, sums.failed, job)
    if newest is None:
        return
    sheet.say(names.EPOCH, newest.version.epoch, job)
    if account.compared is not None:
        sheet.say(names.CHANGED, account.compared.changed_share, job)
    known = [*account.open.values(), newest]
    for at in ("minted", "published", "active"):
        numbers = [version.version.number for version in known if _when(version, at) is not None]
        sheet.say(names.VERSION, max(numbers, default=None), job, at)
    for name, status in sorted(state.workers.items()):
        if status.version is None or state.over:
            continue
        sheet.say(names.WORKER_VERSION, status.version.number, job, name)
        sheet.say(names.WORKER_BEHIND, newest.version.number - status.version.number, job, name)
        record = next((one for one in (*known, *account.ended) if one.version == status.version), None)
        if record is None or record.minted is None:
            continue
        sheet.say(names.VERSION_AGE, max(0.0, time.time() - record.minted), job, name)
        if name in record.workers:
            for stage, seconds in reached(record, record.workers[name]):
                sheet.say(names.VERSION_REACHED, seconds, job, name, stage)


def _when(record: VersionRecord, at: str) -> float | None:
    return {"minted": record.minted, "published": record.published, "active": record.active}[at]


def _say_precision(sheet: Sheet, job: str, account: Account, found: Diagnostics) -> None:
    for term, tail in found.terms.items():
        for quantile, value in quantiles(tail):
            sheet.say(names.TERM, value, job, term, quantile)
        sheet.say(names.TERM_MEAN, tail.mean, job, term)
    for term in found.unmeasured:
        sheet.say(names.TERM_UNMEASURED, 1, job, term)
    for term, tails in found.tails_by_lag.items():
        for lag_, tail in sorted(tails.items(), key=lambda pair: int(pair[0]))[: names.MOST_VALUES]:
            for quantile, value in quantiles(tail):
                sheet.say(names.TERM_LAG, value, job, term, lag_, quantile)
            sheet.say(names.TERM_LAG_MEAN, tail.mean, job, term, lag_)
    sheet.say(names.PROBED, account.sums["probed"], job)
    sheet.say(names.ALARMS, account.sums["alarms"], job)
    sheet.say(names.BASELINE, found.baseline, job)
    sheet.say(names.ESS, found.effective_sample_size, job)
    sheet.say(names.TRUNCATED, found.truncated, job)
    sheet.say(names.EXACT, found.exact, job)


def quantiles(tail: Tail) -> list[tuple[str, float]]:
    """(quantile, value)."""
    return [("0.5", tail.median), ("0.99", tail.p99), ("1", tail.max)] if tail.count else []
