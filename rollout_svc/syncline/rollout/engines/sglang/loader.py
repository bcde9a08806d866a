"""From a manifest to a server that provably holds it: written, checked, loaded, read back."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor

from syncline.contract.sglang_spec import Update
from syncline.contract.version_path import VersionId, VersionManifest, loaded_digest
from syncline.rollout.engine import StageFailed
from syncline.rollout.engines.expected import Expected
from syncline.rollout.engines.sglang import buckets, checkpoint
from syncline.rollout.engines.sglang.client import Refused, Server, ServerGone
from syncline.rollout.engines.sglang.fused import FusedModel
from syncline.rollout.engines.sglang.groups import WeightGroup, aligned
from syncline.rollout.engines.sglang.hashes import checksum, cuda_checksum
from syncline.rollout.engines.sglang.labels import SHORT, label_of
from syncline.rollout.engines.sglang.launch import LaunchPlan
from syncline.rollout.engines.sglang.lora import adapter_name, contents_of, write_adapter
from syncline.runtime.store import BlobStore

BUCKET = 256 << 20
"""Bytes of one bucket."""


class Prepared(msgspec.Struct, frozen=True, kw_only=True):
    """A version on this worker's disk, whole and checked, and how it must read back.

    folder     checkpoint folder of the base
    label      the server's weight version for the base: of the version that brought these base tensors here
    base       checkpoint tensor -> digest, of the base; `contents`: of all
    checksums  the server's parameter -> checksum
    adapter    name on the server, and folder; None: the contract has none
    """

    version: VersionId
    digest: str
    folder: Path
    label: str
    base: dict[str, str]
    contents: dict[str, str]
    checksums: dict[str, str]
    nbytes: int
    loaded: str
    adapter: tuple[str, Path] | None


class Loader:
    """Prepares and loads versions of one model.

    expected   what manifests must list
    plan       what the server was started with
    scratch    folder for checkpoints, this worker's own
    """

    def __init__(
        self, expected: Expected, config: Mapping[str, Any], plan: LaunchPlan, scratch: Path, update: Update
    ) -> None:
        self._expected, self._plan, self._scratch, self._update = expected, plan, scratch, update
        ties = {absent for absent, _ in expected.state.ties}
        shapes = {name: window.shape for name, window in expected.state.windows.items() if name not in ties}
        wide = {"float32": torch.float32, "bfloat16": torch.bfloat16}[plan.wide]
        hashed = cuda_checksum if plan.cuda else checksum
        self._fused = FusedModel(config, shapes, expected.plan, wide, plan.tp, hashed)
        self._group: WeightGroup | None = None

    def prepare(self, manifest: VersionManifest, store: BlobStore, held: Prepared | None) -> Prepared:
        """Write the version to disk, checked. The server is not touched.

        held   what the server holds now: a base with the same tensors keeps its label, since it is not loaded again
        Raises `StageFailed` naming the tensor.
        """
        self._expected.check(manifest)
        entries = {entry.name: entry for entry in manifest.tensors}
        base, adapter = contents_of(manifest, False), contents_of(manifest, True)
        digest = manifest.digest()
        same = held is not None and held.base == base
        folder = self._scratch / f"{manifest.version}-{digest[:SHORT]}"
        read = lru_cache(maxsize=None)(lambda name: checkpoint.blob(entries[name], store))
        if same and held is not None:
            label, folder, checksums = held.label, held.folder, held.checksums
            for name in adapter:
                read(name)
        else:
            label = label_of(manifest.version, digest)
            checkpoint.write_config(folder, self._expected.folder.path, self._plan.quantization)
            tensors = {name: read(name) for name in base}
            checkpoint.write_tensors(folder / checkpoint.FILE, tensors, (entries[name] for name in base))
            checksums = self._fused.checksums(read)
        return Prepared(
            version=manifest.version,
            digest=digest,
            folder=folder,
            label=label,
            base=base,
            contents=base | adapter,
            checksums=checksums,
            nbytes=manifest.nbytes(),
            loaded=loaded_digest(manifest.tensors),
            adapter=self._adapter(manifest, adapter, read),
        )

    def _adapter(
        self, manifest: VersionManifest, adapter: dict[str, str], read: Callable[[str], Tensor]
    ) -> tuple[str, Path] | None:
        if self._plan.adapter is None:
            return None
        name = adapter_name(manifest.version, manifest.digest())
        folder = self._scratch / name
        write_adapter(folder, self._plan.adapter, {tensor: read(tensor) for tensor in adapter})
        return name, folder

    def load(self, server: Server, prepared: Prepared) -> None:
        """Load base and adapter and read them back. Raises `StageFailed`, `Refused`, `ServerGone`."""
        if self._update == "disk":
            server.load_disk(str(prepared.folder), prepared.label)
        else:
            self._load_buckets(server, prepared)
        self.verify(server, prepared)
        self.load_adapter(server, prepared)

    def load_adapter(self, server: Server, prepared: Prepared) -> None:
        """Load the version's adapter under its own name, unless the server has it."""
        if prepared.adapter is None:
            return
        name, folder = prepared.adapter
        if name not in server.adapters():
            tensors = checkpoint.read_tensors(folder / "adapter_model.safetensors")
            server.load_adapter(name, self._plan.adapter or {}, buckets.named(tensors))
        if name not in server.adapters():
            raise StageFailed(f"adapter {name} was loaded, and the server does not list it")

    def _load_buckets(self, server: Server, prepared: Prepared) -> None:
        tensors = checkpoint.read_tensors(prepared.folder / checkpoint.FILE)
        parts = [aligned(part) for part in buckets.buckets(tensors, BUCKET)]
        group = self._met(server) if self._update == "group" else None
        server.begin_update()
        try:
            for at, part in enumerate(parts, 1):
                last = at == len(parts)
                if group is not None:
                    group.send(part, prepared.label, flush=last)
                else:
                    server.load_bucket(buckets.encoded(part), prepared.label, flush=last, ranks=self._plan.tp)
        except (StageFailed, Refused, ServerGone) as error:
            self._group = None  # a group that broke is not used again
            if group is not None and isinstance(error, Refused):  # else nobody is there to be asked
                group.close()
            raise
        finally:
            server.end_update()

    def _met(self, server: Server) -> WeightGroup:
        """The group with this server: another than the last one, which died with its server, is made."""
        if self._group is None or self._group.url != server.url:
            self._group = WeightGroup(server, self._plan.tp)
        return self._group

    def verify(self, server: Server, prepared: Prepared) -> None:
        """Compare what the server holds with what the version must be there. Raises `StageFailed` naming a tensor."""
        found = server.checksums(self._plan.tp)
        for name in sorted(found.keys() | prepared.checksums.keys()):
            if found.get(name) != prepared.checksums.get(name):
                raise StageFailed(
                    f"tensor {name} reads back with checksum {found.get(name, 'none')}, version {prepared.version} has "
                    f"{prepared.checksums.get(name, 'none')} there"
                )
        label = server.info().get("weight_version")
        if label != prepared.label:
            raise StageFailed(f"the server holds weight version {label!r}, {prepared.label!r} was loaded")

    def forget(self, keep: list[Prepared]) -> None:
        """Delete the folders of versions outside `keep`."""
        kept = {p.folder for p in keep} | {p.adapter[1] for p in keep if p.adapter is not None}
        for folder in self._scratch.iterdir() if self._scratch.is_dir() else ():
            if folder.is_dir() and folder not in kept:
                shutil.rmtree(folder)
