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
from syncline.gateway.version_lineage import from_spans, recorded, version_spans, version_view

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
    found, _ = known(here, record)
    wanted = _named(version, found)
    if wanted is None:
        raise Refusal(404, "not-found", "there is no such version of this job")
    return reply(version_view(found[wanted], version_spans(here.settings.traces, record.id, wanted)))


def known(here: Gateway, record: JobRecord) -> tuple[dict[VersionId, VersionRecord], VersionId | None]:
    """Versions of the job and the latest published one; as kept on disk, or from spans, where Redis has forgotten."""
    found, latest = recorded(here.bus, record.id)
    if found or record.recorded:
        return found, latest
    kept = evidence_of(here.bus, record, whole=False)
    told = {of.version: of for of in kept.versions} if kept else {}
    told = told or from_spans(version_spans(here.settings.traces, record.id))
    published = [version for version, of in told.items() if of.published is not None]
    return told, max(published, default=None)


def _named(name: str, found: dict[VersionId, VersionRecord]) -> VersionId | None:
    if not _NAME.fullmatch(name):
        return None
    if "." in name:
        wanted = parse_version(name)
        return wanted if wanted in found else None
    return max((version for version in found if version.number == int(name)), default=None)
