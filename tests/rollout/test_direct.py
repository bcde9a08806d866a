"""The direct decode step is the library's, for each family that it knows; every other model it leaves as it is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conformance.forge import MODELS, family_folder
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache, LlamaConfig, PreTrainedModel, Qwen3MoeConfig

from syncline.contract.recipes import RECIPES
from syncline.reference.adapter import attach
from syncline.reference.model import empty_model, model_folder
from syncline.reference.routes import RouteTap
from syncline.reference.state import compute_in_bf16, named_windows, state_plan
from syncline.rollout.engines.direct import direct_of
from syncline.rollout.engines.slots import SlotCache

SIZES: dict[str, Any] = {
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_hidden_layers": 3,
    "initializer_range": 0.1,
}
MIXED: dict[str, Any] = {
    "num_key_value_heads": 2,
    "head_dim": 16,
    "moe_intermediate_size": 32,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "mlp_only_layers": [1],
}
SLOW_ROTATION = {
    "rope_type": "llama3",
    "rope_theta": 100.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
CONFIGS = {
    "llama, a head of keys each": LlamaConfig(**SIZES, num_key_value_heads=4),
    "llama, slower rotations": LlamaConfig(**SIZES, num_key_value_heads=1, rope_parameters=SLOW_ROTATION),
    "moe, shares normalised": Qwen3MoeConfig(**SIZES, **MIXED, norm_topk_prob=True),
    "moe, shares as they are": Qwen3MoeConfig(**SIZES, **MIXED, norm_topk_prob=False),
    "moe, many experts": Qwen3MoeConfig(**SIZES, **{**MIXED, "num_experts": 12}, norm_topk_prob=True),
}


def built(name: str) -> PreTrainedModel:
    """The architecture of `name` with undefined weights."""
    model: PreTrainedModel = AutoModelForCausalLM.from_config(CONFIGS[name])  # type: ignore[no-untyped-call]
    model.train(False)
    return model


def filled(model: PreTrainedModel) -> PreTrainedModel:
    """The same random values by name, wherever they lie."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for _, tensor in sorted(named_windows(model, state_plan(model)).items()):
            tensor.copy_(torch.empty(tensor.shape).normal_(0, 0.3, generator=generator))
    return model.requires_grad_(False)


def prefilled(model: PreTrainedModel, cache: SlotCache, lengths: list[int]) -> list[Tensor]:
    """Prompts of `lengths` ids in the slots of `cache`, row by row; returns them."""
    prompts = []
    for row, length in enumerate(lengths):
        prompt_1P = torch.arange(3, 3 + length)[None] + row
        own = DynamicCache(config=model.config)
        model(input_ids=prompt_1P, cache=own, use_cache=True)
        cache.place(torch.tensor([row]), own, torch.tensor([0]), length)
        cache.set_rows(row + 1, max(lengths[: row + 1]))
        prompts.append(prompt_1P[0])
    return prompts


@torch.inference_mode()
@pytest.mark.parametrize("name", CONFIGS)
def test_a_step_is_the_library_s(name: str) -> None:
    """Rows of unlike length: two steps after prefill, and the experts of each."""
    with torch.inference_mode(False):
        model = built(name)
        direct = direct_of(model)
        assert direct is not None
        filled(model)
    lengths = [9, 2, 5]
    cache = SlotCache(model.config, across=True)
    assert cache.plain
    told = prefilled(model, cache, lengths)
    tap = RouteTap(model)
    for step in range(2):
        ids_R = torch.tensor([7, 8, 9]) + step
        fed_R = torch.tensor(lengths) + step
        width = max(lengths) + step
        cache.reserve()
        logits_RV, routes = direct.step(ids_R, fed_R, width - fed_R.numpy(), cache, True)
        cache.advance()
        cache.set_rows(len(lengths), width + 1)
        for row in range(len(lengths)):
            told[row] = torch.cat((told[row], ids_R[row : row + 1]))
            with tap.catching(True) as caught:
                plain_V = model(input_ids=told[row][None]).logits[0, -1]
            assert float((logits_RV[row] - plain_V).abs().max()) < 1e-4
            assert plain_V.std() > 0.3, "all logits alike would show nothing"
            assert [ids[row].tolist() for ids in routes] == [ids[-1].tolist() for ids in caught]


@torch.inference_mode()
@pytest.mark.parametrize("name", CONFIGS)
def test_a_prefill_is_the_library_s(name: str) -> None:
    """Logits, keys and values, and experts of three prompts of one length; one token alone as well."""
    with torch.inference_mode(False):
        model = built(name)
        direct = direct_of(model)
        assert direct is not None
        filled(model)
    tap = RouteTap(model)
    for length in (1, 11):
        ids_NP = torch.arange(3 * length).view(3, length) + 3
        own, plain = DynamicCache(config=model.config), DynamicCache(config=model.config)
        logits_NV, routes = direct.prefill(ids_NP, own, True)
        with tap.catching(True) as caught:
            out = model(input_ids=ids_NP, cache=plain, use_cache=True)
        assert float((logits_NV - out.logits[:, -1]).abs().max()) < 1e-4
        assert [ids.tolist() for ids in routes] == [ids.tolist() for ids in caught]
        layers: list[tuple[Any, Any]] = list(zip(own.layers, plain.layers, strict=True))
        for mine, other in layers:
            torch.testing.assert_close(mine.keys, other.keys, rtol=1e-4, atol=1e-4)
            torch.testing.assert_close(mine.values, other.values, rtol=1e-4, atol=1e-4)


def test_weights_are_the_model_s_own() -> None:
    """A tensor written under its name afterwards is what the next step multiplies."""
    model = built("moe, shares normalised")
    direct = direct_of(model)
    assert direct is not None
    filled(model)
    cache = SlotCache(model.config, across=True)
    with torch.inference_mode():
        prefilled(model, cache, [4])
    ids_R, fed_R = torch.tensor([5]), torch.tensor([4])

    def logits() -> Tensor:
        with torch.inference_mode():
            cache.reserve()
            return direct.step(ids_R, fed_R, np.zeros(1, np.int64), cache, False)[0].clone()

    before = logits()
    for name, tensor in named_windows(model, state_plan(model)).items():
        kept = tensor.clone()
        # a scale of a norm's input would be lost in the norm, and one of all router scores changes shares alone
        tensor.copy_(torch.linspace(-1, 1, tensor.numel()).view(tensor.shape))
        unused = name.endswith(
            tuple(f"experts.{e}.{p}_proj.weight" for e in range(4) for p in ("up", "gate", "down"))
        )
        if not unused:  # an expert that the token does not go to
            assert not torch.equal(logits(), before), name
        tensor.copy_(kept)
    assert torch.equal(logits(), before)


def test_other_models_are_left_alone(tmp_path: Path) -> None:
    for family in ("tiny-hybrid", "tiny-kimi", "tiny-glm"):
        assert direct_of(empty_model(model_folder(MODELS, family))) is None
    for family in ("gpt-oss", "gemma3"):
        folder = family_folder(family, tmp_path)
        assert direct_of(empty_model(model_folder(folder.parent, folder.name))) is None
    narrow = empty_model(model_folder(MODELS, "tiny-dense"))
    compute_in_bf16(narrow)
    assert direct_of(narrow) is None
    adapter = RECIPES["lora_frozen_mxfp4"].adapter
    assert adapter is not None
    adapted = empty_model(model_folder(MODELS, "tiny-dense"))
    attach(adapted, state_plan(adapted), adapter, 0)
    assert direct_of(adapted) is None
