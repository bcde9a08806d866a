"""`write_export`: a job's export as a process of its own left it."""

from __future__ import annotations

import hashlib
from pathlib import Path

import msgspec

from syncline.contract.exported import RECORD, ExportedFile, ExportRecord, ExportRequest, Story
from syncline.contract.version_path import VersionId

CONFIG = b'{"model_type": "qwen3"}'


def write_export(folder: Path) -> str:
    """An export of version 0.7 with one file, `config.json`; its name."""
    story = Story(name="t", spec={}, state="succeeded")
    asked = ExportRequest(
        job=folder.name, version=VersionId(0, 7), format="hf", origin="version", story=story
    )
    place = folder / "exports" / asked.name
    place.mkdir(parents=True)
    (place.parent / f"{asked.name}.request.json").write_bytes(msgspec.json.encode(asked))
    (place / "config.json").write_bytes(CONFIG)
    file = ExportedFile(name="config.json", nbytes=len(CONFIG), sha256=hashlib.sha256(CONFIG).hexdigest())
    record = ExportRecord(
        job=folder.name,
        version=VersionId(0, 7),
        format="hf",
        origin="version",
        contract="c",
        manifest="m",
        values="",
        tensors=0,
        files=(file,),
        written=1.0,
    )
    (place / RECORD).write_bytes(msgspec.json.encode(record))
    return asked.name
