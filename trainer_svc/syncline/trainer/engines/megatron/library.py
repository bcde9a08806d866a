"""megatron-core as this engine uses it: every name comes from here, imported after the stand-ins are in place."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

from syncline.trainer.engines.megatron import shims


@contextmanager
def quiet() -> Iterator[None]:
    """Inside, nobody hears that Apex is absent, or that arguments which megatron-core gives itself are deprecated."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


with quiet():
    shims.apply()
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
    from megatron.core.tensor_parallel.mappings import (
        gather_from_sequence_parallel_region,
        reduce_scatter_to_sequence_parallel_region,
    )
    from megatron.core.tensor_parallel.random import is_checkpointing, model_parallel_cuda_manual_seed
    from megatron.core.transformer.dot_product_attention import DotProductAttention
    from megatron.core.transformer.moe.router import TopKRouter
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
    from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

__all__ = [
    "ColumnParallelLinear",
    "DotProductAttention",
    "GPTModel",
    "MLATransformerConfig",
    "RowParallelLinear",
    "TopKRouter",
    "TransformerBlockSubmodules",
    "TransformerConfig",
    "gather_from_sequence_parallel_region",
    "get_forward_backward_func",
    "get_gpt_decoder_block_spec",
    "is_checkpointing",
    "model_parallel_cuda_manual_seed",
    "parallel_state",
    "quiet",
    "reduce_scatter_to_sequence_parallel_region",
]
