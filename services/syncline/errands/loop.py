"""Scoring trajectories.

consumes      `syncline.score` messages (Celery): trajectory ids of one job
produces      rewards in the ledger, `token.rewarded` hops, dead letters; `judging` for jobs with an HTTP judge
waits for     messages; a sandboxed scorer, at most `reward.timeout` seconds
unblocked by  rollout workers that publish, the scheduler that sends lost errands again
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path

import msgspec

from syncline.contract.job import JobSpec
from syncline.contract.judging import Judgeable
from syncline.contract.streams import DELIVERIES, JOB, JUDGED, JUDGING, TRAJECTORIES
from syncline.contract.token_path import BadTrajectory, Reward, Trajectory
from syncline.contract.trajectory_wire import decode
from syncline.environments.environment import scores_many
from syncline.errands.forker import Forker
from syncline.errands.rewarding import give, give_many, wanted
from syncline.errands.scorer import BrokenScorer, all_judged, judged
from syncline.runtime.bus import Bus, Entry
from syncline.runtime.errands import DELIVERIES as MOST_DELIVERIES
from syncline.runtime.errands import Errands, ScoreErrand
from syncline.runtime.ledger import Ledger

_LOG = logging.getLogger(__name__)
WHOLE = "whole"  # what a job's `sandbox` says where every wall stands
_JOBS = 4  # jobs whose scorer, a process, a worker keeps
_ROUND = 600.0  # seconds after which a message's remaining errands are sent on as a new one
_FIRST_PAUSE, _LAST_PAUSE = 0.25, 30.0  # seconds before a scorer is tried again


class _Job(msgspec.Struct, frozen=True):
    spec: JobSpec
    ledger: Ledger
    forker: Forker
    many: bool  # its scorer can be asked about several responses at once


class Scoring:
    """The errands of one worker process."""

    def __init__(self, bus: Bus, errands: Errands, secrets: Sequence[Path] = ()) -> None:
        self._bus, self._errands, self._secrets = bus, errands, secrets
        self._jobs: OrderedDict[str, _Job] = OrderedDict()
        self._told: set[str] = set()

    def score(self, job: str, errands: Sequence[ScoreErrand]) -> None:
        """Score each of them that still needs it, all with one question or each in its own sandbox."""
        known = self._job(job)
        if known is not None and known.spec.reward.source == "http":
            self._hand_on(job, errands)
            return
        if known is not None and known.many and len(errands) > 1 and self._together(job, known, errands):
            return
        begun = time.monotonic()
        for place, errand in enumerate(errands):
            if place and time.monotonic() - begun > _ROUND:
                self._errands.send_scores(job, errands[place:])
                return
            key = _delivery(errand)
            deliveries = self._bus.hincrby(DELIVERIES.at(job), key)
            known = self._job(job)
            if known is not None:
                self._one(job, known, errand, deliveries)
            self._bus.hdel(DELIVERIES.at(job), key)

    def _hand_on(self, job: str, errands: Sequence[ScoreErrand]) -> None:
        """To the process that asks the job's judge; whatever else waits here need not wait for it."""
        for e in errands:
            judgeable = Judgeable(trajectory=e.trajectory, attempt=e.attempt, traceparent=e.traceparent)
            self._bus.append(JUDGING.at(job), judgeable)
        self._bus.zadd(JUDGED.at(), {job: time.time()})

    def _together(self, job: str, known: _Job, errands: Sequence[ScoreErrand]) -> bool:
        """Score with one question all that still need it. False: nothing is done, for one of them needs a question of
        its own: its worker died before it was through, its record cannot be read, or it has no score.
        """
        counts, keys = DELIVERIES.at(job), [_delivery(errand) for errand in errands]
        if any(count is not None for count in self._bus.hmget(counts, keys)):
            return False
        due = self._due(job, known, errands)
        if due is None:
            return False
        if not due:
            return True
        self._bus.hset(counts, dict.fromkeys(keys, 1))
        began = time.time()
        found = self._scores(job, known, [record for _, record in due])
        if found is not None:
            told = [
                (reward, e.traceparent or record.traceparent)
                for (e, record), reward in zip(due, found, strict=True)
            ]
            give_many(self._bus, job, known.ledger, told, began)
        self._bus.hdel(counts, *keys)
        return found is not None

    def _due(
        self, job: str, known: _Job, errands: Sequence[ScoreErrand]
    ) -> list[tuple[ScoreErrand, Trajectory]] | None:
        """Those that need a reward, with their records; None: one has none that can be read."""
        lines = known.ledger.entries(errand.trajectory for errand in errands)
        due = [e for e in errands if wanted(lines.get(e.trajectory), e.attempt)]
        ids = [str(lines[e.trajectory].stream_id) for e in due]
        entries = self._bus.entries_at(TRAJECTORIES.at(job), ids)
        records = [_read(id, entries.get(id)) for id in ids]
        whole = [
            (e, record) for e, record in zip(due, records, strict=True) if isinstance(record, Trajectory)
        ]
        return whole if len(whole) == len(due) else None

    def _scores(self, job: str, known: _Job, records: Sequence[Trajectory]) -> list[Reward] | None:
        """Their rewards, all of them scored; None: not every one could be."""
        try:
            outcome = known.forker.run_many([(r.trajectory, r.prompt, r.text, r.turns) for r in records])
        except BrokenScorer:
            return None
        self._tell(job, known.forker.missing)
        values = all_judged(outcome, len(records))
        if values is None:
            return None
        return [
            Reward(
                trajectory=record.trajectory,
                attempt=record.attempt,
                state="scored",
                value=value,
                judge=known.forker.judge,
                seconds=outcome.seconds / len(records),
            )
            for record, value in zip(records, values, strict=True)
        ]

    def _one(self, job: str, known: _Job, errand: ScoreErrand, deliveries: int) -> None:
        entry = known.ledger.entry(errand.trajectory)
        if entry is None or entry.stream_id is None or not wanted(entry, errand.attempt):
            return
        id = entry.stream_id
        record = _read(id, self._bus.entries_at(TRAJECTORIES.at(job), [id]).get(id))
        began = time.time()
        reward = self._reward(job, known, errand, record, deliveries)
        if reward is None:
            return
        parent = errand.traceparent or (record.traceparent if isinstance(record, Trajectory) else None)
        give(self._bus, job, known.ledger, reward, parent, began)

    def _reward(
        self, job: str, known: _Job, errand: ScoreErrand, record: Trajectory | str, deliveries: int
    ) -> Reward | None:
        """The reward, or None: it was sent on, to be tried again."""
        if deliveries > MOST_DELIVERIES:
            return _failed(errand, f"scoring it killed its worker {deliveries - 1} times")
        if isinstance(record, str):
            return _failed(errand, record)
        try:
            outcome = known.forker.run(record.trajectory, record.prompt, record.text, record.turns)
        except BrokenScorer as error:
            return _failed(errand, str(error))
        self._tell(job, known.forker.missing)
        verdict = judged(outcome)
        if verdict.again and errand.tries < known.spec.reward.retries:
            later = ScoreErrand(errand.trajectory, errand.attempt, errand.tries + 1, errand.traceparent)
            self._errands.send_scores(job, [later], delay=min(_FIRST_PAUSE * 2**errand.tries, _LAST_PAUSE))
            _LOG.info("%s attempt %d: %s; again", errand.trajectory, errand.attempt, verdict.reason)
            return None
        return Reward(
            trajectory=errand.trajectory,
            attempt=errand.attempt,
            state=verdict.state,
            value=verdict.value,
            reason=verdict.reason,
            judge=known.forker.judge,
            seconds=outcome.seconds,
        )

    def _tell(self, job: str, missing: str) -> None:
        """Say at the job, once, which walls do not stand around its code."""
        if job not in self._told:
            self._told.add(job)
            self._bus.hset(JOB.at(job), "sandbox", missing or WHOLE)

    def _job(self, job: str) -> _Job | None:
        """What this worker knows of a job; None: the job has gone and its errands with it."""
        if job in self._jobs:
            self._jobs.move_to_end(job)
            return self._jobs[job]
        raw = self._bus.hget(JOB.at(job), "spec")
        if raw is None:
            return None
        spec = JobSpec.model_validate_json(raw)
        ledger = Ledger.under(self._bus, job, spec)
        self._jobs[job] = _Job(spec, ledger, Forker(spec, self._secrets), scores_many(spec.task, spec.reward))
        while len(self._jobs) > _JOBS:
            self._jobs.popitem(last=False)[1].forker.close()
        return self._jobs[job]


def _delivery(errand: ScoreErrand) -> str:
    return f"{errand.trajectory}/{errand.attempt}"


def _read(stream_id: str, entry: Entry | None) -> Trajectory | str:
    """The record at `stream_id`, or why there is none to score."""
    if entry is None:
        return f"its record {stream_id} is gone from the stream"
    try:
        return decode(entry.fields)
    except BadTrajectory as error:
        return str(error)


def _failed(errand: ScoreErrand, reason: str) -> Reward:
    return Reward(
        trajectory=errand.trajectory, attempt=errand.attempt, state="failed", value=None, reason=reason
    )
