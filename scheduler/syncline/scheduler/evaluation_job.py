"""A job that evaluates, on its way through the scheduler: pin the version, feed held-out prompts, count, end.

It differs from a training job in its machine (`evaluating.py`), in what it submits, and in that it counts what came. A
result is written before the job ends, and again by a killed scheduler's successor: the second writing changes nothing.
"""

from __future__ import annotations

import time

from syncline.contract import events as e
from syncline.contract.job import JobSpec
from syncline.contract.streams import EVENTS, MINTED
from syncline.contract.version_path import Minted
from syncline.runtime import steady
from syncline.scheduler import evaluating, machine
from syncline.scheduler.concluding import Asked, conclude, part_of, pinned, remember
from syncline.scheduler.counting import COUNTED
from syncline.scheduler.held_out import HeldOut
from syncline.scheduler.jobs import Job, phase
from syncline.scheduler.lookout import Tools
from syncline.scheduler.placement import workers
from syncline.scheduler.saved import Saved, Watch

AT_ONCE = 256  # groups submitted in one turn of the loop


class EvaluationJob(Job):
    """The evaluation that runs."""

    def __init__(self, tools: Tools, job: str, spec: JobSpec, saved: Saved) -> None:
        super().__init__(tools, job, spec, saved)
        self._part = part_of(spec)
        self._manifest = pinned(tools.settings, spec)
        self._held_out = HeldOut(job, spec, self._ledger, tools.errands, tools.bus)
        self._feeder = self._held_out
        self._told = False
        self._ready = -1  # groups that had ended when there was last any progress

    def feed(self) -> None:
        """Submit what is not submitted; count once every group has ended."""
        if self.state.stage != "sample" or self._told:
            return
        watch, open_groups = self.saved.watch, self._ledger.groups()
        left = self._part.prompts - watch.group
        if self._feeder.submit(watch):  # a predecessor's
            return
        if left:
            self._held_out.draw_held_out(watch, self._part.first, min(left, AT_ONCE))
            self.write()
            self._feeder.submit(watch)
            return
        self._feeder.again()
        waiting = sum(group.phase != "ready" for group in open_groups.values())
        if waiting != self._ready:
            self._ready, self._since = waiting, steady.now()
        if not waiting:
            self._count()

    def _count(self) -> None:
        """Write records and result, then say that it is over."""
        of = self.spec.versions_of(self.job)
        asked = Asked(job=self.job, of=of, spec=self.spec, part=self._part, manifest=self._manifest)
        folders = [self._tools.settings.job_dir(job) for job in (self.job, of)]
        result = conclude(self._bus, self._ledger, asked, self.folder / "segments", folders)
        for job in (self.job, of):
            remember(self._bus, job, result, self.spec.retention.hours)
        self._tools.log.info("%s: version %s of %s: %s", self.job, result.id, of, result.pass_at)
        self._bus.append(EVENTS.at(self.job), e.Finished(updates=0))
        self._told = True

    def _step(self, event: e.Event) -> tuple[machine.Command, ...]:
        self.saved.state, commands = evaluating.step(self.state, event)
        return commands

    def _end_open(self, reason: str) -> None:
        """What was counted, or would have been, was never to be trained on."""
        for entry in self._ledger.open_lines():
            if entry.state not in ("running", "buffered"):
                continue
            if self.state.finished:
                self._ledger.end(entry.trajectory, "filtered", COUNTED)
            else:
                self._ledger.end(entry.trajectory, "expired", reason)


def begin(tools: Tools, job: str, spec: JobSpec) -> EvaluationJob:
    """An evaluation's first turn. What sync is to bring to the workers is told in place of a trainer."""
    manifest = pinned(tools.settings, spec)
    state, commands = evaluating.begin(manifest.version, workers(spec))
    watch = Watch(awaited=dict.fromkeys(workers(spec), steady.now()))
    minted = Minted(
        job=manifest.job,
        version=manifest.version,
        parent=manifest.parent,
        optimizer_step=manifest.optimizer_step,
        contract=manifest.contract,
        artefact="",
        files={},
        canaries=(),
        traceparent="",
        minted_at=time.time(),
    )
    tools.bus.append(MINTED.at(job), minted)
    begun = EvaluationJob(tools, job, spec, Saved(state=state, watch=watch))
    begun.write([phase(command) for command in commands if isinstance(command, machine.Order)])
    return begun
