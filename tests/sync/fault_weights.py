"""The weights of versions and what they score: made by plain transformers, without a line of any engine."""

from __future__ import annotations

import copy
from functools import lru_cache

import torch
from conformance.forge import MODELS, checkpoint, cold, cold_logprobs
from fault_board import BUILDING, MODEL
from torch import Tensor

from syncline.contract.adapters import adapter_shapes, tensor_names
from syncline.contract.plan import adapter_targets
from syncline.contract.precision import PrecisionContract

IDS = (1, *range(5, 30))
PROMPT = 4
BASE = 1  # seed of the base under every adapter
Tensors = dict[str, Tensor]


def tensors_of(contract: PrecisionContract, seed: int) -> Tensors:
    """What the trainer holds; with an adapter, the one base and the adapter of that seed."""
    with BUILDING:
        if contract.adapter is None:
            return dict(checkpoint(MODELS / MODEL, seed))
        return {**checkpoint(MODELS / MODEL, BASE), **adapter(contract, seed)}


def expected(contract: PrecisionContract, seed: int) -> list[float]:
    """Log-probs of `IDS[PROMPT:]`."""
    with BUILDING:
        return _expected(contract, seed)


@lru_cache(maxsize=256)
def _expected(contract: PrecisionContract, seed: int) -> list[float]:
    if contract.adapter is None:
        return cold_logprobs(cold(MODELS / MODEL, seed, contract), IDS, PROMPT)
    model = copy.deepcopy(cold(MODELS / MODEL, BASE, contract))
    tensors, shapes = adapter(contract, seed), _shapes()
    with torch.no_grad():
        for target in adapter_targets(contract.adapter, shapes):
            a, b = (tensors[name].float() for name in tensor_names(target))
            model.get_parameter(target).add_(contract.adapter.scale() * b @ a)
    return cold_logprobs(model, IDS, PROMPT)


def adapter(contract: PrecisionContract, seed: int) -> Tensors:
    """BF16 adapter tensors of a version, large enough that no two versions look alike."""
    assert contract.adapter is not None
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.empty(shape).normal_(0, 0.1, generator=generator).bfloat16()
        for name, shape in adapter_shapes(contract.adapter, _shapes()).items()
    }


def _shapes() -> dict[str, tuple[int, ...]]:
    return {name: tuple(t.shape) for name, t in checkpoint(MODELS / MODEL, BASE).items()}
