"""Writes the tiny models of this folder: config.json, tokenizer.json, tokenizer_config.json, one folder each.

Run from anywhere: `python examples/models/make.py`. The files are committed; here is where they come from.
Tokens are single characters: printable ASCII and newline, behind four special tokens.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors

HERE = Path(__file__).parent
SPECIAL = ["<pad>", "<bos>", "<eos>", "<unk>"]
CHARACTERS = ["\n", *map(chr, range(32, 127))]
VOCAB = len(SPECIAL) + len(CHARACTERS)

COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "pad_token_id": None,  # a padding row of the embedding is all zeros, which makes sparse attention's scores tie
    "bos_token_id": 1,
    "eos_token_id": 2,
    "max_position_embeddings": 1024,
    "initializer_range": 0.06,
    "tie_word_embeddings": False,
}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
MLA = {
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
}
MODELS: dict[str, dict[str, Any]] = {
    "tiny-dense": {
        "model_type": "qwen3",
        "architectures": ["Qwen3ForCausalLM"],
        **COMMON,
        **HEADS,
        "num_hidden_layers": 2,
        "intermediate_size": 128,
        "tie_word_embeddings": True,
    },
    "tiny-moe": {
        "model_type": "qwen3_moe",
        "architectures": ["Qwen3MoeForCausalLM"],
        **COMMON,
        **HEADS,
        "num_hidden_layers": 2,
        "intermediate_size": 128,
        "moe_intermediate_size": 64,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
    },
    "tiny-hybrid": {
        "model_type": "qwen3_5_moe_text",
        "architectures": ["Qwen3_5MoeForCausalLM"],
        **COMMON,
        **HEADS,
        "num_hidden_layers": 4,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 32,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
    },
    "tiny-kimi": {
        "model_type": "kimi_linear",
        "architectures": ["KimiLinearForCausalLM"],
        **COMMON,
        **MLA,
        "num_hidden_layers": 4,
        "layer_types": ["linear_attention"] * 3 + ["full_attention"],
        "mlp_layer_types": ["dense"] + ["sparse"] * 3,
        "intermediate_size": 128,
        "moe_intermediate_size": 32,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "linear_head_dim": 16,
        "linear_num_heads": 4,
        "linear_conv_kernel_dim": 4,
    },
    # with few index heads the index scores tie at exactly 0, and top-k then breaks ties by row length
    "tiny-glm": {
        "model_type": "glm_moe_dsa",
        "architectures": ["GlmMoeDsaForCausalLM"],
        **COMMON,
        **MLA,
        "q_lora_rank": 24,
        "num_hidden_layers": 3,
        "first_k_dense_replace": 1,
        "intermediate_size": 128,
        "moe_intermediate_size": 32,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "index_topk": 8,
        "index_head_dim": 16,
        "index_n_heads": 16,
    },
}


def tokenizer() -> Tokenizer:
    """One token per character; a text begins with <bos>; decoding joins without spaces."""
    vocab = {token: i for i, token in enumerate([*SPECIAL, *CHARACTERS])}
    made = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Split(Regex(r"(?m)."), behavior="isolated")
    made.decoder = decoders.Fuse()
    made.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 1)])
    made.add_special_tokens(SPECIAL)
    return made


def main() -> None:
    """Write every folder of `MODELS`."""
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": 1024,
        "clean_up_tokenization_spaces": False,
        **{f"{token.strip('<>')}_token": token for token in SPECIAL},
    }
    for name, config in MODELS.items():
        folder = HERE / name
        folder.mkdir(exist_ok=True)
        (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")
        tokenizer().save(str(folder / "tokenizer.json"))


if __name__ == "__main__":
    main()
