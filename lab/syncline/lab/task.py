"""The lab's own task and models: sort six symbols of ten, on the smallest vocabulary that can say so.

Two models, hidden size 64 with 2 layers and 4 heads: `sort-dense` (Qwen3) and `sort-moe` (Qwen3-MoE, 8 experts, top 2).
Tokens are single characters. The examples' models have 100 tokens, of which such a task uses 16; the rest would only
have to be unlearned, at the cost of the updates in which precision is to be compared.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors

from syncline.contract.job import JobSpec

Architecture = Literal["dense", "moe"]
SYMBOLS = 10
LENGTH = 6
SPECIAL = ("<pad>", "<bos>", "<eos>", "<unk>")
CHARACTERS = "abcdefghijsort:="  # ten symbols, and what the prompt says before and after them
VOCABULARY = (*SPECIAL, *CHARACTERS)

_COMMON: dict[str, Any] = {
    "vocab_size": len(VOCABULARY),
    "hidden_size": 64,
    "pad_token_id": None,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.06,
    "tie_word_embeddings": False,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 16,
}
CONFIGS: dict[Architecture, dict[str, Any]] = {
    "dense": {
        "model_type": "qwen3",
        "architectures": ["Qwen3ForCausalLM"],
        **_COMMON,
        "intermediate_size": 128,
    },
    "moe": {
        "model_type": "qwen3_moe",
        "architectures": ["Qwen3MoeForCausalLM"],
        **_COMMON,
        "intermediate_size": 128,
        "moe_intermediate_size": 64,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
    },
}


def model_name(architecture: Architecture) -> str:
    """Folder name of the model under a root that `write_models` filled."""
    return f"sort-{architecture}"


def write_models(root: Path, which: Sequence[Architecture] = ("dense", "moe")) -> None:
    """Write model folders (config and tokenizer, no weights) below `root`. Again: the same bytes."""
    for architecture in which:
        config = CONFIGS[architecture]
        folder = root / model_name(architecture)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        _tokenizer().save(str(folder / "tokenizer.json"))
        (folder / "tokenizer_config.json").write_text(
            json.dumps(
                {
                    "tokenizer_class": "PreTrainedTokenizerFast",
                    "bos_token": "<bos>",
                    "eos_token": "<eos>",
                    "unk_token": "<unk>",
                    "pad_token": "<pad>",
                    "model_max_length": 64,
                    "clean_up_tokenization_spaces": False,
                },
                indent=2,
            )
            + "\n"
        )


def _tokenizer() -> Tokenizer:
    """One token per character; a text begins with <bos>; decoding joins without spaces."""
    made = Tokenizer(models.WordLevel({token: i for i, token in enumerate(VOCABULARY)}, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Split(Regex(r"(?m)."), behavior="isolated")
    made.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 1)])
    made.decoder = decoders.Fuse()
    made.add_special_tokens(list(SPECIAL))
    return made


def sort_spec(
    architecture: Architecture = "dense",
    *,
    recipe: str = "bf16",
    variant: str = "contract",
    seed: int = 0,
    updates: int = 120,
    groups: int = 32,
    group_size: int = 16,
    weights: Literal["random", "pretrained"] = "random",
    replay: bool = False,
) -> JobSpec:
    """The job of one cell: GRPO on sort-6, lock-step, everything drawn from `seed`.

    Raises pydantic's `ValidationError` for an unknown recipe or variant.
    """
    return JobSpec.model_validate(
        {
            "name": "study",
            "model": {"name": model_name(architecture), "weights": weights},
            "task": {
                "environment": "characters",
                "options": {"game": "sort", "length": LENGTH, "alphabet": SYMBOLS},
            },
            "sampling": {"max_tokens": LENGTH},
            "batch": {"groups": groups, "group_size": group_size},
            "optimizer": {"lr": 1e-3, "betas": (0.9, 0.98), "warmup": 20, "clip_norm": 1.0},
            "loss": {"clip_low": 0.2, "clip_high": 0.2, "entropy": 0.01},
            "schedule": {"mode": "colocated", "updates": updates, "max_lag": 0},
            "rollout": {"workers": 1, "max_running": groups * group_size},
            "trainer": {"router_replay": replay},
            "precision": {"recipe": recipe, "variant": variant},
            "seeds": {"model": seed, "data": seed, "sampling": seed},
        }
    )
