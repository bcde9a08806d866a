"""Models of a chosen size and versions of them that have nothing in common: for figures that depend on bytes alone.

The architecture is that of the tiny dense model, wider and deeper. Values are windows of one random pool, so that a
gigabyte of them takes a second.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import time
from pathlib import Path
from typing import Any

import msgspec
import torch
from rows import MODELS
from safetensors.torch import save_file
from torch import Tensor

from syncline.contract.recipes import RECIPES
from syncline.contract.version_path import (
    Minted,
    SignedManifest,
    VersionId,
    VersionManifest,
    VersionRecord,
    opened,
    sign,
)
from syncline.reference.model import empty_model, model_folder
from syncline.reference.state import state_plan
from syncline.runtime.store import BlobStore
from syncline.sync.publish import Publisher

JOB, KEY = "j00000bench", b"a key for the bench"
POOL = 1 << 25  # values
STRIDE = 7919  # values between two windows


class Size(msgspec.Struct, frozen=True):
    """An architecture of about `name` in BF16."""

    name: str
    hidden: int
    intermediate: int
    heads: int
    layers: int


SMALL = Size("10 MB", 256, 1024, 4, 5)
MIDDLE = Size("100 MB", 768, 3072, 12, 6)
LARGE = Size("1 GB", 2048, 8192, 32, 8)
TINY = Size("1 MB", 128, 256, 2, 3)


class Exported(msgspec.Struct, frozen=True):
    """A version as a trainer leaves it."""

    minted: Minted
    file: Path  # its tensors


class Scaled:
    """A job's folder with a model of `size`."""

    def __init__(self, folder: Path, size: Size) -> None:
        self.size, self.run = size, folder / "run"
        self.models = folder / "models"
        self.name = "scaled"
        _write_model(self.models / self.name, size)
        self.store = BlobStore(self.run / "store")
        self.manifests: list[VersionManifest] = []
        self.publisher = Publisher(JOB, self.run, KEY, RECIPES["bf16"], self.store)
        self._shapes = _shapes(self.models, self.name, size.layers)
        generator = torch.Generator().manual_seed(0)
        self._pool = torch.randn(POOL, generator=generator).mul_(0.02).to(torch.bfloat16)
        self.nbytes = sum(2 * shape.numel() for shape in self._shapes.values())

    def tensors(self, number: int) -> dict[str, Tensor]:
        """The weights of a version, BF16, each in memory of its own."""
        made = {}
        for i, (name, shape) in enumerate(self._shapes.items()):
            count = shape.numel()
            at = (number * len(self._shapes) + i) * STRIDE % (POOL - count)
            made[name] = self._pool[at : at + count].reshape(shape).clone()
        return made

    def export(self, number: int, tensors: dict[str, Tensor]) -> tuple[Exported, float]:
        """Write a version as a trainer does; with the seconds that safetensors took."""
        folder = self.run / "export" / f"0.{number}"
        folder.mkdir(parents=True)
        config, file = folder / "config.json", folder / "model.safetensors"
        shutil.copyfile(self.models / self.name / "config.json", config)
        began = time.perf_counter()
        save_file(tensors, file)
        seconds = time.perf_counter() - began
        files = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in (config, file)}
        minted = Minted(
            job=JOB,
            version=VersionId(0, number),
            parent=None,
            optimizer_step=number,
            contract=RECIPES["bf16"].digest(),
            artefact=f"export/0.{number}",
            files=files,
            canaries=(),
            traceparent="",
            minted_at=time.time(),
        )
        return Exported(minted, file), seconds

    def publish(self, exported: Exported) -> VersionManifest:
        """Convert and sign, as sync does."""
        minted = exported.minted
        record = VersionRecord(
            version=minted.version,
            parent=None,
            optimizer_step=minted.optimizer_step,
            contract=minted.contract,
            state="minted",
        )
        self.publisher.publish(minted, record)
        self.manifests.append(opened(self.store.read_manifest(minted.version), KEY))
        return self.manifests[-1]

    def renumbered(self, number: int) -> SignedManifest:
        """The published contents, one after the other and over again, as version `number`."""
        manifest = self.manifests[number % len(self.manifests)]
        return sign(msgspec.structs.replace(manifest, version=VersionId(0, number)), KEY)


def _write_model(folder: Path, size: Size) -> None:
    folder.mkdir(parents=True)
    config: dict[str, Any] = json.loads((MODELS / "tiny-dense" / "config.json").read_text())
    config |= {
        "hidden_size": size.hidden,
        "intermediate_size": size.intermediate,
        "num_attention_heads": size.heads,
        "num_key_value_heads": size.heads // 2,
        "head_dim": 64,
        "num_hidden_layers": size.layers,
    }
    (folder / "config.json").write_text(json.dumps(config))


def _shapes(models: Path, name: str, layers: int) -> dict[str, torch.Size]:
    """Shapes by checkpoint name: those of a model of one layer, and of the others that are like it."""
    folder = model_folder(models, name)
    folder.config.num_hidden_layers = 1
    folder.config.layer_types = folder.config.layer_types[:1]
    windows = state_plan(empty_model(folder)).windows
    shapes = {}
    for name, window in windows.items():
        for i in range(layers if ".layers.0." in name else 1):
            shapes[name.replace(".layers.0.", f".layers.{i}.")] = torch.Size(window.shape)
    return shapes
