"""One update, from its segment: step, ledger, scores, metrics, hops. The same live and when repeated."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from syncline.contract.events import Alarm, Mode, UpdateMetrics
from syncline.contract.job import JobSpec
from syncline.contract.streams import EVENTS, METRICS
from syncline.contract.token_path import ADMITTED, SCORED, TRAINED
from syncline.contract.version_path import VersionId
from syncline.runtime import segments, tracing
from syncline.runtime.bus import Bus, unpack
from syncline.runtime.lease import Lease
from syncline.runtime.ledger import Ledger, LedgerBroken
from syncline.runtime.segments import Scores, Segment
from syncline.trainer.batch import samples_of
from syncline.trainer.engine import StepResult, TrainerEngine
from syncline.trainer.intake import Intake
from syncline.trainer.metrics import mean_abs, metrics_of, scores_of
from syncline.trainer.restoring import restore

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class Update:
    """An update that was made. `segment` is the one on disk, with a skipped step already written into it."""

    segment: Segment
    result: StepResult
    scores: Scores
    admitted: float  # wall-clock unix seconds
    seconds: float  # of the step, by a monotonic clock

    @property
    def trajectories(self) -> list[str]:
        """Ids of what was trained."""
        return [row.trajectory.trajectory for row in self.segment.rows]

    @property
    def traces(self) -> list[str]:
        """Trace contexts of what was trained."""
        return [row.trajectory.traceparent for row in self.segment.rows]


class Updating:
    """Makes the updates of one job. `folder`: its segments; `lease`: of the job's trainer."""

    def __init__(
        self,
        bus: Bus,
        ledger: Ledger,
        engine: TrainerEngine,
        intake: Intake,
        spec: JobSpec,
        folder: Path,
        lease: Lease,
    ) -> None:
        self._bus, self._ledger, self._engine, self._intake = bus, ledger, engine, intake
        self._spec, self._folder, self._lease = spec, folder, lease

    def keep(self, segment: Segment) -> None:
        """Put the segment of a new update on disk, from which it can be made again. Raises `LeaseLost`.

        A trainer that was frozen since it claimed finds its successor's there, and leaves it alone.
        """
        if not segments.write_new(self._folder, segment):
            self._lease.require()
            segments.write(
                self._folder, segment
            )  # what the one before wrote, without holding what it claimed

    def make(self, segment: Segment, epoch: int) -> Update:
        """Step on a segment that is on disk, and tell the ledger what became of each trajectory.

        Everything here may be repeated after a crash: the segment decides, and the ledger knows what it
        knows. Raises `LeaseLost`, with nothing told.
        """
        admitted, began = time.time(), time.monotonic()
        result = self._engine.step(samples_of(segment.rows), segment.update)
        seconds = time.monotonic() - began
        self._lease.require()  # a step takes long enough to be replaced meanwhile
        minted = VersionId(epoch, segment.update)
        scores = scores_of(segment, result, minted)
        if result.skipped and segment.rows:
            segment = self._refuse(segment, result)
        path = segments.scores_path(self._folder, segment.update)
        if not path.is_file():
            segments.write_scores(self._folder, scores)
        self.settle(segment)
        return Update(segment, result, scores, admitted, seconds)

    def settle(self, segment: Segment) -> None:
        """Tell the ledger what the segment decided. It holds afterwards, whatever Redis was told before.

        A Redis that died may have come back without its last second, or with nothing: the segment is on disk and
        decides. That it had to is an alarm of the job.
        """
        ids = [row.trajectory.trajectory for row in segment.rows]
        try:
            self._intake.end_unused(segment)
            self._ledger.trained(segment.update, ids)
        except LedgerBroken as error:
            _LOG.warning("the ledger has forgotten update %d: %s", segment.update, error)
            lines = restore(self._ledger, segment, self._spec.batch.group_size)
            what = f"Redis had lost what became of {lines} trajectories; it was restored from the update's segment"
            self._bus.append(EVENTS.at(segment.job), Alarm(who="trainer", update=segment.update, what=what))

    def _refuse(self, segment: Segment, result: StepResult) -> Segment:
        """The step was skipped: nothing was trained, and the segment says so before the ledger does."""
        named = ", ".join(result.non_finite[:3]) or "no token in the loss"
        more = len(result.non_finite) - 3
        why = f"the step of update {segment.update} was skipped: {named}" + (
            f" and {more} more" if more > 0 else ""
        )
        members = tuple(
            row
            if row.use == "filtered"
            else msgspec.structs.replace(row, use="filtered", why=why, used_mask=bytes(len(row.used_mask)))
            for row in segment.members
        )
        refused = msgspec.structs.replace(segment, members=members)
        segments.write(self._folder, refused)
        return refused

    # ---- telling ----------------------------------------------------------------------------------------
    def tell_scored(self, update: Update) -> None:
        """The hops `admitted` and `scored` of each trained trajectory."""
        segment, now = update.segment, time.time()
        gaps = {row.trajectory: mean_abs(row.gap) for row in update.scores.rows}
        scored = max(update.admitted, now - update.seconds)
        for row in segment.rows:
            t = row.trajectory
            common: dict[str, Any] = {
                "job": segment.job,
                "trajectory": t.trajectory,
                "update": segment.update,
            }
            tracing.record(ADMITTED, t.traceparent, update.admitted, scored, **common, lag=row.lag)
            tracing.record(
                SCORED,
                t.traceparent,
                scored,
                now,
                **common,
                version=segment.base,
                mean_abs_logprob_gap=gaps[t.trajectory],
            )

    def tell_trained(self, update: Update, minted: VersionId, minted_trace: str) -> None:
        """The hop `trained` of each trajectory, linked to the version that it went into."""
        now = time.time()
        for row in update.segment.rows:
            tracing.record(
                TRAINED,
                row.trajectory.traceparent,
                now,
                now,
                links=[minted_trace],
                job=update.segment.job,
                trajectory=row.trajectory.trajectory,
                update=update.segment.update,
                minted=minted,
                advantage=row.advantage,
            )

    def tell_metrics(self, update: Update, mode: Mode, expired: int, waited: float) -> None:
        """Append the update's metrics."""
        metrics = metrics_of(
            update.segment,
            update.scores,
            update.result,
            mode=mode,
            kl_asked=self._spec.loss.kl.coefficient > 0,
            expired=expired,
            waited=waited,
            seconds=update.seconds,
            at=time.time(),
        )
        self._bus.append(METRICS.at(update.segment.job), metrics)

    def told(self) -> set[int]:
        """Updates whose metrics are in the stream."""
        key = METRICS.at(self._ledger.job)
        return {unpack(entry, UpdateMetrics).update for entry in self._bus.range(key)}
