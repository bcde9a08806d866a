"""Which parameters Megatron has on a rank, and what they are made of.

Source: megatron-core 0.16.1, `transformer/{attention,mlp,multi_latent_attention,moe/experts}.py` and
`models/gpt/gpt_layer_specs.py`. Transformer Engine layers differ from local ones in names (a norm is part of the
linear layer behind it, experts are numbered weights of one module) and in that MLA's down-projections are not cut.
"""

from __future__ import annotations

from collections.abc import Iterator

from syncline.contract.sharding.layout import Layout, Rule

EMBEDDING, HEAD, NORM = "model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"
LAYER = "model.layers.{layer}."
ROUTED = (("mlp", "gate_proj", "up_proj", "down_proj"), ("block_sparse_moe", "w1", "w3", "w2"))
SHARED = ("mlp.shared_expert", "mlp.shared_experts", "block_sparse_moe.shared_experts")
ROUTERS = tuple(f"{LAYER}{block}.gate.weight" for block, *_ in ROUTED)
INDEXER = ("wq_b.weight", "wk.weight", "k_norm.weight", "k_norm.bias", "weights_proj.weight")
"""Parameters of sparse attention's indexer (GLM-5, DeepSeek-V3.2): whole on every rank of either engine."""
_OUT = "decoder.layers.{layer}."


def megatron(layout: Layout) -> Iterator[Rule]:
    """The rules of `layout`'s base weights."""
    te = layout.engine == "megatron_te"
    yield Rule(
        name="embedding.word_embeddings.weight", sources=(EMBEDDING,), over="tp", pad=True, held="first"
    )
    yield Rule(name="decoder.final_layernorm.weight", sources=(NORM,), held="last")
    if not layout.model.tied or layout.grid.pp > 1:  # a tied head is a parameter of its own on another stage
        # an adapter on a tied embedding is the embedding's alone
        tied = layout.model.tied
        head = EMBEDDING if tied else HEAD
        yield Rule(
            name="output_layer.weight",
            sources=(head,),
            over="tp",
            pad=True,
            held="last",
            adapter="none" if tied else "cut",
        )
    yield from _latent(te) if layout.model.latent else _heads(te)
    for leaf, over in (("weight", "tp"), ("bias", "")):
        yield Rule(
            name=f"{_OUT}self_attention.linear_proj.{leaf}",
            sources=(f"{LAYER}self_attn.o_proj.{leaf}",),
            axis=1 if over else 0,
            over="tp" if over else "",
            units=("heads",) if over else (),
        )
    yield from _mlp(te)
    for block, *projections in ROUTED:
        yield _whole("mlp.router.weight", f"{block}.gate.weight")
        yield _whole("mlp.router.expert_bias", f"{block}.gate.e_score_correction_bias")
        yield from _experts(te, block, *projections)


def _heads(te: bool) -> Iterator[Rule]:
    norm = "self_attention.linear_qkv.layer_norm_weight" if te else "input_layernorm.weight"
    yield _whole(norm, "input_layernorm.weight")
    for x in "qk":
        yield _whole(f"self_attention.{x}_layernorm.weight", f"self_attn.{x}_norm.weight")
    for leaf in ("weight", "bias"):
        yield Rule(
            name=f"{_OUT}self_attention.linear_qkv.{leaf}",
            sources=tuple(f"{LAYER}self_attn.{x}_proj.{leaf}" for x in "qkv"),
            over="tp",
            units=("heads", "kv_heads", "kv_heads"),
            join="groups",
        )


def _latent(te: bool) -> Iterator[Rule]:
    yield _whole("input_layernorm.weight", "input_layernorm.weight")
    for x in ("q", "kv"):
        norm = f"linear_{x}_up_proj.layer_norm_weight" if te else f"{x}_layernorm.weight"
        yield _whole(f"self_attention.{norm}", f"self_attn.{x}_a_layernorm.weight")
    for name, source in (("q_down_proj", "q_a_proj"), ("kv_down_proj", "kv_a_proj_with_mqa")):
        yield Rule(
            name=f"{_OUT}self_attention.linear_{name}.weight",
            sources=(f"{LAYER}self_attn.{source}.weight",),
            over="" if te else "tp",
        )
    for name, source in (("q_proj", "q_proj"), ("q_up_proj", "q_b_proj"), ("kv_up_proj", "kv_b_proj")):
        yield Rule(
            name=f"{_OUT}self_attention.linear_{name}.weight",
            sources=(f"{LAYER}self_attn.{source}.weight",),
            over="tp",
            units=("heads",),
        )
    for name in INDEXER:
        inner = name if name.startswith("k_norm") else f"linear_{name}"
        yield _whole(f"self_attention.core_attention.indexer.{inner}", f"self_attn.indexer.{name}")


def _mlp(te: bool) -> Iterator[Rule]:
    after = "post_attention_layernorm.weight"
    if te:
        yield _whole("mlp.linear_fc1.layer_norm_weight", after, f"{LAYER}mlp.gate_proj.weight")
        yield _whole("pre_mlp_layernorm.weight", after, *ROUTERS)
    else:
        yield _whole("pre_mlp_layernorm.weight", after)
    for module, source in (("mlp", "mlp"), *(("mlp.shared_experts", shared) for shared in SHARED)):
        yield Rule(
            name=f"{_OUT}{module}.linear_fc1.weight",
            sources=(f"{LAYER}{source}.gate_proj.weight", f"{LAYER}{source}.up_proj.weight"),
            over="tp",
        )
        yield Rule(
            name=f"{_OUT}{module}.linear_fc2.weight",
            sources=(f"{LAYER}{source}.down_proj.weight",),
            axis=1,
            over="tp",
        )
    yield _whole("mlp.shared_experts.gate_weight", "mlp.shared_expert_gate.weight")


def _experts(te: bool, block: str, gate: str, up: str, down: str) -> Iterator[Rule]:
    before, after = ("", ".weight{slot}") if te else ("local_experts.{slot}.", ".weight")
    expert = LAYER + block + ".experts.{expert}."
    module = f"{_OUT}mlp.experts.{before}"
    yield Rule(
        name=f"{module}linear_fc1{after}",
        sources=(f"{expert}{gate}.weight", f"{expert}{up}.weight"),
        over="etp",
    )
    yield Rule(name=f"{module}linear_fc2{after}", sources=(f"{expert}{down}.weight",), axis=1, over="etp")


def _whole(name: str, source: str, *beside: str) -> Rule:
    return Rule(name=_OUT + name, sources=(LAYER + source,), beside=beside)
