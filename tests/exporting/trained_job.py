"""A job's folder made without services: a real engine trains, real conversion publishes, real checkpoints are saved."""

from __future__ import annotations

import tempfile
import time
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch
from transformers import AutoModelForCausalLM

from syncline.contract.exported import ExportFormat, ExportOrigin, ExportRequest, Story
from syncline.contract.job import JobSpec
from syncline.contract.version_path import Minted, VersionId, sign
from syncline.runtime.store import BlobStore
from syncline.sync.adapter import convert_version
from syncline.sync.export import Export
from syncline.sync.manifest import build
from syncline.sync.source import source_of
from syncline.trainer.checkpoint import Checkpoints
from syncline.trainer.engine import Sample
from syncline.trainer.engines.torch import TorchEngine

MODELS = Path(__file__).parents[2] / "examples" / "models"
JOB = "j0123456789"
IDS = [1, *range(10, 40), 5, 7, 9]
FIRST = 4  # of IDS that is scored


class TrainedJob:
    """Job `JOB` in `runs`, with versions 0.0 up to `updates` in its store; checkpoints of the last `keep` of them."""

    def __init__(
        self,
        runs: Path,
        updates: int = 2,
        models: Path = MODELS,
        model: str = "tiny-dense",
        precision: dict[str, Any] | None = None,
        keep: int = 9,
    ) -> None:
        given = {"name": "t", "model": {"name": model}, "optimizer": {"lr": 0.01}}
        given |= {"precision": precision or {"recipe": "bf16"}}
        self.spec = JobSpec.model_validate_json(msgspec.json.encode(given))
        self.models, self.folder = models, runs / JOB
        self.folder.mkdir()
        (self.folder / "key").write_bytes(b"a key")
        (self.folder / "spec.json").write_text(self.spec.canonical())
        self.store = BlobStore(self.folder / "store")
        self.contract = self.spec.contract()
        self._scratch = Path(tempfile.mkdtemp(dir=runs))
        self.engine = TorchEngine(self.spec, models, self._scratch)
        self.engine.wake()
        checkpoints = Checkpoints(
            self.folder / "checkpoints", JOB, self.spec.hash(), self.contract.digest(), keep
        )
        for number in range(updates + 1):
            if number:
                self.engine.step(_samples(number), number)
            self._publish(VersionId(0, number))
            checkpoints.save(self.engine.save, VersionId(0, number), "torch", 0, "0")

    def _publish(self, version: VersionId) -> None:
        files = self.engine.export(self.folder / "export" / str(version))
        minted = Minted(
            job=JOB,
            version=version,
            parent=VersionId(0, version.number - 1) if version.number else None,
            optimizer_step=version.number,
            contract=self.contract.digest(),
            artefact=f"export/{version}",
            files=files,
            canaries=(),
            traceparent="",
            minted_at=time.time(),
        )
        export = Export(self.folder / minted.artefact, files)
        done = convert_version(source_of(export, self.contract), self.contract, self.store, None)
        export.close()
        self.store.write_manifest(sign(build(minted, done), b"a key"))

    def score(self, number: int, ids: Sequence[int] = IDS) -> list[float]:
        """The trainer's own log-probs of `ids[FIRST:]` at version 0.`number`."""
        self.engine.load(self.folder / "checkpoints" / f"update-{number:06d}")
        return list(self.engine.score([_sample(ids, "asked")])[0])

    def request(
        self, number: int, format: ExportFormat, origin: ExportOrigin = "version", **more: Any
    ) -> ExportRequest:
        """A request as the gateway writes it."""
        story = Story(name="t", spec=self.spec.model_dump(mode="json"), state="succeeded")
        return ExportRequest(
            job=JOB, version=VersionId(0, number), format=format, origin=origin, story=story, **more
        )


def _sample(ids: Sequence[int], name: str, advantage: float = 0.0, first: int = FIRST) -> Sample:
    scored = len(ids) - first
    return Sample(
        trajectory=name,
        tokens=array("i", ids),
        positions=array("i", range(first, len(ids))),
        behaviour=array("f", [-3.0] * scored),
        loss_mask=bytes([1] * scored),
        advantage=advantage,
        temperature=1.0,
    )


def _samples(number: int) -> list[Sample]:
    """Four trajectories of an update, with advantages that move the weights."""
    return [
        _sample(
            [1, *(3 + (7 * number + 5 * i + j) % 90 for j in range(12))], f"{number}-{i}", 1.0 - (i % 2) * 2
        )
        for i in range(4)
    ]


def load(folder: Path) -> Any:
    """The export as a stranger loads it, in FP32 arithmetic."""
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return model.eval()


@torch.no_grad()
def logprobs(model: Any, ids: Sequence[int] = IDS, first: int = FIRST) -> list[float]:
    """Log-probs of `ids[first:]` by one plain forward pass."""
    logits_TV = model(torch.tensor([list(ids[:-1])])).logits[0].float()
    scores_TV = torch.log_softmax(logits_TV, dim=-1)
    return [float(scores_TV[p - 1, ids[p]]) for p in range(first, len(ids))]
