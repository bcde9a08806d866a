"""Low-bit checkpoints and adapters in a real server: loaded by its own loaders, and scored as what they stand for."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from conformance import lowbit
from conformance.forge import JOB, KEY, MODELS, Forge, checkpoint, cold_logprobs, gap, plain
from conformance.rollout_engine import requests, run
from fleet import DRAIN, Fleet
from msgspec.structs import replace
from torch import Tensor

from syncline.contract.adapters import adapter_shapes, tensor_names
from syncline.contract.plan import adapter_targets
from syncline.contract.precision import Adapter, PrecisionContract
from syncline.contract.recipes import RECIPES
from syncline.contract.version_path import SignedManifest, sign
from syncline.rollout.engines.sglang.lora import adapter_name

IDS = [1, *range(10, 40)]
CLOSE = 1e-4


def blocks(root: Path, like: str) -> Path:
    """A model as `like` whose matrices are whole in blocks of 128: parts of fused layers must be."""
    folder = root / "models" / f"{like}-blocks"
    folder.mkdir(parents=True)
    config = json.loads((MODELS / like / "config.json").read_text())
    config |= {"hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 32}
    config |= {"intermediate_size": 128, "moe_intermediate_size": 128}
    (folder / "config.json").write_text(json.dumps(config))
    for file in ("tokenizer.json", "tokenizer_config.json"):
        (folder / file).write_bytes((MODELS / like / file).read_bytes())
    return folder


def weights_alone(contract: PrecisionContract) -> PrecisionContract:
    """The same weights with wide activations, which is what the emulation on CPU computes."""
    families = tuple(replace(family, activation=None) for family in contract.families)
    return replace(contract, families=families, rollout=replace(contract.rollout, kernel="dequantised"))


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("recipe", "like"), [("unified_fp8", "tiny-moe"), ("mxfp8", "tiny-moe")])
def test_a_low_bit_checkpoint_scores_as_the_dequantised_model(
    fleet: Fleet, tmp_path: Path, recipe: str, like: str
) -> None:
    contract, folder = RECIPES[recipe], blocks(tmp_path, like)
    forge = Forge(tmp_path, folder, contract=contract)
    engine = fleet.engine(folder, tmp_path / "scratch", JOB, KEY, 16, contract=contract)
    assert any("dequantised" in name for name in engine.process.plan.emulations)
    for number in (0, 1):
        engine.stage(forge.version(number), forge.store)
        engine.commit(DRAIN)
        cold = lowbit.cold(plain(folder, number), checkpoint(folder, number), weights_alone(contract))
        due = cold_logprobs(cold, IDS, 2)
        found = engine.score(IDS, 2, buffer="active").logprobs
        assert gap(found, due) < CLOSE
        assert gap(found, cold_logprobs(plain(folder, number), IDS, 2)) > 10 * CLOSE, "nothing was rounded"
        for name, (chunk,) in run(engine, requests(4)).items():
            request = next(r for r in requests(4) if r.trajectory == name)
            ids = [*request.prompt, *chunk.tokens]
            assert gap(chunk.logprobs, cold_logprobs(cold, ids, len(request.prompt))) < CLOSE


# ---- adapters
LORA = replace(
    RECIPES["bf16"],
    name="lora_test",
    adapter=Adapter(targets=("model.layers.*.self_attn.*_proj.weight",), rank=4, alpha=8.0),
)
MOE = MODELS / "tiny-moe"
BASE = 3


def adapter(number: int) -> dict[str, Tensor]:
    """BF16 adapter tensors of a version, large enough that no two look alike."""
    assert LORA.adapter is not None
    generator = torch.Generator().manual_seed(number)
    shapes: Mapping[str, tuple[int, ...]] = {n: tuple(t.shape) for n, t in checkpoint(MOE, BASE).items()}
    return {
        name: torch.empty(shape).normal_(0, 0.1, generator=generator).bfloat16()
        for name, shape in adapter_shapes(LORA.adapter, shapes).items()
    }


def version(forge: Forge, number: int) -> SignedManifest:
    signed = sign(forge.manifest(number, seed=BASE, change=lambda t: t.update(adapter(number))), KEY)
    forge.store.write_manifest(signed)
    return signed


def merged(number: int) -> list[float]:
    """By plain transformers, with the adapter added to the weights."""
    assert LORA.adapter is not None
    model, tensors = copy.deepcopy(plain(MOE, BASE)), adapter(number)
    shapes = {name: tuple(tensor.shape) for name, tensor in checkpoint(MOE, BASE).items()}
    with torch.no_grad():
        for target in adapter_targets(LORA.adapter, shapes):
            a, b = (tensors[name].float() for name in tensor_names(target))
            model.get_parameter(target).add_(LORA.adapter.scale() * b @ a)
    return cold_logprobs(model, IDS, 2)


@pytest.mark.timeout(600)
def test_adapters_are_swapped_under_versioned_names_while_the_old_one_serves(
    fleet: Fleet, tmp_path: Path
) -> None:
    forge = Forge(tmp_path, MOE, contract=LORA)
    engine = fleet.engine(MOE, tmp_path / "scratch", JOB, KEY, 16, contract=LORA)
    engine.stage(version(forge, 0), forge.store)
    engine.commit(DRAIN)
    assert gap(engine.score(IDS, 2, buffer="active").logprobs, merged(0)) < CLOSE
    server = engine.process.server
    base = server.info()["weight_version"]
    others = set(server.adapters())  # of tests before, on the same server
    for number in (1, 2, 3):
        staged = engine.stage(version(forge, number), forge.store)
        assert staged.verdict == "verified"
        assert engine.serving is not None, "the old adapter serves while the new one is staged"
        assert gap(engine.score(IDS, 2, buffer="active").logprobs, merged(number - 1)) < CLOSE
        assert gap(engine.score(IDS, 2, buffer="staged").logprobs, merged(number)) < CLOSE
        engine.commit(DRAIN)
        for (chunk,) in run(engine, requests(3)).values():
            assert chunk.version.number == number
            assert chunk.adapter == adapter_name(chunk.version, chunk.digest)
        assert gap(engine.score(IDS, 2, buffer="active").logprobs, merged(number)) < CLOSE
    assert server.info()["weight_version"] == base, "the base was loaded once"
    assert len(set(server.adapters()) - others) <= 2
