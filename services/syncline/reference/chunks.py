"""Kimi delta attention on CPU in chunks that fit short sequences.

The library's fallback works in chunks of 64 tokens whatever the sequence's length, over tensors of [64, 64, head] per
chunk: sequences of ten tokens cost forty times what they need. A chunk's size changes the order of additions and
nothing else. Both sides use the same one.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers.models.kimi_linear.modeling_kimi_linear import KimiLinearDeltaAttention

CHUNK = 16
"""Tokens of a chunk."""


def fit_chunks(model: nn.Module) -> None:
    """Let each delta attention of `model` work in chunks of `CHUNK` as long as it runs on CPU."""
    for module in model.modules():
        if isinstance(module, KimiLinearDeltaAttention):
            module.register_forward_pre_hook(_with_chunk, with_kwargs=True)


def _with_chunk(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    on_cpu = next(module.parameters()).device.type == "cpu"
    return args, kwargs | {"chunk_size": CHUNK} if on_cpu else kwargs
