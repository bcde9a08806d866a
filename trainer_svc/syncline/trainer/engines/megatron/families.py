"""Hugging Face configurations as megatron-core's settings. A family that is not here is refused by name.

Every setting of a configuration that changes what the model computes is either carried over or refused.
"""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F

from syncline.contract.trainer_rules import MEGATRON_MODELS

Settings = dict[str, Any]


class UnknownFamily(ValueError):
    """A model that this engine cannot build exactly. Names the model type and the setting."""


def settings_of(config: Any) -> Settings:
    """Keyword arguments of `TransformerConfig` (of `MLATransformerConfig` with `multi_latent_attention`), and of
    `GPTModel`: `vocab_size`, `rotary_base`, `share_embeddings_and_output_weights`, `max_sequence_length`.

    Raises `UnknownFamily`.
    """
    text = config.get_text_config(decoder=True)
    match text.model_type:
        case "llama" | "mistral" | "qwen2" | "qwen3":
            return _heads(text) | {"ffn_hidden_size": text.intermediate_size}
        case "qwen3_moe":
            return _heads(text) | _qwen3_moe(text)
        case "deepseek_v3":
            return _latent(text) | _deepseek(text)
        case other:
            raise UnknownFamily(
                f"model type {other!r}: the megatron engine builds {', '.join(MEGATRON_MODELS)}; trainer.engine "
                "'torch' trains any causal LM"
            )


def _common(text: Any) -> Settings:
    if text.hidden_act != "silu":
        raise UnknownFamily(f"model type {text.model_type!r}: hidden_act {text.hidden_act!r} is not 'silu'")
    rope = text.rope_parameters
    if rope["rope_type"] != "default" or rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise UnknownFamily(
            f"model type {text.model_type!r}: rope_parameters {rope} are not the default kind"
        )
    return {
        "num_layers": text.num_hidden_layers,
        "hidden_size": text.hidden_size,
        "num_attention_heads": text.num_attention_heads,
        "layernorm_epsilon": text.rms_norm_eps,
        "activation_func": F.silu,
        "gated_linear_unit": True,
        "normalization": "RMSNorm",
        "add_bias_linear": False,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "vocab_size": text.vocab_size,
        "rotary_base": rope["rope_theta"],
        "share_embeddings_and_output_weights": bool(text.tie_word_embeddings),
        "max_sequence_length": text.max_position_embeddings,
    }


def _heads(text: Any) -> Settings:
    family = text.model_type
    if family == "mistral" and text.sliding_window is not None:
        raise UnknownFamily(f"model type 'mistral': sliding_window {text.sliding_window}")
    if family.startswith("qwen") and text.use_sliding_window:
        raise UnknownFamily(f"model type {family!r}: use_sliding_window")
    if family in ("llama", "qwen3", "qwen3_moe") and text.attention_bias:
        raise UnknownFamily(f"model type {family!r}: attention_bias")
    if family == "llama" and text.mlp_bias:
        raise UnknownFamily("model type 'llama': mlp_bias")
    width = text.to_dict().get("head_dim") or text.hidden_size // text.num_attention_heads
    return _common(text) | {
        "num_query_groups": text.num_key_value_heads,
        "kv_channels": width,
        "add_qkv_bias": family == "qwen2",
        "qk_layernorm": family in ("qwen3", "qwen3_moe"),
    }


def _routed(experts: int, topk: int, width: int) -> Settings:
    return {
        "num_moe_experts": experts,
        "moe_router_topk": topk,
        "moe_ffn_hidden_size": width,
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
        "moe_router_dtype": "fp32",
        "moe_grouped_gemm": False,
    }


def _qwen3_moe(text: Any) -> Settings:
    step, dense = text.decoder_sparse_step, set(text.mlp_only_layers)
    sparse = [int(layer not in dense and (layer + 1) % step == 0) for layer in range(text.num_hidden_layers)]
    return _routed(text.num_experts, text.num_experts_per_tok, text.moe_intermediate_size) | {
        "ffn_hidden_size": text.intermediate_size,
        "moe_layer_freq": sparse,
        # softmax over the chosen ones is softmax over all, normalised
        "moe_router_pre_softmax": not text.norm_topk_prob,
    }


def _latent(text: Any) -> Settings:
    if not text.rope_interleave:
        raise UnknownFamily("model type 'deepseek_v3': rope_interleave false")
    if text.attention_bias:
        raise UnknownFamily("model type 'deepseek_v3': attention_bias")
    return _common(text) | {
        "multi_latent_attention": True,
        "qk_layernorm": True,
        "q_lora_rank": text.q_lora_rank,
        "kv_lora_rank": text.kv_lora_rank,
        "qk_head_dim": text.qk_nope_head_dim,
        "qk_pos_emb_head_dim": text.qk_rope_head_dim,
        "v_head_dim": text.v_head_dim,
        "rope_type": "rope",
        "rotary_scaling_factor": 1.0,  # its default, 40, would scale the softmax
    }


def _deepseek(text: Any) -> Settings:
    if not text.norm_topk_prob:
        raise UnknownFamily("model type 'deepseek_v3': norm_topk_prob false")
    experts = text.n_routed_experts
    grouped = text.n_group > 1
    if grouped and text.num_experts_per_tok != 2 * text.topk_group:
        # Megatron ranks a group by its best (experts per token / groups) scores, DeepSeek by its best two
        raise UnknownFamily(
            f"model type 'deepseek_v3': n_group {text.n_group} with topk_group {text.topk_group} and "
            f"{text.num_experts_per_tok} experts per token; megatron-core ranks groups alike for twice topk_group alone"
        )
    return _routed(experts, text.num_experts_per_tok, text.moe_intermediate_size) | {
        "ffn_hidden_size": text.intermediate_size,
        "moe_layer_freq": [
            int(layer >= text.first_k_dense_replace) for layer in range(text.num_hidden_layers)
        ],
        "moe_shared_expert_intermediate_size": text.moe_intermediate_size * text.n_shared_experts,
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_router_bias_update_rate": 0.0,
        "moe_router_topk_scaling_factor": text.routed_scaling_factor,
        "moe_router_num_groups": text.n_group if grouped else None,
        "moe_router_group_topk": text.topk_group if grouped else None,
    }
