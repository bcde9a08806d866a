"""Exports of the example models: the tensors of a model folder, random by seed, in any files and order."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

import torch
from conformance.forge import JOB, KEY, MODELS, checkpoint
from safetensors.torch import save_file
from torch import Tensor

from syncline.contract.precision import PrecisionContract
from syncline.contract.version_path import Minted, SignedManifest, VersionId, sign
from syncline.runtime.store import BlobStore
from syncline.sync.convert import Converted, convert
from syncline.sync.export import Export
from syncline.sync.manifest import build


def tensors_of(model: str, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> dict[str, Tensor]:
    """The model's checkpoint."""
    return {name: tensor.to(dtype) for name, tensor in checkpoint(MODELS / model, seed).items()}


def write_export(
    folder: Path, model: str, tensors: dict[str, Tensor], files: Sequence[Sequence[str]] | None = None
) -> dict[str, str]:
    """Write `tensors` into `folder`; `files` says which names go into which file. Returns the stamped digests."""
    folder.mkdir(parents=True)
    for i, names in enumerate(files or [list(tensors)]):
        save_file({name: tensors[name].contiguous() for name in names}, folder / f"model-{i}.safetensors")
    (folder / "config.json").write_bytes((MODELS / model / "config.json").read_bytes())
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}


def converted(
    folder: Path,
    model: str,
    tensors: dict[str, Tensor],
    contract: PrecisionContract,
    store: BlobStore,
    files: Sequence[Sequence[str]] | None = None,
) -> tuple[Converted, dict[str, str]]:
    """Export and convert; what conversion says, and the stamped files."""
    stamped = write_export(folder, model, tensors, files)
    export = Export(folder, stamped)
    try:
        return convert(export, contract, store), stamped
    finally:
        export.close()


def published(
    folder: Path,
    model: str,
    tensors: dict[str, Tensor],
    contract: PrecisionContract,
    store: BlobStore,
    number: int = 0,
) -> SignedManifest:
    """Export, convert and sign version 0.`number` of the test job."""
    done, files = converted(folder, model, tensors, contract, store)
    minted = Minted(
        job=JOB,
        version=VersionId(0, number),
        parent=None,
        optimizer_step=number,
        contract=contract.digest(),
        artefact=f"export/0.{number}",
        files=files,
        canaries=(),
        traceparent="",
        minted_at=1.0,
    )
    signed = sign(build(minted, done), KEY)
    store.write_manifest(signed)
    return signed
