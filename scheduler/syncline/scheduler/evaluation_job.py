"""A job that evaluates, on its way through the scheduler: pin the version, feed held-out prompts, count, end.

It differs from a training job in its machine (`evaluating.py`), in what it submits, and in that it counts what came. A
result is written before the job ends, and again by a killed scheduler's successor: the second writing changes nothing.
"""

from __future__ import annotations

import time
from pathlib import Path

import msgspec

from syncline.contract import events as e
from syncline.contract.evaluation import Evaluation
from syncline.contract.evaluation_spec import EvaluationSpec
from syncline.contract.job import JobSpec
from syncline.contract.streams import EVALUATIONS, EVENTS, JOB, MINTED
from syncline.contract.version_path import (
    BadManifest,
    Minted,
    VersionId,
    VersionManifest,
    opened,
    parse_version,
)
from syncline.runtime import segments
from syncline.runtime.evaluations import keep
from syncline.runtime.settings import Settings
from syncline.runtime.store import BlobStore, MissingManifest
from syncline.scheduler import evaluating, machine
from syncline.scheduler.counting import COUNTED, Sample, evaluation, sample_of
from syncline.scheduler.feed import Feeder
from syncline.scheduler.jobs import Job, phase
from syncline.scheduler.lookout import Tools
from syncline.scheduler.placement import workers
from syncline.scheduler.prompts import Draw
from syncline.scheduler.saved import Saved, Watch

AT_ONCE = 256  # groups submitted in one turn of the loop


class HeldOut(Feeder):
    """Group g samples the held-out prompt `first + g`, once; how it ends decides nothing."""

    def draw_held_out(self, watch: Watch, first: int, groups: int) -> None:
        """Decide on so many new groups."""
        drawn = self._drawn(watch)
        drawn.pending += [Draw(watch.group + i, first + watch.group + i, 0) for i in range(groups)]
        watch.group += groups

    def note(self, watch: Watch) -> None:
        """Nothing follows from outcomes."""

    def in_vain(self, watch: Watch) -> str | None:
        """Never: each prompt is asked once."""
        return None


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
            self._ready, self._since = waiting, time.time()
        if not waiting:
            self._count()

    def _count(self) -> None:
        """Write the records, then the result, then say that it is over."""
        part, samples = self._part, self._samples()
        base = self._manifest.version
        _write_records(self.folder, self.job, self.spec, base, samples)
        result = evaluation(self.job, self._source, self.spec, part, self._manifest, samples)
        for job in (self.job, self._source):
            keep(self._tools.settings.job_dir(job), result)
            self._remember(job, result)
        self._tools.log.info("%s: version %s of %s: %s", self.job, base, self._source, result.pass_at)
        self._bus.append(EVENTS.at(self.job), e.Finished(updates=0))
        self._told = True

    def _samples(self) -> list[Sample]:
        size = self._part.samples
        return [
            sample_of(self._bus, self.job, group, entry, self._manifest)
            for group in range(self._part.prompts)
            for entry in self._ledger.members(group, size)
        ]

    def _remember(self, job: str, result: Evaluation) -> None:
        """In Redis too, for as long as that knows the job."""
        if self._bus.hget(JOB.at(job), "spec") is None:
            return
        field = f"{result.job}/{result.id}"
        self._bus.hset(EVALUATIONS.at(job), field, msgspec.json.encode(result))
        if job != self.job:
            self._bus.expire(EVALUATIONS.at(job), self.spec.retention.hours * 3600)

    @property
    def _source(self) -> str:
        return self.spec.versions_of(self.job)

    def _step(self, event: e.Event) -> tuple[machine.Command, ...]:
        self.saved.state, commands = evaluating.step(self.state, event)
        return commands

    def _end_open(self, reason: str) -> None:
        """What was counted, or would have been, was never to be trained on."""
        counted = self.state.finished
        for group, open_group in self._ledger.groups().items():
            for entry in self._ledger.members(group, open_group.size):
                if entry.state in ("running", "buffered"):
                    ending = ("filtered", COUNTED) if counted else ("expired", reason)
                    self._ledger.end(entry.trajectory, *ending)


def part_of(spec: JobSpec) -> EvaluationSpec:
    """The evaluation's part of the spec. Raises `ValueError` where there is none."""
    if spec.evaluation is None or spec.evaluation.version is None:
        raise ValueError("evaluation: the spec says no job and version")
    return spec.evaluation


def pinned(settings: Settings, spec: JobSpec) -> VersionManifest:
    """The pinned version's manifest. Raises `ValueError` if it is not there, or not signed with its job's key."""
    part = part_of(spec)
    assert part.job is not None  # job rules
    assert part.version is not None
    folder, version = settings.job_dir(part.job), parse_version(part.version)
    if not (folder / "store").is_dir():
        raise ValueError(f"evaluation.job: {part.job} has no store in this run root")
    store = BlobStore(folder / "store")
    try:
        manifest = opened(store.read_manifest(version), (folder / "key").read_bytes())
    except MissingManifest:
        there = ", ".join(str(v) for v in store.manifests()) or "none"
        raise ValueError(
            f"evaluation.version: {part.job} no longer has {version}; can be evaluated: {there}"
        ) from None
    except (BadManifest, OSError) as error:
        raise ValueError(f"evaluation.version: {version} of {part.job}: {error}") from None
    if manifest.contract != spec.contract_digest():
        raise ValueError(f"evaluation.version: {version} of {part.job} is of contract {manifest.contract}")
    for tensor in manifest.tensors:
        if not store.has(tensor.digest):
            raise ValueError(f"evaluation.version: {version} of {part.job} lacks tensor {tensor.name}")
    return manifest


def begin(tools: Tools, job: str, spec: JobSpec) -> EvaluationJob:
    """An evaluation's first turn. What sync is to bring to the workers is told in place of a trainer."""
    manifest = pinned(tools.settings, spec)
    state, commands = evaluating.begin(manifest.version, workers(spec))
    watch = Watch(awaited=dict.fromkeys(workers(spec), time.time()))
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


def _write_records(folder: Path, job: str, spec: JobSpec, base: VersionId, samples: list[Sample]) -> None:
    """The records in the place of an update of the pinned version that nobody makes: all of them left out."""
    rows = tuple(
        segments.SegmentRow(
            trajectory=sample.record,
            reward=sample.reward,
            use="filtered",
            why=sample.why,
            lag=0,
            advantage=0.0,
            used_mask=bytes(sample.record.sampled),
        )
        for sample in samples
        if sample.record is not None
    )
    segment = segments.Segment(
        job=job,
        update=base.number + 1,
        base=base,
        contract=spec.contract_digest(),
        spec_hash=spec.hash(),
        members=rows,
    )
    segments.write(folder / "segments", segment)
