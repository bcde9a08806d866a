"""Routes of versions."""

from __future__ import annotations

import re
from typing import Annotated

from fastapi import APIRouter, Depends, Path, Response

from syncline.contract.version_path import VersionId, VersionRecord, parse_version
from syncline.gateway import examples
from syncline.gateway.access import Gateway, Here, TheJob, only_known_parameters
from syncline.gateway.answers import describe, reply
from syncline.gateway.errors import Refusal
from syncline.gateway.records import JobRecord
from syncline.gateway.reporter import evidence_of
from syncline.gateway.shapes import VersionList, VersionView
from syncline.gateway.version_lineage import (
    epochs_recorded,
    from_spans,
    one_recorded,
    recorded,
    version_spans,
    version_view,
)

router = APIRouter(
    prefix="/v1/jobs/{job}/versions", tags=["versions"], dependencies=[Depends(only_known_parameters)]
)

_NAME = re.compile(r"\d{1,9}(\.\d{1,9})?", re.ASCII)
Name = Annotated[
    str,
    Path(
        description="NUMBER (its newest epoch) or EPOCH.NUMBER",
        examples=["0.12"],
        json_schema_extra={"pattern": r"^[0-9]{1,9}(\.[0-9]{1,9})?$"},
    ),
]


@router.get("", responses=describe(VersionList, examples.VERSIONS))
def list_versions(record: TheJob, here: Here) -> Response:
    """Versions, oldest first, each with its way to every worker."""
    found, latest = known(here, record)
    return reply(VersionList(items=list(found.values()), latest=latest))


@router.get("/{version}", responses=describe(VersionView, examples.VERSION))
def get_version(record: TheJob, here: Here, version: Name) -> Response:
    """One version with its own path. A plain number means the newest epoch that minted it."""
    wanted = _named(here, record, version)
    found = None if wanted is None else one_known(here, record, wanted)
    if found is None:
        raise Refusal(404, "not-found", "there is no such version of this job")
    return reply(version_view(found, version_spans(here.settings.traces, record.id, found.version)))


def known(here: Gateway, record: JobRecord) -> tuple[dict[VersionId, VersionRecord], VersionId | None]:
    """Versions of the job and the latest published one; as kept on disk, or from spans, where Redis has forgotten."""
    found, latest = recorded(here.bus, record.id)
    if found or record.recorded:
        return found, latest
    told = here.forgotten.versions(record, lambda: _from_disk(here, record))
    published = [version for version, of in told.items() if of.published is not None]
    return told, max(published, default=None)


def one_known(here: Gateway, record: JobRecord, version: VersionId) -> VersionRecord | None:
    """`known`, of one version, without a look at the others while Redis has it."""
    found = one_recorded(here.bus, record.id, version)
    return found if found is not None or record.recorded else known(here, record)[0].get(version)


def _from_disk(here: Gateway, record: JobRecord) -> dict[VersionId, VersionRecord]:
    kept = evidence_of(here.bus, record, whole=False)
    told = {of.version: of for of in kept.versions} if kept else {}
    return told or from_spans(version_spans(here.settings.traces, record.id))


def _named(here: Gateway, record: JobRecord, name: str) -> VersionId | None:
    """What a version's name in a path means; None: nothing, or a number that no version has."""
    if not _NAME.fullmatch(name):
        return None
    if "." in name:
        return parse_version(name)
    found = epochs_recorded(here.bus, record.id, int(name))
    if not found and not record.recorded:
        found = [version for version in known(here, record)[0] if version.number == int(name)]
    return max(found, default=None)
