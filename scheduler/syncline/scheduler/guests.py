"""A training job that evaluates its own versions as it goes, on its own workers.

Each n-th version that becomes active is asked the held-out prompts of the spec, by way of a job of its own that has
a ledger and streams and no processes: the training job's workers take its work within `evaluation.share` and begin it
under that version alone. So the trainer can claim no sample of it, and none counts that another version had a part in.

Colocated, sampling goes on until the evaluation has ended: the batch that is ready waits for it, at most half of
`limits.batch_wait`. Disjoint, nothing waits: what is not begun when the next version is active is lost, and told so.

Nothing is remembered here that is not in Redis or on disk, so a killed scheduler's successor goes on with it.
"""

from __future__ import annotations

import hashlib
import time

from syncline.contract import evaluation_rules as rules
from syncline.contract.evaluation import Guest
from syncline.contract.events import Wait
from syncline.contract.job import JobSpec
from syncline.contract.streams import GROUP_ROLLOUT, GUEST, JOB, KEYS, WORK
from syncline.contract.version_path import VersionId
from syncline.runtime.bus import pack, unpack
from syncline.runtime.evaluations import kept
from syncline.runtime.ledger import Ledger
from syncline.scheduler.concluding import Asked, conclude, pinned, remember
from syncline.scheduler.counting import COUNTED
from syncline.scheduler.held_out import HeldOut
from syncline.scheduler.lookout import Tools
from syncline.scheduler.saved import Watch
from syncline.scheduler.stages import STANCES, State

AT_ONCE = 256  # groups submitted in one turn of the loop
LOOK = 0.25  # seconds between looks at how far it is
FOLDER = "evaluations"
"""In the job's folder: the records, in the form of segments, one per evaluated version."""


class Visit:
    """The evaluation that goes on."""

    def __init__(self, tools: Tools, job: str, asked: Asked) -> None:
        spec = asked.spec
        self.asked, self.over = asked, False
        self.since, self.began = time.monotonic(), time.time()
        self.ledger = Ledger.under(tools.bus, asked.job, spec, asked.part.prompts)
        self._feeder = HeldOut(asked.job, spec, self.ledger, tools.errands, tools.bus)
        self._watch = Watch()
        self._looked = float("-inf")

    def tend(self) -> bool:
        """Submit and repair; end what will not be begun any more. True: every sample has ended."""
        left = self.asked.part.prompts - self._watch.group
        if left and not self.over:
            self._feeder.draw_held_out(self._watch, self.asked.part.first, min(left, AT_ONCE))
            self._feeder.submit(self._watch)
            return False
        if time.monotonic() < self._looked + LOOK:
            return False
        self._looked = time.monotonic()
        self._feeder.again()
        if self.over:
            for entry in self.ledger.open_lines():
                if entry.state == "running" and entry.worker is None:
                    self.ledger.end(entry.trajectory, "expired", "another version took its place")
        return all(group.phase == "ready" for group in self.ledger.groups().values())


class Guests:
    """The evaluations of one training job, one at a time."""

    def __init__(self, tools: Tools, job: str, spec: JobSpec) -> None:
        self._tools, self._bus, self._job, self._spec = tools, tools.bus, job, spec
        self._part = spec.evaluation if spec.kind == "train" else None
        self._visit: Visit | None = None
        self._done: set[VersionId] = set()
        self._waiting: VersionId | None = None  # whose turn has come, while another is evaluated
        if self._part is not None:
            self._done = {one.id for one in kept(tools.settings.job_dir(job)) if one.of == job and one.shared}
            raw = self._bus.get(GUEST.at(job))
            if raw is not None:
                self._open(unpack(raw, Guest).version)

    def turn(self, state: State) -> None:
        """One step: begin, go on with, or end an evaluation."""
        if self._visit is None and self._due(state) and state.active is not None:
            self._open(state.active)
        visit = self._visit
        if visit is None:
            return
        self._overtaken(state)
        late = time.monotonic() > visit.since + self._spec.limits.batch_wait / 2
        visit.over = visit.over or late or state.active != visit.asked.manifest.version
        if visit.tend():
            self._close(visit)

    def holds(self, state: State) -> bool:
        """Whether the gate is to stay open for the active version's evaluation, though a batch is ready."""
        if self._part is None or state.stage != "sample":
            return False
        return self._due(state) or (self._visit is not None and not self._visit.over)

    def waits(self, state: State) -> list[Wait]:
        """What a ready batch waits for."""
        if self._visit is None or not self.holds(state):
            return []
        end = self._visit.began + self._spec.limits.batch_wait / 2
        detail = f"version {self._visit.asked.manifest.version} on held-out prompts"
        return [
            Wait(name="evaluation", owner="rollout", since=self._visit.began, deadline=end, detail=detail)
        ]

    def finish(self) -> None:
        """The job has ended, with its processes: what has no record by now is lost."""
        visit = self._visit
        if visit is None:
            return
        for entry in visit.ledger.open_lines():
            if entry.state == "running":
                visit.ledger.end(entry.trajectory, "expired", "the job ended")
        self._close(visit)

    # ---- inside
    def _overtaken(self, state: State) -> None:
        """Say so when a version's turn came and went while the one before it was still evaluated."""
        if self._waiting is not None and self._waiting not in (state.active, *self._done):
            why = "another version was active before the evaluation under way had ended"
            self._tools.log.warning("%s: version %s is not evaluated: %s", self._job, self._waiting, why)
            self._done.add(self._waiting)
        self._waiting = state.active if self._due(state) else None

    def _due(self, state: State) -> bool:
        if self._part is None or state.active is None or STANCES[state.stage].gate != "open":
            return False
        return state.active.number % self._part.every == 0 and state.active not in self._done

    def _open(self, version: VersionId) -> None:
        assert self._part is not None
        self._done.add(version)
        name = f"j{hashlib.sha256(f'{self._job}/{version}'.encode()).hexdigest()[:10]}"
        part = self._part.model_copy(update={"job": self._job, "version": str(version), "every": 0})
        spec = rules.of(self._spec, part, {}, None)
        try:
            manifest = pinned(self._tools.settings, spec)
        except ValueError as error:  # overtaken and collected already
            self._tools.log.error("%s: version %s is not evaluated: %s", self._job, version, error)
            self._bus.delete(GUEST.at(self._job))
            return
        asked = Asked(job=name, of=self._job, spec=spec, part=part, manifest=manifest, shared=True)
        known = {"spec": spec.canonical(), "spec_hash": spec.hash(), "name": spec.name, "state": "running"}
        known |= {"folder": str(self._tools.settings.job_dir(self._job)), "created": repr(time.time())}
        owner = self._bus.hget(JOB.at(self._job), "tenant")
        known |= {} if owner is None else {"tenant": owner.decode()}
        self._bus.hset(JOB.at(name), known)
        self._bus.ensure_group(WORK.at(name), GROUP_ROLLOUT)
        self._visit = Visit(self._tools, self._job, asked)
        guest = Guest(
            job=name,
            version=version,
            digest=manifest.digest(),
            groups=part.prompts,
            slots=max(1, int(part.share * self._spec.rollout.max_running)),
        )
        self._bus.set(GUEST.at(self._job), pack(guest))
        self._tools.log.info("%s: version %s is evaluated", self._job, version)

    def _close(self, visit: Visit) -> None:
        """Write what came, and let go."""
        folder, hours = self._tools.settings.job_dir(self._job), self._spec.retention.hours
        result = conclude(self._bus, visit.ledger, visit.asked, folder / FOLDER, [folder])
        remember(self._bus, self._job, result, hours)
        self._bus.delete(GUEST.at(self._job))
        for entry in visit.ledger.open_lines():
            if entry.state == "buffered":
                visit.ledger.end(entry.trajectory, "filtered", COUNTED)
        self._bus.hset(JOB.at(visit.asked.job), {"state": "succeeded", "ended": repr(time.time())})
        for key in KEYS:
            if key.scope == "job":
                self._bus.expire(key.at(visit.asked.job), hours * 3600)
        self._tools.log.info("%s: version %s: %s", self._job, result.id, result.pass_at)
        self._visit = None
