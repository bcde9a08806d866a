"""Warm equals cold, for every format: whatever an engine went through, it scores and samples as a fresh one does.

The engine that is warm has held several versions of one recipe: committed under each in-flight policy with requests
running, after staging that was abandoned or failed, after sleep, and with a version of which most bytes were held
already. The cold one knows nothing but the manifest. Equal means equal: the same floats.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from conformance.forge import JOB, KEY, MODELS, checkpoint
from conformance.model_exports import write_export
from msgspec.structs import replace
from torch import Tensor

from syncline.contract.adapters import adapter_shapes
from syncline.contract.job import ModelSpec
from syncline.contract.precision import PrecisionContract
from syncline.contract.recipes import RECIPES
from syncline.contract.version_path import Minted, SignedManifest, VersionId, VersionRecord, opened
from syncline.rollout.engine import CommitPolicy, Request, Sampling, StageFailed
from syncline.rollout.engines.reference import ReferenceEngine
from syncline.runtime.store import BlobStore
from syncline.sync.publish import Publisher

MODEL_OF = {
    "bf16": "tiny-dense",
    "glm52": "tiny-glm",
    "int4_qat_w4a16": "tiny-dense",
    "lora_frozen_mxfp4": "tiny-kimi",
    "mxfp4_qat_w4a16": "tiny-dense",
    "mxfp8": "tiny-moe",
    "nvfp4_selective": "tiny-moe",
    "nvfp4_w4a4": "tiny-dense",
    "qwen38": "tiny-hybrid",
    "unified_fp8": "tiny-moe",
}
NOT_HERE = {"fp32": "a trainer's recipe: a rollout of FP32 values is not offered"}
BASE = 1  # seed of the frozen base
IDS = (1, *range(5, 30))
DRAIN = CommitPolicy(kind="drain")
OLD = CommitPolicy(kind="continue_old")
RECOMPUTED = CommitPolicy(kind="in_place", kv="recomputed")
CARRIED = CommitPolicy(kind="in_place", kv="carried", carried_age=8)


def bridged(recipe: str) -> PrecisionContract:
    """The recipe with BF16 on the way, quantised by the engine as it loads."""
    contract = RECIPES[recipe]
    return replace(contract, convert=replace(contract.convert, route="bf16_bridge"))


def rank_stable(recipe: str) -> PrecisionContract:
    contract = RECIPES[recipe]
    assert contract.adapter is not None
    return replace(contract, adapter=replace(contract.adapter, rank_stable=True))


CASES = [
    *(pytest.param(model, RECIPES[recipe], id=recipe) for recipe, model in MODEL_OF.items()),
    pytest.param("tiny-dense", bridged("int4_qat_w4a16"), id="int4 through a bridge"),
    pytest.param("tiny-dense", bridged("nvfp4_w4a4"), id="nvfp4 through a bridge"),
    pytest.param("tiny-kimi", rank_stable("lora_frozen_mxfp4"), id="rank-stable adapter"),
]


def test_every_recipe_is_here() -> None:
    assert MODEL_OF.keys() | NOT_HERE.keys() == RECIPES.keys()


class Trainer:
    """Mints versions of a recipe as a trainer does, and has sync's publisher convert and sign them."""

    def __init__(self, run: Path, model: str, contract: PrecisionContract) -> None:
        self.run, self.model, self.contract = run, model, contract
        self.store = BlobStore(run / "store")
        self._publisher = Publisher(JOB, run, KEY, contract, self.store)

    def publish(self, number: int, seed: int) -> SignedManifest:
        version = VersionId(0, number)
        alone = self.contract.adapter is not None and number > 0
        files = write_export(self.run / "export" / str(version), self.model, self._tensors(seed, alone))
        minted = Minted(
            job=JOB,
            version=version,
            parent=None,
            optimizer_step=number,
            contract=self.contract.digest(),
            artefact=f"export/{version}",
            files=files,
            canaries=(),
            traceparent="",
            minted_at=1.0,
            base=VersionId(0, 0) if alone else None,
        )
        record = VersionRecord(
            version=version, parent=None, optimizer_step=number, contract="", state="minted"
        )
        self._publisher.publish(minted, record)
        return self.store.read_manifest(version)

    def _tensors(self, seed: int, alone: bool) -> dict[str, Tensor]:
        adapter = self.contract.adapter
        tensors = dict(checkpoint(MODELS / self.model, seed if adapter is None else BASE))
        if adapter is None:
            return tensors
        generator = torch.Generator().manual_seed(seed)
        made = {
            name: torch.empty(shape).normal_(0, 0.1, generator=generator).bfloat16()
            for name, shape in adapter_shapes(
                adapter, {n: tuple(t.shape) for n, t in tensors.items()}
            ).items()
        }
        return made if alone else {**tensors, **made}


class Pair:
    """A warm engine, and what a cold one says of the same version."""

    def __init__(self, run: Path, model: str, contract: PrecisionContract) -> None:
        self.trainer = Trainer(run, model, contract)
        self.model, self.contract = model, contract
        self.warm = self.fresh()
        self.running = 0
        self.seen: list[tuple[float, ...]] = []
        self._cold = functools.cache(self._made_cold)

    def fresh(self) -> ReferenceEngine:
        return ReferenceEngine(MODELS, ModelSpec(name=self.model), JOB, KEY, 8, contract=self.contract)

    def take(self, signed: SignedManifest, policy: CommitPolicy, running: int = 0) -> None:
        """Commit a version under requests that run, let them end, and compare."""
        for _ in range(running):
            self.warm.submit(self.request())
        for _ in range(3 if running else 0):
            self.warm.step()
        self.warm.stage(signed, self.trainer.store)
        done = self.warm.commit(policy)
        while self.warm.running:
            self.warm.step()
            done = done or self.warm.commit(policy)
        assert done is not None
        self.compare(signed)

    def request(self) -> Request:
        self.running += 1
        sampling = Sampling(max_tokens=9, min_tokens=9)
        return Request(
            trajectory=f"r{self.running}", prompt=IDS[:5], seed=(7, self.running), sampling=sampling
        )

    def compare(self, signed: SignedManifest) -> None:
        """Scores, the context as stored included, sampled tokens with log-probs, and what the modules hold."""
        version, digest = opened(signed, KEY).version, opened(signed, KEY).digest()
        assert self.warm.serving == (version, digest)
        scores, sampled, held = self._cold(digest, signed)
        assert said(self.warm) == scores
        assert drawn(self.warm, f"{len(self.seen)}") == sampled
        assert contents(self.warm) == held
        self.seen.append(scores)

    def _made_cold(
        self, digest: str, signed: SignedManifest
    ) -> tuple[tuple[float, ...], list[tuple[int, float]], dict[str, str]]:
        cold = self.fresh()
        cold.stage(signed, self.trainer.store)
        assert cold.commit(DRAIN) is not None
        return said(cold), drawn(cold, "cold"), contents(cold)


def said(engine: ReferenceEngine) -> tuple[float, ...]:
    return engine.score(IDS, 4, buffer="active").logprobs


def drawn(engine: ReferenceEngine, name: str) -> list[tuple[int, float]]:
    sampling = Sampling(max_tokens=6, min_tokens=6)
    engine.submit(Request(trajectory=name, prompt=IDS[:7], seed=(3,), sampling=sampling))
    chunks = []
    while engine.running:
        chunks += engine.step()
    return [pair for c in chunks for pair in zip(c.tokens, c.logprobs, strict=True)]


def contents(engine: ReferenceEngine) -> dict[str, str]:
    """Name -> digest of every byte that the modules hold."""
    weights = engine._active()
    assert weights is not None
    held = {**weights.packed.views, **weights.packed.slots}
    return {
        name: hashlib.sha256(t.contiguous().reshape(-1).view(torch.uint8).numpy().data).hexdigest()
        for name, t in held.items()
    }


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Sums in one order."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(("model", "contract"), CASES)
def test_warm_equals_cold(model: str, contract: PrecisionContract, tmp_path: Path) -> None:
    pair = Pair(tmp_path, model, contract)
    publish, warm = pair.trainer.publish, pair.warm
    pair.take(publish(0, 0), DRAIN)
    pair.take(publish(1, 1), DRAIN)
    pair.take(publish(2, 2), RECOMPUTED, running=2)
    pair.take(publish(3, 3), CARRIED, running=2)
    pair.take(publish(4, 4), OLD, running=2)
    # what was staged and given up leaves nothing behind, and neither does what could not be staged
    warm.stage(publish(5, 5), pair.trainer.store)
    warm.abort_stage()
    last = publish(6, 6)
    damaged = damage(pair.trainer.store, last, opened(pair.trainer.store.read_manifest(VersionId(0, 4)), KEY))
    with pytest.raises(StageFailed, match="tensor "):
        warm.stage(last, pair.trainer.store)
    pair.compare(pair.trainer.store.read_manifest(VersionId(0, 4)))
    mend(damaged)
    pair.take(last, DRAIN)
    warm.sleep()
    assert warm.wake(pair.trainer.store) == VersionId(0, 6)
    pair.compare(last)
    pair.take(publish(7, 4), CARRIED, running=2)  # the weights of 4 again
    assert pair.seen[-1] == pair.seen[4]
    assert len(set(pair.seen)) == 6, "some versions look alike"


def damage(store: BlobStore, signed: SignedManifest, before: object) -> Path:
    """Flip a bit in the last blob of a version that the version before does not name."""
    kept = {entry.digest for entry in before.tensors}  # type: ignore[attr-defined]
    entry = [entry for entry in opened(signed, KEY).tensors if entry.digest not in kept][-1]
    return mend(store.path(entry.digest))


def mend(path: Path) -> Path:
    """The same bit again."""
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 0x10
    path.chmod(0o644)
    path.write_bytes(raw)
    return path
