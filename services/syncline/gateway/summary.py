"""`summary.json` of a job, assembled from what the job left behind. Pure: no I/O, no clock.

`Evidence` is the whole input; `reporter.py` gathers it from Redis and the run folder and keeps it there, so
that the same summary can be made again after Redis is gone. Nothing here trusts a total when it can count:
`repeated` and `lost` come from the segments, the conservation law is added up again for each sample.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence

import msgspec

from syncline.contract.drawn import PromptAccount
from syncline.contract.events import (
    TERMINAL_JOB_STATES,
    JobState,
    Mode,
    Phase,
    UpdateMetrics,
)
from syncline.gateway.diagnosed import DiagnosticsSummary, summarise_diagnostics
from syncline.gateway.evidence import LEFT_OVER, OPEN_STATES, STATES, Evidence, SegmentFacts


class RewardSummary(msgspec.Struct, frozen=True, kw_only=True):
    """Mean over groups of the group's mean reward. None: nothing was scored there."""

    first_fifth: float | None
    last_fifth: float | None


class ModeBegan(msgspec.Struct, frozen=True, kw_only=True):
    mode: Mode
    update: int  # updates made when the mode began


class LagSummary(msgspec.Struct, frozen=True, kw_only=True):
    """Over all trained trajectories; None: none was trained."""

    max: int | None
    mean: float | None
    bound: int


class LedgerSummary(msgspec.Struct, frozen=True, kw_only=True):
    """Trajectories by state at the end."""

    submitted: int
    running: int
    buffered: int
    trained: int
    filtered: int
    failed: int
    expired: int


class VersionSummary(msgspec.Struct, frozen=True, kw_only=True):
    minted: int
    active: int  # versions whose commit scope was complete


class SecondsSummary(msgspec.Struct, frozen=True, kw_only=True):
    """`setup`: job start to the first open gate. `training`: from there to the end. None: not reached."""

    setup: float | None
    training: float | None


class LengthSummary(msgspec.Struct, frozen=True, kw_only=True):
    """Mean sampled tokens per trajectory; None: there is none whose length is known.

    Trajectories that were left over when the job ended count in none of them: no policy chose them.
    """

    trained_mean: float | None
    published_mean: float | None  # trained or not: what the policy chose from
    dropped_mean: float | None  # published, then ended as expired


class LagPolicySummary(msgspec.Struct, frozen=True, kw_only=True):
    """What keeping the bound cost. `length_bias`: trained over published mean length, less 1 (0: none)."""

    policy: str
    waited_seconds: float  # the trainer's waits for its batches, added up
    expired_groups: int
    masked_tokens: int
    length: LengthSummary
    length_bias: float | None


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """`summary.json`. `mismatch`: mean |trainer - rollout| log-prob over tokens of lag 0; None: none seen."""

    state: JobState
    updates: int
    reward: RewardSummary
    modes: tuple[ModeBegan, ...]
    lag: LagSummary
    ledger: LedgerSummary
    conservation_violations: int
    lost: int
    repeated: int
    versions: VersionSummary
    mismatch: float | None
    diagnostics: DiagnosticsSummary
    seconds: SecondsSummary
    lag_policy: LagPolicySummary
    prompts: PromptAccount


def summarise(evidence: Evidence) -> Summary:
    """The summary of a job, running or ended."""
    metrics = last_of_each_update(evidence.metrics)
    trained = [tokens for segment in evidence.segments for tokens in segment.tokens]
    return Summary(
        state=evidence.state,
        updates=max((m.update for m in metrics), default=0),
        reward=RewardSummary(
            first_fifth=_reward(metrics[: _fifth(metrics)]), last_fifth=_reward(metrics[-_fifth(metrics) :])
        ),
        modes=modes(evidence.phases),
        lag=_lag(metrics, evidence.max_lag),
        ledger=_ledger(evidence.counts),
        conservation_violations=violations(evidence),
        lost=len(lost(evidence)),
        repeated=len(repeated(evidence.segments)),
        versions=VersionSummary(
            minted=sum(1 for v in evidence.versions if v.minted is not None),
            active=sum(1 for v in evidence.versions if v.active is not None),
        ),
        mismatch=mean([m.same_version_gap for m in metrics if m.same_version_gap is not None]),
        diagnostics=summarise_diagnostics(evidence.diagnostics),
        seconds=_seconds(evidence),
        lag_policy=_lag_policy(evidence, metrics, trained),
        prompts=evidence.prompts,
    )


def last_of_each_update(metrics: Iterable[UpdateMetrics]) -> list[UpdateMetrics]:
    """One entry per update, in order: a resumed trainer repeats updates, and the highest epoch counts."""
    last: dict[int, UpdateMetrics] = {}
    for m in metrics:
        if m.update not in last or m.epoch >= last[m.update].epoch:
            last[m.update] = m
    return [last[update] for update in sorted(last)]


def modes(phases: Sequence[Phase]) -> tuple[ModeBegan, ...]:
    """The modes in order, each with the number of updates made when it began."""
    found: list[ModeBegan] = []
    for phase in phases:
        if not found or found[-1].mode != phase.mode:
            found.append(ModeBegan(mode=phase.mode, update=phase.update))
    return tuple(found)


def violations(evidence: Evidence) -> int:
    """Samples at which the conservation law did not hold, the final counts included."""
    broken = sum(
        1
        for s in evidence.samples
        if not s.holds
        or s.submitted != s.running + s.buffered + s.trained + s.filtered + s.failed + s.expired
    )
    counts = evidence.counts
    final = counts.get("submitted", 0) != sum(counts.get(state, 0) for state in STATES)
    return broken + int(final)


def lost(evidence: Evidence) -> list[str]:
    """Trajectories that ended nowhere (once the job has ended), or are called trained and are in no segment.

    A trajectory that the counts know and the ledger does not is lost too; having no id, it shows as "?".
    """
    consumed = {trajectory for segment in evidence.segments for trajectory in segment.trajectories}
    over = evidence.state in TERMINAL_JOB_STATES
    gone = [
        entry.trajectory
        for entry in evidence.ledger
        if (over and entry.state in OPEN_STATES)
        or (entry.state == "trained" and entry.trajectory not in consumed)
    ]
    unknown = evidence.counts.get("submitted", 0) - len(evidence.ledger) if over else 0
    return gone + ["?"] * max(0, unknown)


def repeated(segments: Iterable[SegmentFacts]) -> list[str]:
    """Trajectories that more than one update's segment, or one segment twice, holds."""
    seen = Counter(trajectory for segment in segments for trajectory in segment.trajectories)
    return sorted(trajectory for trajectory, times in seen.items() if times > 1)


def mean(values: Sequence[float]) -> float | None:
    """Arithmetic mean of the finite values, None when there are none."""
    finite = [value for value in values if math.isfinite(value)]
    return math.fsum(finite) / len(finite) if finite else None


def _fifth(metrics: Sequence[UpdateMetrics]) -> int:
    return max(1, len(metrics) // 5)


def _reward(metrics: Sequence[UpdateMetrics]) -> float | None:
    scored = [(m.reward, m.groups) for m in metrics if m.reward is not None and math.isfinite(m.reward)]
    groups = sum(count for _, count in scored)
    return math.fsum(reward * count for reward, count in scored) / groups if groups else None


def _lag(metrics: Sequence[UpdateMetrics], bound: int) -> LagSummary:
    counts: Counter[int] = Counter()
    for m in metrics:
        counts.update({int(lag): count for lag, count in m.lag_counts.items()})
    total = counts.total()
    return LagSummary(
        max=max((lag for lag, count in counts.items() if count), default=None),
        mean=sum(lag * count for lag, count in counts.items()) / total if total else None,
        bound=bound,
    )


def _ledger(counts: dict[str, int]) -> LedgerSummary:
    return LedgerSummary(
        submitted=counts.get("submitted", 0),
        running=counts.get("running", 0),
        buffered=counts.get("buffered", 0),
        trained=counts.get("trained", 0),
        filtered=counts.get("filtered", 0),
        failed=counts.get("failed", 0),
        expired=counts.get("expired", 0),
    )


def _seconds(evidence: Evidence) -> SecondsSummary:
    opened = next((phase.at for phase in evidence.phases if phase.gate == "open"), None)
    begun = evidence.started if evidence.started is not None else evidence.created
    latest = evidence.ended or max((m.at for m in evidence.metrics), default=None)
    return SecondsSummary(
        setup=opened - begun if opened is not None and begun is not None else None,
        training=latest - opened if latest is not None and opened is not None else None,
    )


def _lag_policy(
    evidence: Evidence, metrics: Sequence[UpdateMetrics], trained: Sequence[int]
) -> LagPolicySummary:
    chosen = [e for e in evidence.ledger if e.tokens is not None and e.reason not in LEFT_OVER]
    published = [e.tokens for e in chosen if e.tokens is not None]
    dropped = [e.tokens for e in chosen if e.tokens is not None and e.state == "expired"]
    lengths = LengthSummary(
        trained_mean=mean(trained), published_mean=mean(published), dropped_mean=mean(dropped)
    )
    return LagPolicySummary(
        policy=evidence.lag_policy,
        waited_seconds=math.fsum(m.waited for m in metrics),
        expired_groups=sum(m.expired for m in metrics),
        masked_tokens=sum(m.masked_tokens for m in metrics),
        length=lengths,
        length_bias=_over(lengths.trained_mean, lengths.published_mean),
    )


def _over(part: float | None, whole: float | None) -> float | None:
    return part / whole - 1 if part is not None and whole else None
