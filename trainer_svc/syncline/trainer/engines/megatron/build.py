"""This rank's `GPTModel`: settings, layer spec and modules, the same on CPU and on GPU but for the device."""

from __future__ import annotations

from typing import Any

import torch

from syncline.contract.sharding.grid import Grid
from syncline.trainer.engines.megatron import topology
from syncline.trainer.engines.megatron.families import Settings
from syncline.trainer.engines.megatron.library import (
    DotProductAttention,
    GPTModel,
    MLATransformerConfig,
    TransformerBlockSubmodules,
    TransformerConfig,
    get_gpt_decoder_block_spec,
    parallel_state,
    quiet,
)

_OF_THE_MODEL = ("vocab_size", "rotary_base", "share_embeddings_and_output_weights", "max_sequence_length")


def build(
    settings: Settings, grid: Grid, dtype: torch.dtype, padded_vocab: int, recompute: bool = False
) -> Any:
    """The rank's part of the model, weights undefined, in `dtype`, on its device, dropout off.

    settings      of `families.settings_of`
    padded_vocab  rows of the embedding over all tensor-parallel ranks
    recompute     the backward pass runs each layer again from its input, which is all that is kept of it
    """
    outer = {key: settings[key] for key in _OF_THE_MODEL}
    inner = {key: value for key, value in settings.items() if key not in _OF_THE_MODEL}
    if recompute:
        inner |= {
            "recompute_granularity": "full",
            "recompute_method": "uniform",
            "recompute_num_layers": 1,
        }
    with quiet():
        return _built(outer, _config(inner, grid, dtype, float(outer["rotary_base"])), padded_vocab)


def _built(outer: Settings, config: Any, padded_vocab: int) -> Any:
    model = GPTModel(
        config=config,
        transformer_layer_spec=_spec(config),
        vocab_size=padded_vocab,
        max_sequence_length=outer["max_sequence_length"],
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=outer["share_embeddings_and_output_weights"],
        position_embedding_type="rope",
        rotary_base=int(outer["rotary_base"]),
    )
    return model.to(device())


def device() -> torch.device:
    """Where this rank computes."""
    return (
        torch.device("cuda", torch.cuda.current_device())
        if torch.cuda.is_available()
        else torch.device("cpu")
    )


def _config(inner: Settings, grid: Grid, dtype: torch.dtype, rotary_base: float) -> Any:
    common: Settings = {
        "tensor_model_parallel_size": grid.tp,
        "pipeline_model_parallel_size": grid.pp,
        "expert_model_parallel_size": grid.ep,
        "expert_tensor_parallel_size": grid.etp,
        "sequence_parallel": grid.tp
        > 1,  # MoE layers demand it in training; so gradients of replicas are parts
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": dtype == torch.bfloat16,
        "variable_seq_lengths": grid.pp > 1,
        "calculate_per_token_loss": True,  # the loss is divided by nothing on the way: its normaliser has been
        "batch_p2p_sync": False,
        "moe_token_dispatcher_type": topology.dispatcher(grid),
        "use_cpu_initialization": True,
        "perform_initialization": False,
        "transformer_impl": "local",
        "attention_softmax_in_fp32": True,
        "gradient_accumulation_fusion": False,
        "masked_softmax_fusion": False,
        "persist_layer_norm": False,
        "cross_entropy_loss_fusion": False,
        "bias_activation_fusion": False,
        "bias_dropout_fusion": False,
        "apply_rope_fusion": False,
    }
    if inner.get("multi_latent_attention"):
        return MLATransformerConfig(**inner, **common, rotary_base=rotary_base)
    return TransformerConfig(**inner, **common)


class Norm(torch.nn.RMSNorm):
    """RMSNorm of a spec. Megatron's own wrapper refuses sequence parallelism, which a plain norm does not mind."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-6, **_: Any) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)


class LatentAttention(DotProductAttention):  # type: ignore[misc]  # megatron-core has no types
    """Local attention with the two widths that MLA passes, which the original does not take."""

    def __init__(
        self, *args: Any, k_channels: int | None = None, v_channels: int | None = None, **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        if v_channels is not None:
            self.hidden_size_per_partition = v_channels * self.num_attention_heads_per_partition


def _spec(config: Any) -> TransformerBlockSubmodules:
    spec = get_gpt_decoder_block_spec(
        config, use_transformer_engine=False, normalization=config.normalization
    )
    spec.layer_norm = Norm
    for layer in spec.layer_specs:
        inner = layer.submodules
        inner.input_layernorm = inner.pre_mlp_layernorm = Norm
        attention = inner.self_attention.submodules
        if config.multi_latent_attention:
            attention.core_attention = LatentAttention
            attention.q_layernorm = attention.kv_layernorm = Norm
        elif config.qk_layernorm:
            attention.q_layernorm = attention.k_layernorm = Norm
    return spec
