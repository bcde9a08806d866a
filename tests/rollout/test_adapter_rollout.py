"""Adapter versions in the rollout engine: their scores, what is copied and proven, one version per trajectory."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
from conformance.forge import JOB, KEY, MODELS, Forge, checkpoint, cold_logprobs, family_folder, gap
from torch import Tensor

from syncline.contract.adapters import adapter_shapes, is_adapter, tensor_names
from syncline.contract.job import ModelSpec
from syncline.contract.plan import adapter_targets
from syncline.contract.recipes import RECIPES
from syncline.contract.version_path import SignedManifest, VersionId, VersionManifest, loaded_digest, sign
from syncline.rollout.engine import Chunk, CommitPolicy, Request, Sampling, StageFailed
from syncline.rollout.engines.reference import ReferenceEngine
from syncline.rollout.spans import fold

K3 = RECIPES["lora_frozen_mxfp4"]
MODEL = "tiny-kimi"
BASE = 1  # seed of the one base
IDS = [1, *range(5, 30)]
DRAIN = CommitPolicy(kind="drain")
Q = "model.layers.1.self_attn.q_proj"


def shapes() -> Mapping[str, tuple[int, ...]]:
    return {name: tuple(t.shape) for name, t in checkpoint(MODELS / MODEL, BASE).items()}


def adapter(number: int) -> dict[str, Tensor]:
    """BF16 adapter tensors of a version, large enough that no two versions look alike."""
    assert K3.adapter is not None
    generator = torch.Generator().manual_seed(number)
    return {
        name: torch.empty(shape).normal_(0, 0.1, generator=generator).bfloat16()
        for name, shape in adapter_shapes(K3.adapter, shapes()).items()
    }


class World:
    """One engine, and versions of an adapter over one base."""

    def __init__(self, tmp: Path) -> None:
        self.forge = Forge(tmp, family_folder(MODEL, tmp), contract=K3)
        self.engine = self.fresh()

    def fresh(self) -> ReferenceEngine:
        return ReferenceEngine(
            self.forge.folder.parent, ModelSpec(name=self.forge.folder.name), JOB, KEY, 8, contract=K3
        )

    def manifest(
        self, number: int, change: Callable[[dict[str, Tensor]], object] = lambda tensors: None
    ) -> VersionManifest:
        def add(tensors: dict[str, Tensor]) -> None:
            tensors.update(adapter(number))
            change(tensors)

        return self.forge.manifest(number, seed=BASE, change=add)

    def version(self, number: int) -> SignedManifest:
        signed = sign(self.manifest(number), KEY)
        self.forge.store.write_manifest(signed)
        return signed

    def serve(self, number: int) -> None:
        self.engine.stage(self.version(number), self.forge.store)
        assert self.engine.commit(DRAIN) is not None

    def scores(self, engine: ReferenceEngine | None = None) -> tuple[float, ...]:
        return tuple((engine or self.engine).score(IDS, 4, buffer="active").logprobs)

    def cold(self, number: int) -> list[float]:
        """By plain transformers, with the values that the base's codes stand for and the adapter merged."""
        assert K3.adapter is not None
        model, tensors = copy.deepcopy(self.forge.cold(BASE)), adapter(number)
        with torch.no_grad():
            for target in adapter_targets(K3.adapter, shapes()):
                a, b = (tensors[name].float() for name in tensor_names(target))
                model.get_parameter(target).add_(K3.adapter.scale() * b @ a)
        return cold_logprobs(model, IDS, 4)


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


def test_scores_are_those_of_merged_weights_and_warm_equals_cold(world: World) -> None:
    seen = []
    for number in range(3):
        world.serve(number)
        seen.append(world.scores())
        assert gap(seen[-1], world.cold(number)) < 1e-4
        fresh = world.fresh()
        fresh.stage(world.forge.store.read_manifest(VersionId(0, number)), world.forge.store)
        fresh.commit(DRAIN)
        assert world.scores(fresh) == seen[-1]
    assert min(gap(seen[0], seen[1]), gap(seen[1], seen[2])) > 1e-2


def test_a_base_that_is_held_is_hashed_and_not_copied(world: World) -> None:
    for number in range(4):
        world.serve(number)
    weights = world.engine._active()
    assert weights is not None
    assert weights.copied == 2 * sum(t.numel() for t in adapter(3).values())
    name = "model.layers.2.self_attn.o_proj.weight"
    broken = next(name for name in weights.packed.slots if "experts.3.w2.weight_packed" in name)
    world.serve(4)
    with torch.no_grad():  # what is the spare buffer by now
        weights.packed.views[name][0, 0] += 1
        weights.packed.slots[broken].view(-1)[0] ^= 1
    signed = world.version(5)
    staged = world.engine.stage(signed, world.forge.store)
    entries = world.manifest(5).tensors
    assert staged.loaded_digest == loaded_digest(entries)
    sizes = {t.name: t.nbytes for t in entries}
    changed = [*adapter(5), name, broken]
    assert weights.copied == sum(sizes[one] for one in changed)


def test_no_trajectory_sees_two_adapters_and_each_span_names_its_own(world: World) -> None:
    world.serve(0)
    engine, chunks = world.engine, dict[str, list[Chunk]]()

    def submit(name: str) -> None:
        chunks[name] = []
        sampling = Sampling(max_tokens=12, min_tokens=12)
        engine.submit(Request(trajectory=name, prompt=(1, 7, 9), seed=(1, len(chunks)), sampling=sampling))

    def step() -> None:
        for chunk in engine.step():
            chunks[chunk.trajectory].append(chunk)

    def finish() -> None:
        while engine.running:
            step()

    for name in ("a", "b"):
        submit(name)
    for _ in range(4):
        step()
    engine.stage(world.version(1), world.forge.store)
    done = [engine.commit(DRAIN)]
    assert engine.room == 0
    finish()
    done.append(engine.commit(DRAIN))
    assert [committed is None for committed in done] == [True, False]
    submit("c")
    finish()
    spans = {name: fold(told, "w0").spans for name, told in chunks.items()}
    named = {name: [(s.version.number, s.adapter) for s in of] for name, of in spans.items()}
    first, second = (0, "lora_frozen_mxfp4@0.0"), (1, "lora_frozen_mxfp4@0.1")
    assert named == {"a": [first], "b": [first], "c": [second]}


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda t: t.pop(f"{Q}.lora_A.weight"), f"tensor {Q}.lora_A.weight is missing"),
        (lambda t: t.pop(f"{Q}.lora_B.weight"), f"tensor {Q}.lora_B.weight is missing"),
        (
            lambda t: t.update({"model.layers.1.mlp.lora_A.weight": torch.zeros(8, 64).bfloat16()}),
            "tensor model.layers.1.mlp.lora_A.weight is not part of the model",
        ),
        (
            lambda t: t.update({f"{Q}.lora_A.weight": torch.zeros(4, 64).bfloat16()}),
            rf"tensor {Q}.lora_A.weight has shape \[4, 64\]",
        ),
        (
            lambda t: t.update({f"{Q}.lora_B.weight": torch.zeros(64, 8).to(torch.uint8)}),
            f"tensor {Q}.lora_B.weight has dtype U8",
        ),
    ],
    ids=["no A", "no B", "extra", "rank", "dtype"],
)
def test_a_manifest_of_another_adapter_is_refused_by_tensor(
    world: World, change: Callable[[dict[str, Tensor]], object], says: str
) -> None:
    world.serve(0)
    before = world.scores()
    with pytest.raises(StageFailed, match=says):
        world.engine.stage(sign(world.manifest(1, change), KEY), world.forge.store)
    assert world.scores() == before


def test_a_base_alone_is_refused_where_an_adapter_belongs(world: World) -> None:
    with pytest.raises(StageFailed, match=r"lora_A\.weight is missing"):
        world.engine.stage(sign(world.forge.manifest(0, seed=BASE), KEY), world.forge.store)


def test_the_trace_counts_the_adapter_apart(world: World) -> None:
    world.serve(0)
    world.scores()
    trace = world.engine.trace("active")
    uses = {use.family: use for use in trace.uses}
    assert uses["adapter"].tensors == len(adapter(0)) == 28
    assert uses[""].tensors == len([n for n in world.manifest(0).tensors if not _low(n.name)]) - 28
    assert uses["experts"].encoded.startswith("E2M1")
    assert trace.bytes["adapter"] == 4 * sum(t.numel() for t in adapter(0).values())
    held = world.engine._active()
    assert held is not None
    assert sum(trace.bytes[kind] for kind in ("wide", "adapter", "codes", "scales")) == sum(
        held.packed.nbytes().values()
    )
    assert all(is_adapter(name) for name in adapter(0))


def _low(name: str) -> bool:
    return name.endswith(("_packed", "_scale"))
