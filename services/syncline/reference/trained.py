"""A model under training in the contract's numerics: wide parameters, and forwards that multiply as the plan says.

`train_in` replaces the forward of each module that holds a tensor of a family (plain linear layers and fused experts).
Names of modules and parameters stay what they were; everything that no family names is untouched. Codes and other
copies of a weight are made when it is first read after a change and live until the next one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from syncline.contract.plan import PlanEntry, PrecisionPlan
from syncline.contract.precision import Gemm, PrecisionContract
from syncline.numerics.linear import Weight, grouped_linear
from syncline.numerics.operands import Copies, How, Meter
from syncline.reference.low_bit import CannotTrain, LowBit, low_bit, share_outer_scales
from syncline.reference.state import StatePlan

__all__ = ["CannotTrain", "LowBit", "NotMultiplied", "Trained", "rollout_how", "train_in"]


class NotMultiplied(RuntimeError):
    """A weight of a family that a forward pass never multiplied: its module is read in another way."""


@dataclass
class _Mode:
    """What the swapped forwards do now. `rollout`: copies made for rollout's GEMM, by owner; None: training."""

    rollout: dict[str, Copies] | None = None


class Trained:
    """The swapped modules of one model. `weights` by owner; `meter` counts what their GEMMs did while training."""

    def __init__(self, contract: PrecisionContract, weights: Sequence[LowBit]) -> None:
        self.weights = {weight.owner: weight for weight in weights}
        self.meter = Meter()
        self._contract = contract
        self._mode = _Mode()
        self._rollout_meter = Meter()

    @contextmanager
    def as_rollout(self) -> Iterator[None]:
        """Inside, every swapped module multiplies as the rollout engine does, over codes of the present weights.

        Without gradients. What it makes is dropped afterwards and not metered.
        """
        self._mode.rollout = {}
        try:
            with torch.no_grad():
                yield
        finally:
            self._mode.rollout = None
            self._rollout_meter.reset()

    def check_multiplied(self) -> None:
        """Raise `NotMultiplied` naming a weight that no FProp has read since the meter was reset."""
        for owner, weight in self.weights.items():
            if owner not in self.meter.seen["fprop"]:
                raise NotMultiplied(
                    f"tensor {weight.names[0]}: no forward pass went through the module that holds it"
                )

    def multiply(self, x: Tensor, w: Tensor, offsets: Tensor, weight: LowBit) -> Tensor:
        """`grouped_linear` in the present mode; `w` is the parameter as [E, P x N, K]."""
        if self._mode.rollout is None:
            return grouped_linear(
                x, w, offsets, Weight(weight.owner, weight.how, weight.copies(), self.meter)
            )
        how = rollout_how(self._contract, weight.how)
        if weight.owner not in self._mode.rollout:
            self._mode.rollout[weight.owner] = weight.fresh(how)
        copies = self._mode.rollout[weight.owner]
        return grouped_linear(x, w, offsets, Weight(weight.owner, how, copies, self._rollout_meter))


def train_in(
    model: nn.Module, state_plan: StatePlan, plan: PrecisionPlan, contract: PrecisionContract
) -> Trained:
    """Swap the forwards of `model`'s modules that hold a tensor of a family.

    Raises `CannotTrain` naming a tensor that lies in no linear layer and no fused experts, or is treated otherwise
    than its neighbours in one parameter, and the contract's key that no GEMM can carry out.
    """
    held: dict[str, list[PlanEntry]] = {}
    for entry in plan.low_bit():
        held.setdefault(state_plan.windows[entry.name].owner, []).append(entry)
    modules = dict(model.named_modules())
    weights = [low_bit(modules, owner, entries, state_plan, contract) for owner, entries in held.items()]
    share_outer_scales(weights)
    trained = Trained(contract, weights)
    for path in sorted({owner.rpartition(".")[0] for owner in held}):
        module = modules[path]
        by_attribute = {w.owner.rpartition(".")[2]: w for w in weights if w.owner.rpartition(".")[0] == path}
        swapped = _linear if type(module) is nn.Linear else _experts
        module.forward = partial(swapped, trained, module, by_attribute)
    return trained


# ---- forwards -------------------------------------------------------------------------------------------------
def rollout_how(contract: PrecisionContract, how: How) -> How:
    """`how` of a weight as the rollout engine multiplies it."""
    kind = "codes" if contract.rollout.kernel == "codes" else "reconstructed"
    left = kind if how.activation is not None else "original"
    gemm = msgspec.convert({"left": left, "right": kind}, Gemm)
    return How(fprop=gemm, dgrad=Gemm(), wgrad=Gemm(), weight=how.weight, activation=how.activation)


def _linear(trained: Trained, module: nn.Linear, weights: dict[str, LowBit], x: Tensor) -> Tensor:
    rows = x.reshape(-1, module.in_features)
    offsets = torch.tensor([len(rows)], dtype=torch.int32, device=x.device)
    y = trained.multiply(rows, module.weight.unsqueeze(0), offsets, weights["weight"])
    if module.bias is not None:
        y = y + module.bias
    return y.view(*x.shape[:-1], module.out_features)


def _experts(
    trained: Trained,
    module: Any,
    weights: dict[str, LowBit],
    hidden_states: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
) -> Tensor:
    """transformers' `grouped_mm_experts_forward`, to the bit where both weights are read wide."""
    topk, tokens = top_k_index.shape[-1], len(hidden_states)
    ids, order = torch.sort(top_k_index.reshape(-1))
    counts = torch.bincount(ids, minlength=module.num_experts)
    offsets = counts.cumsum(0, dtype=torch.int32)

    def product(x: Tensor, attribute: str) -> Tensor:
        w: Tensor = module.get_parameter(attribute)
        if attribute in weights:
            return trained.multiply(x, w, offsets, weights[attribute])
        return F.grouped_mm(x.to(w.dtype), w.transpose(-2, -1), offs=offsets)

    y: Tensor = module._apply_gate(product(hidden_states[order // topk], "gate_up_proj"))
    y = product(y, "down_proj") * top_k_weights.reshape(-1)[order].unsqueeze(-1)
    back = torch.empty_like(order)
    back[order] = torch.arange(len(order), device=order.device)
    return y[back].view(tokens, topk, -1).sum(dim=1).to(hidden_states.dtype)
