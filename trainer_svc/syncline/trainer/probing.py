"""Asking rollout for same-version scores, and making a `Diagnostics` of what it answers.

At most one update is open. It is closed once all its answers are in, at the latest when the next batch has been
claimed or the trainer is told to stop; what is then missing is unmeasured, with the reason. Nothing here waits for
an answer while the job runs, and an update is asked of once: one that is repeated after a crash is not measured again.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from syncline.contract.diagnosis import TERMS, Diagnostics, Probe, Probed
from syncline.contract.events import Alarm, Event
from syncline.contract.job import JobSpec
from syncline.contract.streams import DIAGNOSTICS, PROBED, PROBES
from syncline.contract.version_path import VersionId
from syncline.runtime.bus import Bus, unpack
from syncline.runtime.segment_probes import write_probes
from syncline.runtime.segments import Segment
from syncline.trainer.baseline import Baselines
from syncline.trainer.batch import sample_of
from syncline.trainer.choosing import choose
from syncline.trainer.diagnosing import Asked, Question, diagnose, over_the_update
from syncline.trainer.engine import StepResult, TrainerEngine

_LOG = logging.getLogger(__name__)
CAP, CAP_DIAGNOSTICS = 1_000, 100_000
NOISES = 64  # comparisons of decode with prefill that one record takes in
_MASKED = "log-probs are taken over the sampling mask (sampling.record_mask), and rollout scores without it"
SETTLE = 1.0  # seconds for which a trainer that was told to stop waits for answers


class Probing:
    """The probes of one job. `folder`: the job's."""

    def __init__(
        self,
        bus: Bus,
        engine: TrainerEngine,
        spec: JobSpec,
        job: str,
        folder: Path,
        emit: Callable[[Event], object],
    ) -> None:
        self._bus, self._engine, self._spec, self._job, self._emit = bus, engine, spec, job, emit
        self._segments = folder / "segments"
        self._probes, self._answers, self._records = (key.at(job) for key in (PROBES, PROBED, DIAGNOSTICS))
        self._contract = spec.contract_digest()
        wanted = spec.diagnostics
        self._baselines = Baselines(folder / "baseline.json", spec.contract(), wanted.learn, wanted.drift)
        self._open: Asked | None = None
        self._segment: Segment | None = None
        self._noise: list[Probed] = []  # decode against prefill, since the last record
        self._cursor = bus.last_id(self._answers)

    # ---- asking -------------------------------------------------------------------------------------------
    def recover(self) -> None:
        """Close what a trainer before this one has asked and not recorded: its scores died with it."""
        asked: dict[int, VersionId] = {}
        for entry in self._bus.newest(self._probes, CAP):
            probe = unpack(entry, Probe)
            asked[probe.update] = probe.version
        told = {unpack(entry, Diagnostics).update for entry in self._bus.newest(self._records, CAP)}
        why = "the trainer was started again before the answers were in"
        for update in sorted(asked.keys() - told):
            self._say(
                Diagnostics(
                    update=update,
                    version=asked[update],
                    contract=self._contract,
                    trajectories=0,
                    tokens=0,
                    unmeasured=dict.fromkeys(("answers", *TERMS, "routes"), why),
                    at=time.time(),
                )
            )

    def ask(self, segment: Segment) -> None:
        """Send the probes of an update that is about to be made; its weights are still those of `segment.base`."""
        self._close(f"before update {segment.update} was claimed")
        wanted = self._spec.diagnostics
        if wanted.trajectories == 0 or (segment.update - 1) % wanted.every:
            return
        masked = self._spec.sampling.record_mask
        rows = [] if masked else choose(segment.rows, wanted.trajectories, self._job, segment.update)
        samples = [sample_of(row.trajectory, row.used_mask, row.advantage) for row in rows]
        routes = self._engine.free_routes(samples)
        questions = {}
        for i, (row, sample) in enumerate(zip(rows, samples, strict=True)):
            probe = Probe(
                update=segment.update,
                version=segment.base,
                trajectory=sample.trajectory,
                worker=row.trajectory.spans[-1].worker,
                tokens=tuple(sample.tokens),
                positions=tuple(sample.positions),
                temperature=sample.temperature,
                experts=routes is not None,
            )
            self._bus.append(self._probes, probe, cap=CAP)
            questions[sample.trajectory] = Question(row, probe, None if routes is None else routes[i])
        asked = Asked(segment.update, segment.base, questions, unasked=_MASKED if masked else "")
        self._open, self._segment = asked, segment

    def scored(self, result: StepResult) -> None:
        """Take the trainer's own log-probs of the update that was asked about."""
        if self._open is None or self._segment is None:
            return
        rows = self._segment.rows
        for row, logprobs in zip(rows, result.logprobs, strict=True):
            if row.trajectory.trajectory in self._open.questions:
                self._open.logprobs[row.trajectory.trajectory] = logprobs
        self._open.whole, self._open.unmeasured = over_the_update(rows, result, self._spec)

    # ---- answers ------------------------------------------------------------------------------------------
    def collect(self, block: float | None = None) -> None:
        """Take what has been answered, and record the update once that is all. `block`: seconds to wait for one."""
        if self._open is None:
            return
        while found := self._bus.read({self._answers: self._cursor}, block).get(self._answers):
            self._cursor, block = found[-1].id, None
            for entry in found:
                self._take(self._open, unpack(entry, Probed))
        if self._open.complete:
            self._close("")

    def _take(self, asked: Asked, answer: Probed) -> None:
        """An answer to another update's probe, or a second one, is of no use any more."""
        question = asked.questions.get(answer.trajectory)
        if answer.decode:
            pairs = (answer.logprobs, answer.decode)
            if len(pairs[0]) != len(pairs[1]) or not all(map(math.isfinite, (*pairs[0], *pairs[1]))):
                _LOG.warning("%s compared decode with prefill of %s amiss", answer.worker, answer.trajectory)
                return
            self._noise = [*self._noise[-NOISES + 1 :], answer]
        elif question is not None and question.probe.version == answer.version:
            asked.answers.setdefault(answer.trajectory, answer)

    def settle(self) -> None:
        """The trainer leaves: wait a moment for answers that are under way, then record what there is."""
        end = time.monotonic() + SETTLE
        while self._open is not None and self._open.logprobs and time.monotonic() < end:
            self.collect(block=SETTLE / 4)
        self._close("before the trainer was told to stop")

    def _close(self, closed: str) -> None:
        if closed:
            self.collect()
        asked, self._open, self._segment = self._open, None, None
        if asked is None:
            return
        asked.noise, self._noise = self._noise, []
        record, rows = diagnose(asked, self._contract, closed, time.time())
        alarms = self._baselines.note(asked.update, record.terms)
        record = msgspec.structs.replace(record, baseline=self._baselines.of("mismatch"), alarms=alarms)
        if rows:
            write_probes(self._segments, asked.update, str(asked.version), rows)
        self._say(record)
        if alarms:
            _LOG.warning("update %d: %s", asked.update, "; ".join(alarms))
            self._emit(Alarm(who="trainer", update=asked.update, what="; ".join(alarms)))

    def _say(self, record: Diagnostics) -> None:
        self._bus.append(self._records, record, cap=CAP_DIAGNOSTICS)
