"""The manifest of a converted version, signed with the job's key. Equal inputs give equal bytes."""

from __future__ import annotations

from pathlib import Path

from syncline.contract.version_path import Minted, VersionManifest
from syncline.sync.convert import Converted
from syncline.sync.export import BadExport


def build(minted: Minted, converted: Converted) -> VersionManifest:
    """The manifest of `minted` as `converted`. Raises `BadExport` if the export had no config.json."""
    if "config.json" not in minted.files:
        raise BadExport(f"version {minted.version}: export without config.json")
    return VersionManifest(
        job=minted.job,
        version=minted.version,
        parent=minted.parent,
        optimizer_step=minted.optimizer_step,
        contract=minted.contract,
        representation=converted.representation,
        model=minted.files["config.json"],
        tensors=converted.tensors,
        ties=converted.ties,
        padding=converted.padding,
        plan=converted.plan.digest(),
    )


def read_key(folder: Path) -> bytes:
    """The manifest key of the job in `folder`. Raises `ValueError` if it is absent or empty."""
    path = folder / "key"
    try:
        key = path.read_bytes()
    except OSError as error:
        raise ValueError(f"manifest key {path}: {error.strerror}") from None
    if not key:
        raise ValueError(f"manifest key {path} is empty")
    return key
