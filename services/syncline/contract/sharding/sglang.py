"""Which parameters SGLang has on a rank, and what they are made of.

Source: SGLang 0.5.23, `layers/linear.py` (QKVParallelLinear: a KV head is on tp / heads neighbours where tp is larger),
`layers/vocab_parallel_embedding.py`, `layers/moe/fused_moe_triton/layer.py` (tp = ep x etp), `models/deepseek_v2.py`,
`lora/layers.py` (an adapter on the embedding is whole on each rank). What a quantisation method permutes after loading
is not described here.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from syncline.contract.sharding.layout import Layout, Rule
from syncline.contract.sharding.megatron import EMBEDDING, HEAD, INDEXER, LAYER, NORM, ROUTED, SHARED


def sglang(layout: Layout) -> Iterator[Rule]:
    """The rules of `layout`'s base weights."""
    for rule in _rules(layout):
        if layout.fused:
            yield rule
        else:
            yield from singles(rule)


def _rules(layout: Layout) -> Iterator[Rule]:
    yield Rule(name=EMBEDDING, sources=(EMBEDDING,), over="tp", pad=True, held="first", adapter="whole")
    yield Rule(name=NORM, sources=(NORM,), held="last")
    if not layout.model.tied or layout.grid.pp > 1:
        # an adapter on a tied embedding is the embedding's alone
        tied = layout.model.tied
        head = EMBEDDING if tied else HEAD
        yield Rule(
            name=HEAD, sources=(head,), over="tp", pad=True, held="last", adapter="none" if tied else "cut"
        )
    for norm in ("input_layernorm", "post_attention_layernorm"):
        yield _whole(f"{norm}.weight")
    yield from _latent() if layout.model.latent else _heads()
    yield _row("self_attn.o_proj", "heads")
    yield _whole("self_attn.o_proj.bias")
    for mlp in ("mlp", *SHARED):
        yield _column(f"{mlp}.gate_up_proj.weight", f"{mlp}.gate_proj.weight", f"{mlp}.up_proj.weight")
        yield _row(f"{mlp}.down_proj", "")
    yield _whole("mlp.shared_expert_gate.weight")
    for block, gate, up, down in ROUTED:
        yield _whole(f"{block}.gate.weight")
        yield _whole(f"{block}.gate.e_score_correction_bias")
        expert = block + ".experts.{expert}."
        w13 = _column(f"{block}.experts.w13_weight", f"{expert}{gate}.weight", f"{expert}{up}.weight")
        yield msgspec.structs.replace(w13, over="etp", stacked=True)
        w2 = _row(f"{expert}{down}", "")
        yield msgspec.structs.replace(w2, name=f"{LAYER}{block}.experts.w2_weight", over="etp", stacked=True)


def _heads() -> Iterator[Rule]:
    for leaf in ("weight", "bias"):
        qkv = _column(
            f"self_attn.qkv_proj.{leaf}",
            *(f"self_attn.{x}_proj.{leaf}" for x in "qkv"),
        )
        yield msgspec.structs.replace(qkv, units=("heads", "kv_heads", "kv_heads"), replicate=True)
    for x in "qk":
        yield _whole(f"self_attn.{x}_norm.weight")


def _latent() -> Iterator[Rule]:
    down = ("self_attn.q_a_proj.weight", "self_attn.kv_a_proj_with_mqa.weight")
    yield Rule(
        name=f"{LAYER}self_attn.fused_qkv_a_proj_with_mqa.weight",
        sources=tuple(LAYER + source for source in down),
    )
    yield _whole(down[1])  # without a query latent
    for x in ("q", "kv"):
        yield _whole(f"self_attn.{x}_a_layernorm.weight")
    for x in ("q_proj", "q_b_proj", "kv_b_proj"):
        rule = _column(f"self_attn.{x}.weight", f"self_attn.{x}.weight")
        yield msgspec.structs.replace(rule, units=("heads",))
    for name in INDEXER:
        yield _whole(f"self_attn.indexer.{name}")


def _whole(name: str) -> Rule:
    return Rule(name=LAYER + name, sources=(LAYER + name,))


def _column(name: str, *sources: str) -> Rule:
    return Rule(name=LAYER + name, sources=tuple(LAYER + source for source in sources), over="tp")


def _row(module: str, unit: str) -> Rule:
    name = f"{LAYER}{module}.weight"
    return Rule(name=name, sources=(name,), axis=1, over="tp", units=("heads",) if unit else ())


def singles(rule: Rule) -> Iterator[Rule]:
    """`rule` for each of its sources by itself, under the checkpoint's name."""
    for at, source in enumerate(rule.sources):
        units = rule.units[at : at + 1]
        name = rule.name if rule.name == HEAD else source
        yield msgspec.structs.replace(
            rule, name=name, sources=(source,), units=units, join="parts", stacked=False
        )
