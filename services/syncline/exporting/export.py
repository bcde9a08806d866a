"""One export: from a request to a folder that is there whole or not at all."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from syncline.contract.adapters import is_adapter
from syncline.contract.exported import (
    CARD,
    RECORD,
    SCORES,
    ExportedFile,
    ExportRecord,
    ExportRequest,
)
from syncline.contract.job import JobSpec
from syncline.contract.version_path import TensorEntry, VersionManifest, loaded_digest
from syncline.exporting import settings
from syncline.exporting.card import Told, render
from syncline.exporting.files import nbytes, write_file, write_model
from syncline.exporting.held import CannotExport, held, reconstructs, stores_low_bit
from syncline.exporting.source import Source, Stored, pin, plan_of, read_manifest
from syncline.runtime.durable import sync_file, sync_folder, write_whole
from syncline.runtime.store import BlobStore

ADAPTER_FILE = "adapter_model.safetensors"
Progress = Callable[[int, int], None]
"""Called with bytes written and bytes to be written."""


def export(request: ExportRequest, folder: Path, models: Path, progress: Progress) -> Path:
    """Make the export of the job in `folder`; its path. One that is there already is left as it is.

    Raises `CannotExport`, and `ValueError` of the model; then nothing of it is left behind.
    """
    place = folder / "exports"
    place.mkdir(exist_ok=True)
    final = place / request.name
    if final.exists():
        return final
    part, pinned = place / f".{request.name}.part", place / f".{request.name}.pin"
    for left in (part, pinned):
        shutil.rmtree(left, ignore_errors=True)  # of one that died
    part.mkdir()
    try:
        _Export(request, folder, models, part, pinned, progress).run()
        sync_folder(part)
        part.rename(final)
        sync_folder(place)
    finally:
        shutil.rmtree(part, ignore_errors=True)
        shutil.rmtree(pinned, ignore_errors=True)
    return final


class _Export:
    """The making of one. `part` is where it is written, `pinned` where its blobs are linked to."""

    def __init__(
        self,
        request: ExportRequest,
        folder: Path,
        models: Path,
        part: Path,
        pinned: Path,
        progress: Progress,
    ) -> None:
        self._request, self._folder, self._part, self._pinned = request, folder, part, pinned
        self._spec = JobSpec.model_validate(request.story.spec, strict=False)
        self._contract = self._spec.contract()
        self._models = models
        self._model = models / self._spec.model.name
        self._progress = progress
        self._done, self._total = 0, 0
        self._told = Told(values="", load="", checks=[])
        self._manifest: VersionManifest | None = None

    def run(self) -> None:
        match self._request.origin:
            case "version":
                self._from_version()
            case "checkpoint":
                self._from_checkpoint()
        self._scores()
        self._close()

    # ---- from a version ---------------------------------------------------------------------------------
    def _from_version(self) -> None:
        version = self._request.version
        manifest = read_manifest(self._folder, version, self._contract.digest())
        self._manifest = manifest
        store = pin(BlobStore(self._folder / "store"), manifest, self._pinned)
        self._told.checks += [
            "the manifest's signature, with the job's key",
            "the sha256 of each tensor's bytes as they were written, against the manifest",
            "the sha256 of the model's config.json, against the manifest",
        ]
        entries = {entry.name: entry for entry in manifest.tensors}
        adapter = {n: e for n, e in entries.items() if self._contract.adapter is not None and is_adapter(n)}
        base = {name: entry for name, entry in entries.items() if name not in adapter}
        match self._request.format:
            case "hf":
                self._hf(store, base, manifest)
            case "lora":
                self._lora(Stored(store, adapter), loaded_digest(base.values()), leaves=False)
                self._config(manifest)
            case "sglang":
                self._sglang(store, base, adapter, manifest)

    def _hf(self, store: BlobStore, entries: dict[str, TensorEntry], manifest: VersionManifest) -> None:
        source: Source = Stored(store, entries)
        dtype = "bfloat16"
        self._told.values = (
            "BF16, bit for bit the version's tensors: the values that trainer and rollout multiply"
        )
        if stores_low_bit(self._contract):
            from syncline.exporting.decoded import Decoded

            plan = plan_of(self._contract, manifest, store)
            decoded = Decoded(store, entries, plan, self._contract.trainer.operands)
            source = decoded
            dtype = "float32" if decoded.widest == "F32" else "bfloat16"
            self._told.checks.append("the precision plan resolved from the tensors, against the manifest")
            self._told.values = (
                f"dequantised: {len(plan.low_bit())} weights hold the {dtype} values that their codes and scales stand "
                "for, which the trainer's forward multiplied; all others are BF16 as in the version"
            )
            if self._contract.trainer.fprop.left != "original":
                self._told.caveats.append(
                    "the trainer quantises activations too, and plain transformers does not: its scores differ by that"
                )
        elif self._contract.trainer.parameters == "fp32":
            self._told.values = (
                "BF16, bit for bit the version's tensors, which rollout multiplies; the trainer's FP32 weights are "
                "in checkpoints alone"
            )
        elif self._contract.families:
            self._told.values = "BF16, bit for bit the version's tensors; rollout quantises them as it loads"
        self._write_model(source, self._config(manifest), dtype)

    def _sglang(
        self,
        store: BlobStore,
        base: dict[str, TensorEntry],
        adapter: dict[str, TensorEntry],
        manifest: VersionManifest,
    ) -> None:
        said = settings.sglang_settings(self._contract, plan_of(self._contract, manifest, store))
        self._told.checks.append("the precision plan resolved from the tensors, against the manifest")
        words = "the rollout representation, bit for bit the version's tensors"
        self._told.values = f"{manifest.representation}: {words}"
        self._told.caveats = list(said.caveats)
        environment = " ".join(f"{name}={value}" for name, value in said.env.items())
        lora = ["--lora-paths", "policy=DIR/adapter"] if adapter else []
        command = ["python -m sglang.launch_server --model-path DIR", *said.flags, *lora]
        self._told.load = f"{environment} {' '.join(command)}".strip()
        self._total = sum(entry.nbytes for entry in manifest.tensors)
        self._write_model(Stored(store, base), self._config(manifest), "bfloat16", said.quantization_config)
        if adapter:
            (self._part / "adapter").mkdir()
            self._lora(
                Stored(store, adapter),
                loaded_digest(base.values()),
                leaves=True,
                folder=self._part / "adapter",
            )
            self._told.values += "; the adapter lies beside it in adapter/"

    def _config(self, manifest: VersionManifest) -> dict[str, object]:
        return settings.config_of(self._model, manifest.model)

    # ---- from a checkpoint ------------------------------------------------------------------------------
    def _from_checkpoint(self) -> None:
        from syncline.exporting.masters import Masters

        path = held(self._folder).checkpoints.get(self._request.version)
        if path is None:
            raise CannotExport(f"there is no checkpoint of version {self._request.version}")
        source = Masters(path, self._contract, self._models, self._spec.model.name)
        self._told.checks.append("the sha256 of the checkpoint's weights, against its manifest")
        config = settings.config_of(self._model, "")
        if self._request.format == "lora":
            self._lora(source, "", leaves=False)
            return
        wide = self._contract.trainer.parameters
        self._told.values = {
            "bf16": "BF16: the trainer's FP32 masters rounded to nearest even, as its model holds them",
            "fp32": "FP32: the trainer's masters, as its model holds them",
        }[wide]
        if stores_low_bit(self._contract) and reconstructs(self._contract):
            self._told.values += "; before the contract's quantisation, through which its forward takes them"
        self._write_model(source, config, {"bf16": "bfloat16", "fp32": "float32"}[wide])

    # ---- what all have in common ------------------------------------------------------------------------
    def _write_model(
        self,
        source: Source,
        config: dict[str, object],
        dtype: str,
        quantization: dict[str, object] | None = None,
    ) -> None:
        self._total = self._total or sum(nbytes(fact) for fact in source.facts.values())
        write_model(self._part, source, self._request.shard_bytes, self._wrote)
        settings.write_model_settings(self._part, self._model, config, dtype, quantization)
        self._told.tensors += len(source.facts)

    def _lora(self, source: Source, base: str, leaves: bool, folder: Path | None = None) -> None:
        """The adapter in PEFT's layout. `base`: digest over the base's tensors as they are stored, "": not known."""
        place = folder or self._part
        self._total = self._total or sum(nbytes(fact) for fact in source.facts.values())
        names = sorted(source.facts)
        write_file(place / ADAPTER_FILE, source, names, lambda name: settings.PEFT + name, self._wrote)
        settings.write_adapter_config(place, self._contract, names, self._spec.model.name, leaves)
        self._told.tensors += len(names)
        self._told.base = base
        if folder is None:
            settings.copy_tokenizer(place, self._model)
            self._told.values = "BF16, bit for bit the version's adapter; the base is not in this folder"

    def _wrote(self, count: int) -> None:
        self._done += count
        self._progress(self._done, self._total)

    def _scores(self) -> None:
        if self._request.story.canaries:
            raw = msgspec.json.encode(self._request.story.canaries)
            write_whole(self._part / SCORES, msgspec.json.format(raw) + b"\n")

    def _close(self) -> None:
        """Card and record, each naming what was written before it."""
        text = render(self._request, self._spec, self._contract, self._manifest, self._told)
        write_whole(self._part / CARD, text.encode())
        files = []
        for path in sorted(p for p in self._part.rglob("*") if p.is_file()):
            files.append(
                ExportedFile(
                    name=path.relative_to(self._part).as_posix(),
                    nbytes=path.stat().st_size,
                    sha256=sync_file(path),
                )
            )
        record = ExportRecord(
            job=self._request.job,
            version=self._request.version,
            format=self._request.format,
            origin=self._request.origin,
            contract=self._contract.digest(),
            manifest="" if self._manifest is None else self._manifest.digest(),
            values=self._told.values,
            tensors=self._told.tensors,
            files=tuple(files),
            written=time.time(),
        )
        write_whole(self._part / RECORD, msgspec.json.format(msgspec.json.encode(record)) + b"\n")
