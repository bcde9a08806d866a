"""What the records of a job say about one version, for the card of its export (`contract/exported.py: Story`)."""

from __future__ import annotations

from pathlib import Path

import msgspec

from syncline.contract.evaluation import Evaluation
from syncline.contract.events import UpdateMetrics
from syncline.contract.exported import ExportOrigin, LineageStep, Story
from syncline.contract.streams import METRICS, MINTED
from syncline.contract.version_path import Canary, Minted, VersionId, VersionRecord
from syncline.gateway.access import Gateway
from syncline.gateway.errors import Refusal
from syncline.gateway.evidence import Evidence
from syncline.gateway.records import JobRecord
from syncline.gateway.reporter import EVIDENCE
from syncline.gateway.versions import known
from syncline.runtime.bus import unpack
from syncline.runtime.evaluations import kept


def story_of(here: Gateway, record: JobRecord, version: VersionId, origin: ExportOrigin) -> Story:
    """All that is known about `version`, exported from `origin`.

    Raises `Refusal` for a file of evaluations that cannot be read.
    """
    found = known(here, record)
    return Story(
        name=record.spec.name,
        spec=record.spec.model_dump(mode="json"),
        state=record.state,
        lineage=lineage_of(found, version),
        rewards=rewards_of(metrics_of(here, record), version),
        evaluations=evaluations_of(record.folder, version),
        # they are of what rollout holds, which a checkpoint of wide weights is not
        canaries=_canaries(here, record, version) if origin == "version" else (),
    )


def lineage_of(found: dict[VersionId, VersionRecord], version: VersionId) -> tuple[LineageStep, ...]:
    """`version` and its parents as far as records go, newest first."""
    steps = []
    at: VersionId | None = version
    while at is not None and at in found:
        record = found[at]
        steps.append(
            LineageStep(
                version=at,
                parent=record.parent,
                optimizer_step=record.optimizer_step,
                digest=record.digest,
                verified={
                    worker: _verdict(path.verdict, path.canary_gap)
                    for worker, path in sorted(record.workers.items())
                    if path.verified is not None
                },
            )
        )
        at = record.parent if record.parent is not None and record.parent < at else None
    return tuple(steps)


def _verdict(verdict: str, gap: float | None) -> str:
    return verdict if gap is None else f"{verdict}, canary gap {gap:.2e}"


def metrics_of(here: Gateway, record: JobRecord) -> tuple[UpdateMetrics, ...]:
    """Metrics of all updates, from Redis or from what the job's report kept; none where neither has them."""
    if record.recorded:
        return tuple(unpack(entry, UpdateMetrics) for entry in here.bus.range(METRICS.at(record.id)))
    left = record.folder / EVIDENCE
    return msgspec.msgpack.decode(left.read_bytes(), type=Evidence).metrics if left.is_file() else ()


def rewards_of(
    metrics: tuple[UpdateMetrics, ...], version: VersionId
) -> tuple[tuple[int, float | None], ...]:
    """Reward of each update that led to `version`: of its epoch or the newest one before it."""
    newest: dict[int, UpdateMetrics] = {}
    for told in metrics:
        if told.epoch <= version.epoch and told.update <= version.number:
            before = newest.get(told.update)
            if before is None or told.epoch >= before.epoch:
                newest[told.update] = told
    return tuple((update, newest[update].reward) for update in sorted(newest))


def evaluations_of(folder: Path, version: VersionId) -> tuple[Evaluation, ...]:
    """The job's evaluations of `version`, oldest first. Raises `Refusal` for a file of them that cannot be read."""
    try:
        return tuple(told for told in kept(folder) if told.id == version)
    except ValueError as error:
        raise Refusal(500, "record-unreadable", str(error)) from None


def _canaries(here: Gateway, record: JobRecord, version: VersionId) -> tuple[Canary, ...]:
    """The trainer's scores of its fixed prefixes: kept until a newer version takes the place of this one."""
    for entry in here.bus.range(MINTED.at(record.id)) if record.recorded else ():
        minted = unpack(entry, Minted)
        if minted.version == version:
            return minted.canaries
    return ()
