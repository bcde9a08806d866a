"""What a quantised context is made of: E4M3 codes and FP32 scales and nothing wide, copied and never requantised.

Legend: N contexts, H heads, T tokens, D width.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from conformance.forge import FAMILIES, JOB, KEY, MODELS, Forge, family_folder, plain, rounded_vectors
from conformance.rollout_engine import DRAIN, requests, run

from syncline.contract.job import ModelSpec
from syncline.contract.schemes import KV_QUANTISED, KvFormat
from syncline.numerics.quantized import NotQuantizable
from syncline.rollout.engines.kv import (
    CacheBytes,
    QuantisedLayer,
    decode,
    encode,
    growing_cache,
    stored_of,
)
from syncline.rollout.engines.reference import ReferenceEngine
from syncline.rollout.engines.slots import ColumnLayer, SlotCache
from syncline.rollout.engines.states import StateLayer


def engine(forge: Forge, kv: KvFormat) -> ReferenceEngine:
    made = ReferenceEngine(forge.folder.parent, ModelSpec(name=forge.folder.name), JOB, KEY, 16, kv=kv)
    made.stage(forge.version(0), forge.store)
    assert made.commit(DRAIN) is not None
    return made


@torch.inference_mode()
def prefilled(model: Any, contexts: int, length: int, seed: int = 0) -> Any:
    """A quantised cache of `contexts` random contexts."""
    cache = growing_cache(model.config, "fp8_e4m3")
    ids = torch.randint(4, 100, (contexts, length), generator=torch.Generator().manual_seed(seed))
    model(input_ids=ids, cache=cache, use_cache=True, logits_to_keep=1)
    return cache


def raw(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)


@pytest.mark.parametrize("family", FAMILIES)
def test_slots_hold_codes_and_scales_and_the_bytes_say_so(tmp_path: Path, family: str) -> None:
    forge = Forge(tmp_path, MODELS / family)
    narrow, wide = engine(forge, "fp8_e4m3"), engine(forge, "wide")
    for each in (narrow, wide):
        run(each, requests(16))
    found, before = narrow.cache_bytes(), wide.cache_bytes()
    states = vectors = values = 0
    layers = narrow._lanes[0]._cache.slot_layers
    for layer in layers:
        if isinstance(layer, StateLayer):
            assert {buffer.dtype for buffer in layer.buffers.values()} == {torch.float32}
            states += sum(buffer.numel() * 4 for buffer in layer.buffers.values())
            continue
        expected = {"keys", "values"} | ({"indexer_keys"} if family == "tiny-glm" else set())
        assert set(layer.buffers) == expected | {f"{name}.scale" for name in expected}
        for name in expected:
            codes, scale = layer.buffers[name], layer.buffers[f"{name}.scale"]
            assert (codes.dtype, scale.dtype) == (torch.float8_e4m3fn, torch.float32)
            assert scale.shape == (*codes.shape[:-1], 1)
            values, vectors = values + codes.numel(), vectors + scale.numel()
    assert found == CacheBytes(codes=values, scales=4 * vectors, wide=states)
    assert before == CacheBytes(wide=4 * values + states)
    assert any(isinstance(layer, StateLayer) for layer in layers) == (family in ("tiny-hybrid", "tiny-kimi"))


@pytest.mark.parametrize("family", [*FAMILIES, "gpt-oss"])
def test_a_prefilled_context_comes_to_its_slot_bit_by_bit_and_stays_so(tmp_path: Path, family: str) -> None:
    """Placed, shifted by a longer one, moved over another row and grown: the bytes are those of prefill."""
    model = plain(family_folder(family, tmp_path), 0)
    first, longer = prefilled(model, 3, 9), prefilled(model, 2, 70, seed=1)
    slots = SlotCache(model.config, "fp8_e4m3")
    slots.place(torch.arange(3), first, torch.tensor([2, 0, 1]), 9)
    slots.set_rows(3, 9)
    same(slots, first, row=0, index=2, length=9)
    slots.place(torch.arange(3, 5), longer, torch.arange(2), 70)
    slots.set_rows(5, 70)
    slots.move(4, 1)
    slots.set_rows(4, 70)
    for row, source, index, length in (
        (0, first, 2, 9),
        (1, longer, 1, 70),
        (2, first, 1, 9),
        (3, longer, 0, 70),
    ):
        same(slots, source, row, index, length)


def same(slots: SlotCache, source: Any, row: int, index: int, length: int) -> None:
    compared = 0
    for own, prefill in zip(slots.slot_layers, source.layers, strict=True):
        if not isinstance(own, ColumnLayer):
            continue
        for name, tensor in stored_of(prefill).items():
            kept = min(length, tensor.shape[-2])
            placed = own.live[name][row].narrow(-2, slots.geometry.column - kept, kept)
            assert torch.equal(raw(placed), raw(tensor[index])), name
            compared += placed.numel()
    assert compared


def test_values_are_one_scale_per_vector_times_the_nearest_code() -> None:
    vectors = torch.randn(2, 3, 5, 16, generator=torch.Generator().manual_seed(0)) * 3
    vectors[0, 0, 0] = 0
    vectors[1, 2, 4] *= 1e-30
    stored = encode("keys", vectors, "layer 0")
    values = decode("keys", stored, torch.float32)
    assert torch.equal(values, rounded_vectors(vectors))
    assert stored["keys.scale"][0, 0, 0] == 1
    assert not values[0, 0, 0].any()
    largest = vectors.abs().amax(-1, keepdim=True)
    assert ((values - vectors).abs() <= largest / 448 * 16).all(), "half a step of the topmost binade is 16"
    assert not torch.equal(values, vectors)


def test_a_value_that_is_not_finite_is_refused_by_layer_and_index() -> None:
    layer = QuantisedLayer("fp8_e4m3", "layer 7", None)
    good, bad = torch.ones(1, 2, 3, 4), torch.ones(1, 2, 3, 4)
    bad[0, 1, 0, 2] = float("inf")
    with pytest.raises(NotQuantizable, match="values of layer 7 is inf at flat index 14"):
        layer.update(good, bad)


def test_a_sliding_layer_keeps_its_window_and_shows_what_transformers_expects() -> None:
    layer = QuantisedLayer("fp8_e4m3", "layer 0", 4)
    whole = torch.randn(1, 1, 9, 8, generator=torch.Generator().manual_seed(0))
    for start, end, shown in ((0, 2, 2), (2, 7, 7), (7, 9, 5)):
        assert layer.get_mask_sizes(end - start) == (shown, end - shown)
        keys, values = layer.update(whole[..., start:end, :], -whole[..., start:end, :])
        assert torch.equal(keys, rounded_vectors(whole)[..., end - shown : end, :])
        assert torch.equal(values, -keys)
        assert layer.get_seq_length() == end
        assert layer.stored["keys"].shape[-2] == min(end, 3)


def test_which_tensors_are_quantised_is_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    forge = Forge(tmp_path, MODELS / "tiny-glm")
    ids = [1, *range(10, 60)]
    everything = engine(forge, "fp8_e4m3").score(ids, 2, buffer="active").logprobs
    monkeypatch.setitem(KV_QUANTISED, "fp8_e4m3", frozenset({"keys", "values"}))
    partly = engine(forge, "fp8_e4m3")
    run(partly, requests(4))
    for layer in partly._lanes[0]._cache.slot_layers:
        assert layer.buffers["indexer_keys"].dtype == torch.float32  # type: ignore[index]
        assert "indexer_keys.scale" not in layer.buffers
        assert layer.buffers["keys"].dtype == torch.float8_e4m3fn  # type: ignore[index]
    assert partly.score(ids, 2, buffer="active").logprobs != everything
