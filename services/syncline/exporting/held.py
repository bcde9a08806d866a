"""What of a job can be exported: versions whose manifest and blobs are there, and whole checkpoints. Without torch."""

from __future__ import annotations

from pathlib import Path

import msgspec

from syncline.contract.exported import ExportFormat, ExportOrigin
from syncline.contract.precision import PrecisionContract
from syncline.contract.version_path import VersionId
from syncline.runtime.store import BlobStore

FOLDER = "exports"


class CannotExport(ValueError):
    """An export that is not possible. The message says what would be."""


class Checkpoint(msgspec.Struct, frozen=True, kw_only=True):
    """What an export needs of a checkpoint's MANIFEST.json; the trainer writes more."""

    version: VersionId
    contract: str
    engine: str
    files: dict[str, str]  # name -> sha256 hex


class Held(msgspec.Struct, frozen=True, kw_only=True):
    """Versions, oldest first, and checkpoints by version."""

    versions: tuple[VersionId, ...]
    checkpoints: dict[VersionId, Path]

    def words(self) -> str:
        """Both, for people."""
        versions = ", ".join(map(str, self.versions)) or "none"
        checkpoints = ", ".join(map(str, sorted(self.checkpoints))) or "none"
        return f"versions in the store: {versions}; checkpoints: {checkpoints}"

    def newest(self) -> VersionId | None:
        """The newest of all."""
        return max((*self.versions, *self.checkpoints), default=None)

    def named(self, text: str) -> VersionId | None:
        """The held version that `text` names: EPOCH.NUMBER, or NUMBER for its newest epoch; None: none does."""
        found = {*self.versions, *self.checkpoints}
        return max((v for v in found if text in (str(v), str(v.number))), default=None)


def held(folder: Path) -> Held:
    """What lies in the job's `folder`. A checkpoint without MANIFEST.json is none."""
    store = folder / "store"
    versions = BlobStore(store).manifests() if store.is_dir() else []
    checkpoints: dict[VersionId, Path] = {}
    for path in sorted((folder / "checkpoints").glob("update-*/MANIFEST.json")):
        checkpoints[read_checkpoint(path.parent).version] = path.parent
    return Held(versions=tuple(versions), checkpoints=checkpoints)


def read_checkpoint(path: Path) -> Checkpoint:
    """The manifest of the checkpoint at `path`. Raises `CannotExport`."""
    try:
        return msgspec.json.decode((path / "MANIFEST.json").read_bytes(), type=Checkpoint)
    except (OSError, msgspec.MsgspecError) as error:
        raise CannotExport(f"checkpoint {path.name}: MANIFEST.json: {error}") from None


def origin_of(
    found: Held,
    contract: PrecisionContract,
    version: VersionId,
    format: ExportFormat,
    asked: ExportOrigin | None,
) -> ExportOrigin:
    """From where `version` is exported as `format`. Raises `CannotExport` saying what can be.

    asked   what the user wants; None: from the version, or, where its blobs are gone and a checkpoint gives the same
            bytes, from that
    """
    _check_format(contract, format, asked)
    if asked in (None, "version") and version in found.versions:
        return "version"
    if asked == "version":
        raise CannotExport(f"version {version} is no longer in the store; {found.words()}")
    if version not in found.checkpoints:
        raise CannotExport(f"there is no checkpoint of version {version} and no blobs; {found.words()}")
    if asked is None and not _same_bytes(contract, format):
        raise CannotExport(
            f"version {version} is no longer in the store; its checkpoint holds the trainer's wide weights and not "
            f"these values: ask for --from checkpoint with --format hf to get those; {found.words()}"
        )
    return "checkpoint"


def _check_format(contract: PrecisionContract, format: ExportFormat, asked: ExportOrigin | None) -> None:
    if format == "lora" and contract.adapter is None:
        raise CannotExport(f"the contract {contract.name} has no adapter: use --format hf or sglang")
    if format == "hf" and contract.adapter is not None:
        raise CannotExport(
            f"the contract {contract.name} trains an adapter over a frozen base, and nothing is merged: use --format "
            "lora for the adapter alone, or sglang for both"
        )
    if format == "sglang" and asked == "checkpoint":
        raise CannotExport("the rollout representation is in versions alone: use --from version")
    if format == "hf" and asked != "checkpoint" and stores_low_bit(contract) and not reconstructs(contract):
        raise CannotExport(
            f"under {contract.name} the trainer multiplies wide weights, which its versions do not hold: use --from "
            "checkpoint, or --format sglang for what rollout multiplies"
        )


def stores_low_bit(contract: PrecisionContract) -> bool:
    """Whether its versions hold codes and scales; under a bridge the engine makes them of BF16 values."""
    return bool(contract.families) and contract.convert.where != "rollout_worker"


def reconstructs(contract: PrecisionContract) -> bool:
    """Whether the trainer's forward multiplies the values that codes and scales stand for."""
    return contract.trainer.fprop.right != "original"


def _same_bytes(contract: PrecisionContract, format: ExportFormat) -> bool:
    """Whether a checkpoint gives what the version gives: BF16 values of the masters, and nothing else."""
    if format == "lora":
        return True
    return format == "hf" and not contract.families and contract.trainer.parameters == "bf16"
