"""Routes of exports: ask for one, see how far it is, fetch its files, take it away."""

from __future__ import annotations

from typing import Annotated

import msgspec
from fastapi import APIRouter, Depends, Path, Response
from fastapi.responses import FileResponse

from syncline.contract.exported import (
    SHARD_BYTES,
    ExportedFile,
    ExportFormat,
    ExportOrigin,
    ExportRecord,
    ExportRequest,
    export_name,
    parse_export_name,
)
from syncline.contract.version_path import VersionId
from syncline.exporting.held import CannotExport, Held, held, origin_of
from syncline.gateway.access import Body, Here, TheJob, only_known_parameters
from syncline.gateway.answers import PROBLEMS, describe, reply, takes
from syncline.gateway.errors import Fault, Refusal, body_as
from syncline.gateway.exporting_processes import ExportView
from syncline.gateway.exporting_story import story_of
from syncline.gateway.records import JobRecord

router = APIRouter(
    prefix="/v1/jobs/{job}/exports", tags=["exports"], dependencies=[Depends(only_known_parameters)]
)


class ExportBody(msgspec.Struct, forbid_unknown_fields=True, rename={"origin": "from"}):
    """What is wanted. `version`: EPOCH.NUMBER or NUMBER, None: the newest; `from`: None: wherever it is."""

    format: ExportFormat
    version: str | None = None
    origin: ExportOrigin | None = None
    shard_bytes: Annotated[int, msgspec.Meta(ge=1 << 10, le=1 << 44)] = SHARD_BYTES


class ExportList(msgspec.Struct, frozen=True, kw_only=True):
    """Exports of a job, and what could be exported: versions in the store, and versions that a checkpoint holds."""

    items: list[ExportView]
    versions: list[VersionId]
    checkpoints: list[VersionId]


_RECORD = ExportRecord(
    job="j0123456789",
    version=VersionId(0, 12),
    format="hf",
    origin="version",
    contract="9f" * 32,
    manifest="9f" * 32,
    values="BF16, bit for bit the version's tensors: the values that trainer and rollout multiply",
    tensors=45,
    files=(ExportedFile(name="model.safetensors", nbytes=276_480, sha256="9f" * 32),),
    written=1_788_000_000.0,
)
_EXAMPLE = ExportView(name="0.12-hf", state="ready", record=_RECORD)
_LIST = ExportList(items=[_EXAMPLE], versions=[VersionId(0, 12)], checkpoints=[VersionId(0, 10)])
_EXAMPLE_BODY = {"format": "hf", "version": "0.12"}
Name = Annotated[
    str,
    Path(
        description="VERSION-FORMAT, or VERSION-FORMAT-checkpoint",
        examples=["0.12-hf"],
        json_schema_extra={"pattern": r"^[0-9]{1,9}\.[0-9]{1,9}-(hf|lora|sglang)(-checkpoint)?$"},
    ),
]
File = Annotated[
    str, Path(description="a file that the export's record lists", examples=["model.safetensors"])
]


@router.post(
    "",
    status_code=202,
    openapi_extra=takes(ExportBody, _EXAMPLE_BODY),
    responses=describe(ExportView, _EXAMPLE, 202),
)
def begin_export(record: TheJob, here: Here, body: Body) -> Response:
    """Have a version written as a checkpoint that others load. One that is there, or being made, is not made again."""
    wanted = body_as(body, ExportBody)
    found = held(record.folder)
    version = _version(found, wanted.version)
    try:
        origin = origin_of(found, record.spec.contract(), version, wanted.format, wanted.origin)
    except CannotExport as error:
        raise Refusal(422, "cannot-export", str(error)) from None
    view = here.exporting.look(record.id, export_name(version, wanted.format, origin))
    if view is None or view.state not in ("running", "ready"):
        view = here.exporting.begin(
            ExportRequest(
                job=record.id,
                version=version,
                format=wanted.format,
                origin=origin,
                story=story_of(here, record, version, origin),
                shard_bytes=wanted.shard_bytes,
            )
        )
    return reply(view, 202)


def _version(found: Held, text: str | None) -> VersionId:
    """The version that is meant. Raises `Refusal` 422 that says which there are."""
    version = found.newest() if text is None else found.named(text)
    if version is None:
        told = "there is nothing to export yet" if text is None else f"version {text[:40]} cannot be exported"
        fault = Fault(path="version", message=told, hint=found.words())
        raise Refusal(422, "cannot-export", f"version: {told}; {found.words()}", errors=(fault,))
    return version


@router.get("", responses=describe(ExportList, _LIST))
def list_exports(record: TheJob, here: Here) -> Response:
    """Exports of the job, and what could be exported."""
    found = held(record.folder)
    return reply(
        ExportList(
            items=here.exporting.all(record.id),
            versions=list(found.versions),
            checkpoints=sorted(found.checkpoints),
        )
    )


@router.get("/{export}", responses=describe(ExportView, _EXAMPLE))
def get_export(record: TheJob, here: Here, export: Name) -> Response:
    """How it stands with one export."""
    return reply(_known(record, here, export))


@router.delete("/{export}", responses=describe(ExportView, _EXAMPLE))
def remove_export(record: TheJob, here: Here, export: Name) -> Response:
    """Take an export's folder away; what it was made from stays. Answers with what it was. 409 while it is made."""
    view = _known(record, here, export)
    if not here.exporting.remove(record.id, export):
        raise Refusal(409, "export-running", "the export is being made", state=view.state)
    return reply(view)


def _known(record: JobRecord, here: Here, name: str) -> ExportView:
    view = here.exporting.look(record.id, name) if parse_export_name(name) is not None else None
    if view is None:
        raise Refusal(404, "not-found", "there is no such export of this job")
    return view


@router.get(
    "/{export}/files/{file:path}",
    response_class=Response,
    responses={
        200: {
            "description": "the file; a Range is answered with 206",
            "content": {"application/octet-stream": {"schema": {"type": "string"}, "example": "{}"}},
        },
        **PROBLEMS,
    },
)
def get_file(record: TheJob, here: Here, export: Name, file: File) -> Response:
    """A file of an export that is there, whole or a range of it."""
    _known(record, here, export)
    path = here.exporting.file(record.id, export, file)
    if path is None:
        raise Refusal(404, "not-found", "the export has no such file")
    return FileResponse(path, media_type="application/octet-stream")
