"""Exports of a version: what is asked for, what lies in the folder, and how far one got.

A job's exports lie in `runs/<job>/exports/`. `<name>/` is a whole one (`export_name`); while it is made there are
`<name>.request.json` (`ExportRequest`), `.<name>.part/` and `<name>.progress.json` (`ExportProgress`); one that could
not be made leaves `<name>.failed.json` (`ExportFailure`).
"""

from __future__ import annotations

import re
from typing import Any, Literal

import msgspec

from syncline.contract.evaluation import Evaluation
from syncline.contract.version_path import Canary, VersionId, parse_version

ExportFormat = Literal["hf", "lora", "sglang"]
"""hf: a model that `transformers` loads; lora: an adapter in PEFT's layout; sglang: the rollout representation."""
ExportOrigin = Literal["version", "checkpoint"]
"""version: signed manifest and blobs; checkpoint: what the trainer holds, from one of its checkpoints."""

RECORD, CARD, SCORES = "export.json", "README.md", "scores.json"
SHARD_BYTES = 4 << 30
_NAME = re.compile(r"(\d{1,9}\.\d{1,9})-(hf|lora|sglang)(-checkpoint)?", re.ASCII)


def export_name(version: VersionId, format: ExportFormat, origin: ExportOrigin) -> str:
    """Name of an export, such as 0.12-hf, or 0.12-hf-checkpoint."""
    return f"{version}-{format}{'-checkpoint' if origin == 'checkpoint' else ''}"


def parse_export_name(text: str) -> tuple[VersionId, ExportFormat, ExportOrigin] | None:
    """Inverse of `export_name`; None: no such name."""
    found = _NAME.fullmatch(text)
    if found is None:
        return None
    version, format, origin = found.groups()
    return parse_version(version), format, "checkpoint" if origin else "version"  # type: ignore[return-value]


class LineageStep(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A version on the way to the exported one. `verified`: worker -> its verdict and canary gap, in words."""

    version: VersionId
    parent: VersionId | None
    optimizer_step: int
    digest: str
    verified: dict[str, str] = {}


class Story(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What the model card tells beside the weights. Gathered by the gateway; nothing in it is a guess.

    lineage       newest first, the exported version included; empty: nobody knows it any more
    rewards       (update, mean reward) up to the version, None where nothing was scored
    evaluations   of this version, oldest first
    canaries      fixed prefixes with the trainer's own scores at this version; empty: they are no longer kept, or are
                  of other values
    """

    name: str
    spec: dict[str, Any]
    state: str
    lineage: tuple[LineageStep, ...] = ()
    rewards: tuple[tuple[int, float | None], ...] = ()
    evaluations: tuple[Evaluation, ...] = ()
    canaries: tuple[Canary, ...] = ()


class ExportRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One export that is to be made. Stamped by the gateway."""

    job: str
    version: VersionId
    format: ExportFormat
    origin: ExportOrigin
    story: Story
    shard_bytes: int = SHARD_BYTES

    @property
    def name(self) -> str:
        """Name of its folder."""
        return export_name(self.version, self.format, self.origin)


class ExportedFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A file of an export. `name` may name a folder inside it, with `/`."""

    name: str
    nbytes: int
    sha256: str  # hex


class ExportRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """`export.json`, the last file of an export: what it is, and each other file.

    manifest   digest of the signed manifest that it was made from; "": from a checkpoint
    values     what the tensors hold, in words
    """

    job: str
    version: VersionId
    format: ExportFormat
    origin: ExportOrigin
    contract: str
    manifest: str
    values: str
    tensors: int
    files: tuple[ExportedFile, ...]
    written: float  # wall-clock unix seconds

    def nbytes(self) -> int:
        """Bytes of all files."""
        return sum(file.nbytes for file in self.files)


class ExportProgress(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How far an export is: bytes of tensors written, and to be written (0: not known yet)."""

    done: int
    total: int


class ExportFailure(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Why an export was not made."""

    reason: str
