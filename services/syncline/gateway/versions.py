"""Routes of versions."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Sequence
from typing import Annotated

from fastapi import APIRouter, Depends, Path, Query, Response

from syncline.contract.version_path import VersionId, VersionRecord, parse_version
from syncline.gateway import examples
from syncline.gateway.access import Gateway, Here, Limit, TheJob, only_known_parameters
from syncline.gateway.answers import describe, reply
from syncline.gateway.errors import Fault, Refusal
from syncline.gateway.records import JobRecord
from syncline.gateway.reporter import evidence_of
from syncline.gateway.shapes import VersionPage, VersionView
from syncline.gateway.version_lineage import (
    epochs_recorded,
    from_spans,
    names_recorded,
    one_recorded,
    some_recorded,
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
_FULL_NAME = re.compile(r"(0|[1-9][0-9]{0,8})\.(0|[1-9][0-9]{0,8})")
After = Annotated[
    str | None,
    Query(description="`next` of the last page", json_schema_extra={"pattern": f"^{_FULL_NAME.pattern}$"}),
]


@router.get("", responses=describe(VersionPage, examples.VERSIONS))
def list_versions(record: TheJob, here: Here, limit: Limit = 100, after: After = None) -> Response:
    """Versions, oldest first, each with its way to every worker."""
    versions = Versions(here, record)
    first = 0 if after is None else bisect_right(versions.names, _given(after))
    page = versions.names[first : first + limit]
    items, latest = versions.records(page)
    following = page[-1] if first + limit < len(versions.names) else None
    return reply(VersionPage(items=list(items.values()), next=following, latest=latest))


@router.get("/{version}", responses=describe(VersionView, examples.VERSION))
def get_version(record: TheJob, here: Here, version: Name) -> Response:
    """One version with its own path. A plain number means the newest epoch that minted it."""
    wanted = _named(here, record, version)
    found = None if wanted is None else one_known(here, record, wanted)
    if found is None:
        raise Refusal(404, "not-found", "there is no such version of this job")
    return reply(version_view(found, version_spans(here.settings.traces, record.id, found.version)))


class Versions:
    """A job's versions: all names at once, records only of those that are asked for.

    As kept on disk, or from spans, where Redis has forgotten the job; all its records are read then.
    """

    def __init__(self, here: Gateway, record: JobRecord) -> None:
        self._bus, self._job = here.bus, record.id
        self.names = names_recorded(here.bus, record.id)  # oldest first
        self._kept: dict[VersionId, VersionRecord] | None = None  # None: Redis knows them
        if not self.names and not record.recorded:
            self._kept = here.forgotten.versions(record, lambda: _from_disk(here, record))
            self.names = list(self._kept)

    def records(self, names: Sequence[VersionId]) -> tuple[dict[VersionId, VersionRecord], VersionId | None]:
        """Those of `names` that there are, in their order, and the newest published version of all."""
        if self._kept is None:
            return some_recorded(self._bus, self._job, names)
        published = (version for version, of in self._kept.items() if of.published is not None)
        found = {name: self._kept[name] for name in names if name in self._kept}
        return found, max(published, default=None)


def known(here: Gateway, record: JobRecord) -> dict[VersionId, VersionRecord]:
    """All versions of the job, oldest first, each with its record: megabytes in a long job."""
    versions = Versions(here, record)
    return versions.records(versions.names)[0]


def one_known(here: Gateway, record: JobRecord, version: VersionId) -> VersionRecord | None:
    """The record of one version, without a look at the others while Redis has it."""
    found = one_recorded(here.bus, record.id, version)
    if found is not None or record.recorded:
        return found
    return Versions(here, record).records([version])[0].get(version)


def _from_disk(here: Gateway, record: JobRecord) -> dict[VersionId, VersionRecord]:
    kept = evidence_of(here.bus, record, whole=False)
    told = {of.version: of for of in kept.versions} if kept else {}
    return told or from_spans(version_spans(here.settings.traces, record.id))


def _given(after: str) -> VersionId:
    """Raises `Refusal` 422 for text that is no version's name; one that the job does not have has its place too."""
    if not _FULL_NAME.fullmatch(after):
        fault = Fault(path="after", message="is no version", hint="give `next` of a page")
        raise Refusal(422, "parameter-refused", f"after: {fault.message}", errors=(fault,))
    return parse_version(after)


def _named(here: Gateway, record: JobRecord, name: str) -> VersionId | None:
    """What a version's name in a path means; None: nothing, or a number that no version has."""
    if not _NAME.fullmatch(name):
        return None
    if "." in name:
        return parse_version(name)
    found = epochs_recorded(here.bus, record.id, int(name))
    if not found and not record.recorded:
        found = [version for version in Versions(here, record).names if version.number == int(name)]
    return max(found, default=None)
