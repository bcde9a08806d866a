"""What an update's `UpdateMetrics` and score rows are made of. Pure."""

from __future__ import annotations

import math
from array import array
from collections import Counter
from collections.abc import Sequence
from typing import Any

from syncline.contract.events import Mode, UpdateMetrics
from syncline.contract.version_path import VersionId
from syncline.runtime.segments import ScoreRow, Scores, Segment, SegmentRow
from syncline.trainer.engine import StepResult


def scores_of(segment: Segment, result: StepResult, minted: VersionId) -> Scores:
    """The scores file's content: one row per trained trajectory."""
    rows = tuple(
        ScoreRow(
            trajectory=row.trajectory.trajectory,
            logprobs=logprobs,
            weights=weights,
            gap=array("f", [a - b for a, b in zip(logprobs, row.trajectory.logprobs, strict=True)]),
            advantage=row.advantage,
        )
        for row, logprobs, weights in zip(segment.rows, result.logprobs, result.weights, strict=True)
    )
    return Scores(update=segment.update, minted=minted, skipped=result.skipped, rows=rows)


def mean_abs(gap: Sequence[float]) -> float:
    """Mean of absolute values; 0.0 for none."""
    return math.fsum(abs(g) for g in gap) / len(gap) if gap else 0.0


def group_reward(segment: Segment) -> tuple[float | None, int]:
    """Mean over groups of the mean over scored members, and how many claimed members were not scored."""
    groups: dict[int, list[float]] = {}
    unscored = 0
    for row in segment.members:
        value = None if row.reward is None else row.reward.value
        if value is None:
            unscored += 1
        else:
            groups.setdefault(row.trajectory.group, []).append(value)
    means = [math.fsum(values) / len(values) for values in groups.values()]
    return (math.fsum(means) / len(means) if means else None), unscored


def metrics_of(
    segment: Segment,
    scores: Scores,
    result: StepResult,
    *,
    mode: Mode,
    kl_asked: bool,
    expired: int,
    waited: float,
    seconds: float,
    at: float,
) -> UpdateMetrics:
    """All figures of one update. Log-probs are natural logs; gaps are over every sampled token."""
    rows, tally, tokens = segment.rows, result.tally, result.tally.tokens
    reward, unscored = group_reward(segment)
    lags = [row.lag for row in rows]
    gaps = [abs(g) for score in scores.rows for g in score.gap]
    return UpdateMetrics(
        update=segment.update,
        epoch=scores.minted.epoch,
        mode=mode,
        groups=len({row.trajectory.group for row in rows}),
        trajectories=len(rows),
        tokens=int(tokens),
        reward=reward,
        unscored=unscored,
        lag_max=max(lags, default=0),
        lag_mean=_mean(lags) or 0.0,
        lag_counts={str(lag): count for lag, count in sorted(Counter(lags).items())},
        loss=_finite(result.loss),
        grad_norm=_finite(result.grad_norm),
        entropy=_finite(tally.entropy / tokens) if tokens else None,
        ratio_mean=_finite(tally.ratio / tokens) if tokens else None,
        clip_fraction=tally.clipped / tokens if tokens else None,
        gap_mean=_finite(_mean(gaps)),
        gap_max=_finite(max(gaps, default=None)),
        same_version_gap=_finite(_mean(_same_version(segment, scores))),
        kl=_finite(tally.kl / tokens) if tokens and kl_asked else None,
        response_mean=_mean([row.trajectory.sampled for row in rows]) or 0.0,
        masked_tokens=sum(_masked(row) for row in segment.members),
        expired=expired,
        waited=waited,
        seconds=seconds,
        non_finite=len(result.non_finite),
        skipped=result.skipped,
        clamped=int(tally.clamped),
        outside=int(tally.outside),
        **_ran(result),
        at=at,
    )


def _ran(result: StepResult) -> dict[str, Any]:
    """What the step used, and where its routes went."""
    if result.routes is None:
        return {"trace": result.trace}
    return {
        "trace": result.trace,
        "route_agreement": result.routes.agreement,
        "route_diverged": result.routes.first,
    }


def _same_version(segment: Segment, scores: Scores) -> list[float]:
    """Absolute gaps of the tokens whose span is of the very version being updated."""
    records = {row.trajectory.trajectory: row.trajectory for row in segment.members}
    out: list[float] = []
    for score in scores.rows:
        for span in records[score.trajectory].spans:
            if span.version.number == segment.base.number:
                out += [abs(g) for g in score.gap[span.start : span.end]]
    return out


def _masked(row: SegmentRow) -> int:
    """Tokens that the lag policy took out of the loss."""
    if row.use != "train" and not row.why.startswith("every token"):
        return 0
    return sum(row.trajectory.loss_mask) - sum(row.used_mask)


def _mean(values: Sequence[float]) -> float | None:
    return math.fsum(values) / len(values) if values else None


def _finite(value: float | None) -> float | None:
    """None for what JSON and people cannot read as a number; the guard has counted it already."""
    return value if value is not None and math.isfinite(value) else None
