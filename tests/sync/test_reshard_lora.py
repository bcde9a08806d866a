"""B A of an adapter's pieces on a rank is that rank's piece of B A, for every kind of weight and both engines."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sharded import RANK, Full, adapted, dimensions, model, rollouts, trainers

from syncline.contract.adapters import tensor_names
from syncline.contract.sharding.grid import BadLayout, Grid
from syncline.contract.sharding.layout import Dimensions, Layout
from syncline.sync.reshard.scatter import BadShards, scatter

Array = np.ndarray[Any, Any]


def adapter(shapes: dict[str, tuple[int, ...]], shared: bool) -> Full:
    """Small random integers, so that products are exact. `shared`: projections of one matrix have the same A."""
    random = np.random.default_rng(7)
    full = {name: random.integers(-9, 10, shape) for name, shape in adapted(shapes).items()}
    for name in list(full) if shared else ():
        for first, others in (("q_proj", ("k_proj", "v_proj")), ("gate_proj", ("up_proj",))):
            for other in others if name.endswith(f"{first}.lora_A.weight") else ():
                if (partner := name.replace(first, other)) in full:
                    full[partner] = full[name].copy()
    return full


def weights(full: Full, targets: list[str]) -> Full:
    """B A by the name of the weight that it is added to."""
    return {name: full[tensor_names(name)[1]] @ full[tensor_names(name)[0]] for name in targets}


def interleaved(layout: Layout, held: Full, module: str) -> Array:
    """Separate adapters on Megatron's linear_qkv: this rank's q, k and v rows, query group by query group."""
    q, k, v = (
        held[f"{module}.{x}_proj.lora_B.weight"] @ held[f"{module}.{x}_proj.lora_A.weight"] for x in "qkv"
    )
    groups = layout.model.kv_heads // layout.grid.tp
    split = [np.split(x, groups) for x in (q, k, v)]
    return np.concatenate([rows for group in zip(*split, strict=True) for rows in group])


def trainer_delta(layout: Layout, held: Full, name: str) -> Array:
    """What the trainer's parameter `name` is changed by on this rank."""
    module, _, expert = name.partition(".weight")
    if f"{module}.lora_A.weight{expert}" in held:
        return held[f"{module}.lora_B.weight{expert}"] @ held[f"{module}.lora_A.weight{expert}"]
    if "linear_qkv" in name:
        return interleaved(layout, held, module)
    parts = [p for p in ("gate_proj", "up_proj", "w1", "w3") if f"{module}.{p}.lora_A.weight{expert}" in held]
    assert len(parts) == 2
    return np.concatenate(
        [
            held[f"{module}.{p}.lora_B.weight{expert}"] @ held[f"{module}.{p}.lora_A.weight{expert}"]
            for p in parts
        ]
    )


def rollout_delta(layout: Layout, held: Full, name: str) -> Array:
    """SGLang's: the A and the B of the projections of one matrix lie above one another."""
    module = name.removesuffix("_weight").removesuffix(".weight")
    a, b = held[f"{module}.lora_A.weight"], held[f"{module}.lora_B.weight"]
    count = a.shape[-2] // RANK
    rows = [b.shape[-2] // count] * count
    if "qkv_proj" in name:
        heads, kv = layout.model.heads // layout.grid.tp, max(layout.model.kv_heads // layout.grid.tp, 1)
        each = b.shape[-2] // (heads + 2 * kv)
        rows = [heads * each, kv * each, kv * each]
    elif "fused_qkv_a" in name:
        rows = [12, 12]
    ends = np.cumsum([0, *rows])
    return np.concatenate(
        [b[..., ends[i] : ends[i + 1], :] @ a[..., i * RANK : (i + 1) * RANK, :] for i in range(count)],
        axis=-2,
    )


@given(data=st.data())
@settings(max_examples=120, deadline=None)
def test_merged_pieces_are_the_pieces_of_the_merged(data: st.DataObject) -> None:
    dims = data.draw(dimensions())
    layout = data.draw(st.one_of(trainers(dims), rollouts(dims)))
    shapes = model(dims, latent_q=data.draw(st.booleans()))
    targets = [name for name in shapes if tensor_names(name)[0] in adapted(shapes)]
    full = adapter(shapes, shared=layout.adapters == "shared" and layout.engine != "sglang")
    deltas = scatter(weights(full, targets), layout)
    pieces = scatter(full, layout)
    merge = rollout_delta if layout.engine == "sglang" else trainer_delta
    checked = 0
    for rank, held in deltas.items():
        for name, expected in held.items():
            at_head = dims.tied and name in ("output_layer.weight", "lm_head.weight")
            whole_here = layout.engine == "sglang" and name == "model.embed_tokens.weight"
            if at_head or whole_here:
                continue  # a tied head has none of its own; SGLang holds the embedding's whole on each rank
            np.testing.assert_array_equal(merge(layout, pieces[rank], name), expected, f"{name} on {rank}")
            checked += 1
    assert checked


def test_one_shared_a_has_one_value() -> None:
    """Where the trainer has one A for q, k and v, three different ones cannot come from it."""
    dims = Dimensions(layers=1, heads=4, kv_heads=2)
    full = adapter(model(dims), shared=False)
    layout = Layout(engine="megatron_te", grid=Grid(tp=2, etp=2), model=dims, adapters="shared")
    with pytest.raises(
        BadShards, match=r"q_proj.lora_A.weight and .*k_proj.lora_A.weight differ, and .*linear_qkv.lora_A"
    ):
        scatter(full, layout)


def test_targets_that_make_no_whole_matrix() -> None:
    """An adapter on q and v alone lies by itself, and not in a matrix that is one third of another."""
    dims = Dimensions(layers=1, heads=4, kv_heads=2)
    full = {n: a for n, a in adapter(model(dims), shared=False).items() if "k_proj" not in n}
    grid = Grid(tp=2, etp=2)
    for layout in (
        Layout(engine="sglang", grid=grid, model=dims),
        Layout(engine="megatron_local", grid=grid, model=dims, adapters="shared"),
    ):
        with pytest.raises(
            BadLayout, match=r"q_proj.lora_A.weight: .* without model.layers.0.self_attn.k_proj.lora_A"
        ):
            scatter(full, layout)
    for layout in (
        Layout(engine="sglang", grid=grid, model=dims, fused=False),
        Layout(engine="megatron_local", grid=grid, model=dims),
    ):
        assert any("v_proj.lora_B" in name for name in scatter(full, layout)[1])


def test_separate_adapters_need_a_group_per_rank() -> None:
    """With more ranks than query groups no rank has whole k rows; a shared A and the matrix's own B do."""
    dims = Dimensions(layers=1, heads=4, kv_heads=2)
    layout = Layout(engine="megatron_local", grid=Grid(tp=4, etp=4), model=dims)
    with pytest.raises(
        BadLayout, match=r"k_proj.lora_B.weight: tp 4 does not divide its 2 kv heads; legal: 1, 2$"
    ):
        scatter(adapter(model(dims), shared=True), layout)
