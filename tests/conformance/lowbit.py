"""Low-bit versions and cold models for engine tests, made of `numerics` and plain `transformers` alone.

A cold model holds the values that the codes stand for in its ordinary parameters, and rounds the inputs of its
low-bit weights as the contract says: no packed storage, no kernel on codes.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from syncline.contract.artefact import Part, parts
from syncline.contract.plan import PlanEntry, PrecisionPlan, resolve
from syncline.contract.precision import PrecisionContract
from syncline.contract.schemes import Scheme
from syncline.numerics.gemm import quantize_rows
from syncline.numerics.quantized import Quantized, dequantize, outer_scale, quantize
from syncline.reference.state import named_windows, state_plan

_EXPERTS = "cold_with_rounded_inputs"


def plan_of(model: Any, contract: PrecisionContract) -> PrecisionPlan:
    """The plan of `contract` for `model`."""
    return resolve(contract, {name: window.shape for name, window in state_plan(model).windows.items()})


def quantised(plan: PrecisionPlan, tensors: Mapping[str, Tensor]) -> dict[str, Quantized]:
    """Each low-bit weight of `tensors` by name, outer scales shared where the plan shares them."""
    groups: dict[str, list[Tensor]] = {}
    for entry in plan.low_bit():
        groups.setdefault(entry.outer or entry.name, []).append(tensors[entry.name])
    made = {}
    for entry in plan.low_bit():
        assert entry.weight is not None
        outer = None
        if entry.weight.format == "nvfp4":
            outer = outer_scale(groups[entry.outer or entry.name], entry.weight)
        made[entry.name] = quantize(tensors[entry.name], entry.weight, entry.name, outer)
    return made


def encoded(entry: PlanEntry, made: Quantized) -> Iterator[tuple[Part, Tensor]]:
    """The checkpoint tensors of one low-bit weight."""
    roles = {
        "codes": made.codes,
        "scale": made.scale,
        "outer": made.outer,
        "shape": torch.tensor(entry.shape),
    }
    for part in parts(entry):
        tensor = roles[part.role]
        assert tensor is not None
        yield part, tensor


def cold(plain: Any, tensors: Mapping[str, Tensor], contract: PrecisionContract) -> Any:
    """A copy of the wide model `plain`, whose checkpoint is `tensors`, under `contract`."""
    model = copy.deepcopy(plain)
    state, plan = state_plan(model), plan_of(model, contract)
    views = named_windows(model, state)
    with torch.no_grad():
        for name, made in quantised(plan, tensors).items():
            views[name].copy_(dequantize(made))
    for entry in plan.low_bit():
        if entry.activation is not None:
            _round_inputs(model, state.windows[entry.name].owner, entry.activation)
    return model


def _round_inputs(model: nn.Module, owner: str, scheme: Scheme) -> None:
    path, _, leaf = owner.rpartition(".")
    module: Any = model.get_submodule(path)
    if isinstance(module, nn.Linear):
        if not module._forward_pre_hooks:
            module.register_forward_pre_hook(lambda _, args: (_rounded(args[0], scheme), *args[1:]))
        return
    module.rounded = {**vars(module).get("rounded", {}), leaf: scheme}
    module.config = copy.deepcopy(module.config)
    module.config._experts_implementation = _EXPERTS


def _rounded(x: Tensor, scheme: Scheme) -> Tensor:
    return dequantize(quantize_rows(x.reshape(-1, x.shape[-1]), scheme, "input")).view(x.shape)


def _experts(module: Any, hidden: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    """Token by token and expert by expert."""
    out = torch.zeros_like(hidden)
    for token in range(hidden.shape[0]):
        for expert, weight in zip(ids[token].tolist(), weights[token], strict=True):
            x = hidden[token : token + 1]
            x = _rounded(x, module.rounded["gate_up_proj"]) if "gate_up_proj" in module.rounded else x
            x = module._apply_gate(x @ module.gate_up_proj[expert].T)
            x = _rounded(x, module.rounded["down_proj"]) if "down_proj" in module.rounded else x
            out[token] += weight * (x @ module.down_proj[expert].T)[0]
    return out


ALL_EXPERTS_FUNCTIONS.register(_EXPERTS, _experts)
