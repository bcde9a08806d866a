"""The two ends of an evaluation: the pinned version that it begins with, and the result that it leaves behind."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from syncline.contract.evaluation import Evaluation
from syncline.contract.evaluation_spec import EvaluationSpec
from syncline.contract.job import JobSpec
from syncline.contract.streams import EVALUATIONS, JOB
from syncline.contract.version_path import BadManifest, VersionManifest, opened, parse_version
from syncline.runtime import segments
from syncline.runtime.bus import Bus
from syncline.runtime.evaluations import keep
from syncline.runtime.ledger import Ledger
from syncline.runtime.settings import Settings
from syncline.runtime.store import BlobStore, MissingManifest
from syncline.scheduler.counting import Sample, evaluation, sample_of


class Asked(msgspec.Struct, frozen=True, kw_only=True):
    """An evaluation. `job`: that its ledger is of; `of`: the training job; `spec`: the evaluation's own."""

    job: str
    of: str
    spec: JobSpec
    part: EvaluationSpec
    manifest: VersionManifest
    shared: bool = False  # the training job's own workers sample


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


def conclude(bus: Bus, ledger: Ledger, asked: Asked, records: Path, folders: Sequence[Path]) -> Evaluation:
    """Write the records into the folder `records`, then the result into each of `folders`.

    Repeating it changes nothing: a result of this evaluation that is there stands.
    """
    samples = [
        sample_of(bus, asked.job, group, entry, asked.manifest)
        for group in range(asked.part.prompts)
        for entry in ledger.members(group, asked.part.samples)
    ]
    _write_records(records, asked, samples)
    result = evaluation(asked.job, asked.of, asked.shared, asked.spec, asked.manifest, samples)
    for folder in folders:
        keep(folder, result)
    return result


def remember(bus: Bus, job: str, result: Evaluation, hours: float) -> None:
    """In Redis too, for as long as that knows the job. hours: to live, if the job has ended and its keys end soon."""
    state, ended = bus.hmget(JOB.at(job), ["state", "ended"])
    if state is None:
        return
    bus.hset(EVALUATIONS.at(job), f"{result.job}/{result.id}", msgspec.json.encode(result))
    if ended is not None:
        bus.expire(EVALUATIONS.at(job), hours * 3600)


def _write_records(folder: Path, asked: Asked, samples: list[Sample]) -> None:
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
    base = asked.manifest.version
    segment = segments.Segment(
        job=asked.job,
        update=base.number + 1,
        base=base,
        contract=asked.manifest.contract,
        spec_hash=asked.spec.hash(),
        members=rows,
    )
    segments.write(folder, segment)
