"""Weights that say which version they are: every sampled token and its log-probability tell it.

One layer, no positions in play. Of a version whose weights have the serial `k`:

    norm.weight    passes one of ten equal inputs, the (k mod 10)th
    lm_head        makes of input a the token 10 a + k mod 10
    v_proj         writes 1 into the (k mod 16)th of sixteen context slots

so a greedy token is 10 x (norm's serial) + (head's serial), and its log-probability tells which versions made the
attention context, and with how many positions each. Sampling is greedy (`top_k` 1). Nothing here needs torch, or a
line of an engine.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from exports import write
from numpy.typing import NDArray

HIDDEN, SLOTS, CODES, VOCAB = 32, 16, 10, 128
CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "bos_token_id": 126,
    "eos_token_id": 127,
    "pad_token_id": None,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": SLOTS,
    "num_hidden_layers": 1,
    "intermediate_size": 32,
    "rms_norm_eps": 1e-6,
}
MODEL = "micro"
_LAYER = "model.layers.0."
_HEAD, _SLOT = 2.5, 1.0
Tensors = dict[str, NDArray[np.float32]]


def tensors(serial: int) -> Tensors:
    """A checkpoint of `serial`; every value is a BF16 one."""
    zero = np.zeros
    norm, head, v, o = zero(HIDDEN), zero((VOCAB, HIDDEN)), zero((SLOTS, HIDDEN)), zero((HIDDEN, 2 * SLOTS))
    embedding = zero((VOCAB, HIDDEN))
    embedding[:, :CODES] = 1
    norm[serial % CODES] = 1
    norm[SLOTS:] = 1
    for code in range(CODES):
        head[CODES * code + serial % CODES, code] = _HEAD
    for slot in range(SLOTS):
        head[CODES * CODES + slot, SLOTS + slot] = _SLOT
        o[SLOTS + slot, slot] = 1
    v[serial % SLOTS, 0] = 1
    made = {
        "model.embed_tokens.weight": embedding,
        "model.norm.weight": norm,
        "lm_head.weight": head,
        _LAYER + "input_layernorm.weight": np.ones(HIDDEN),
        _LAYER + "post_attention_layernorm.weight": np.ones(HIDDEN),
        _LAYER + "self_attn.q_proj.weight": zero((2 * SLOTS, HIDDEN)),
        _LAYER + "self_attn.k_proj.weight": zero((SLOTS, HIDDEN)),
        _LAYER + "self_attn.v_proj.weight": v,
        _LAYER + "self_attn.o_proj.weight": o,
        _LAYER + "mlp.gate_proj.weight": zero((32, HIDDEN)),
        _LAYER + "mlp.up_proj.weight": zero((32, HIDDEN)),
        _LAYER + "mlp.down_proj.weight": zero((HIDDEN, 32)),
    }
    return {name: tensor.astype("<f4") for name, tensor in made.items()}


def export(folder: Path, serial: int) -> dict[str, str]:
    """An export as a trainer writes it; the stamped digests."""
    return write(folder, dict(tensors(serial)), CONFIG)


def model_root(root: Path) -> Path:
    """A model root that holds the model's folder."""
    folder = root / MODEL
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return root


def token(serial: int) -> int:
    """What weights of one serial sample."""
    return CODES * (serial % CODES) + serial % CODES


def logprobs(serial: int, context: Sequence[int]) -> NDArray[np.float64]:
    """[VOCAB] after a context whose positions the weights of the serials in `context` made."""
    wide = math.sqrt(HIDDEN / CODES)  # what input_layernorm makes of ten ones
    hidden = np.zeros(HIDDEN)
    hidden[:CODES] = 1
    for maker in context:
        hidden[SLOTS + maker % SLOTS] += wide / len(context)
    normed = hidden / math.sqrt(float(np.mean(hidden**2)) + 1e-6)
    logits = np.zeros(VOCAB)
    logits[token(serial)] = _HEAD * normed[serial % CODES]
    logits[CODES * CODES : CODES * CODES + SLOTS] = _SLOT * normed[SLOTS:]
    shifted: NDArray[np.float64] = logits - math.log(float(np.exp(logits).sum()))
    return shifted
