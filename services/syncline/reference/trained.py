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
from typing import Any, cast

import msgspec
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from syncline.contract.plan import PlanEntry, PrecisionPlan
from syncline.contract.precision import Gemm, PrecisionContract
from syncline.contract.precision_trace import Held
from syncline.contract.schemes import BLOCK, Scheme
from syncline.numerics import nvfp4
from syncline.numerics.linear import Weight, grouped_linear
from syncline.numerics.operands import Copies, GemmName, How, Meter, problem
from syncline.reference.state import StatePlan, Window

_HELD = {"bf16": torch.bfloat16, "fp32": torch.float32}


class CannotTrain(ValueError):
    """A plan that this model cannot be trained in. Names the tensor or the contract's key."""


class NotMultiplied(RuntimeError):
    """A weight of a family that a forward pass never multiplied: its module is read in another way."""


class LowBit:
    """One parameter in memory whose checkpoint tensors belong to a family.

    owner    name in `model.state_dict()`;  names  checkpoint names, E x P of them in memory order
    """

    def __init__(
        self, module: nn.Module, owner: str, entries: Sequence[PlanEntry], parts: int, how: How
    ) -> None:
        self.owner, self.how, self.family = owner, how, entries[0].family
        self.names = tuple(entry.name for entry in entries)
        self.outers = tuple(entry.outer for entry in entries)
        self._module, self._attribute = module, owner.rpartition(".")[2]
        self._shape = (len(entries) // parts, parts, *entries[0].shape)
        self._partners: list[LowBit] = [self]
        self._members: Tensor | None = None  # [E x P, most members]: whose maxima share an outer scale
        self._made: tuple[object, Copies] | None = None

    @property
    def parameter(self) -> nn.Parameter:
        """The wide values, in the module's own shape."""
        return self._module.get_parameter(self._attribute)

    def windows(self) -> Tensor:
        """The checkpoint tensors as a view into the parameter: [E, P, N, K], without gradient."""
        return self.parameter.detach().view(self._shape)

    def share(self, partners: Sequence[LowBit]) -> None:
        """Take outer scales with `partners` (itself among them) wherever their ids are equal."""
        ids = [outer for p in partners for outer in p.outers]
        if "" in ids:
            raise CannotTrain(f"some tensors of {self.owner} share an outer scale and some do not")
        places: dict[str, list[int]] = {}
        for i, outer in enumerate(ids):
            places.setdefault(outer, []).append(i)
        rows = [places[outer] for outer in self.outers]
        most = max(map(len, rows))
        self._partners = list(partners)
        self._members = torch.tensor([row + row[:1] * (most - len(row)) for row in rows])

    def copies(self) -> Copies:
        """Of the weights as they are now: made anew after the parameter, or a partner, has changed."""
        now = tuple((p.parameter.data_ptr(), p.parameter._version) for p in self._partners)
        if self._made is None or self._made[0] != now:
            self._made = (now, self.fresh(self.how))
        return self._made[1]

    def fresh(self, how: How) -> Copies:
        """Copies that nobody else holds."""
        return Copies(self.windows(), how, _label(self.names), self._outer(how.weight))

    def bytes(self, which: GemmName) -> dict[Held, int]:
        """Of the copies that exist now."""
        return {} if self._made is None else self._made[1].bytes(which)

    def _outer(self, scheme: Scheme) -> Tensor | None:
        if scheme.format != "nvfp4" or self._members is None:
            return None
        amax = torch.cat([p.windows().abs().amax((-2, -1)).flatten() for p in self._partners])
        shared = amax[self._members.to(amax.device)].amax(1)
        return nvfp4.outer_scale(shared.view(*self._shape[:2], 1, 1), scheme)


def _label(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}"


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
        how = _rollout_how(self._contract, weight.how)
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
    weights = [_low_bit(modules, owner, entries, state_plan, contract) for owner, entries in held.items()]
    _share_outer_scales(weights)
    trained = Trained(contract, weights)
    for path in sorted({owner.rpartition(".")[0] for owner in held}):
        module = modules[path]
        by_attribute = {w.owner.rpartition(".")[2]: w for w in weights if w.owner.rpartition(".")[0] == path}
        swapped = _linear if type(module) is nn.Linear else _experts
        module.forward = partial(swapped, trained, module, by_attribute)
    return trained


# ---- finding weights ------------------------------------------------------------------------------------------
def _low_bit(
    modules: dict[str, nn.Module],
    owner: str,
    entries: list[PlanEntry],
    state_plan: StatePlan,
    contract: PrecisionContract,
) -> LowBit:
    path, _, attribute = owner.rpartition(".")
    module, name = modules.get(path), entries[0].name
    if module is None or not (type(module) is nn.Linear or _is_experts(module, attribute)):
        what = "nothing" if module is None else type(module).__name__
        raise CannotTrain(
            f"tensor {name} lies in {owner} of {what}, which is no linear layer and no fused experts"
        )
    entries = sorted(entries, key=lambda entry: state_plan.windows[entry.name].offset)
    first = entries[0]
    if first.weight is None:
        raise CannotTrain(f"tensor {name} has no scheme")
    for entry in entries:
        if (entry.family, entry.shape) != (first.family, first.shape):
            raise CannotTrain(f"tensors {name} and {entry.name} lie in {owner} and are not alike")
    groups, rows, columns = _sizes(module.get_parameter(attribute))
    n, k = first.shape
    for i, entry in enumerate(entries):
        expected = Window(owner=owner, shape=(n, k), stride=(k, 1), offset=i * n * k)
        if k != columns or state_plan.windows[entry.name] != expected:
            raise CannotTrain(
                f"tensor {entry.name} is no whole block of rows of {owner}, or a neighbour stays wide"
            )
    if len(entries) * n != groups * rows:
        raise CannotTrain(
            f"{owner} holds tensors beside {name} that stay wide; a module is treated as a whole"
        )
    trainer = contract.trainer
    how = How(
        fprop=trainer.fprop,
        dgrad=trainer.dgrad,
        wgrad=trainer.wgrad,
        weight=first.weight,
        activation=first.activation,
        held=_HELD[trainer.operands],
    )
    wrong = problem(how) or _undivided(how, first)
    if wrong:
        raise CannotTrain(f"family {first.family}: trainer.{wrong}")
    return LowBit(module, owner, entries, rows // n, how)


def _undivided(how: How, entry: PlanEntry) -> str:
    """What DGrad's contraction over N would leave of a block; empty if nothing."""
    for side, kind, scheme in (
        ("left", how.dgrad.left, how.activation),
        ("right", how.dgrad.right, how.weight),
    ):
        if kind in ("requantised", "codes") and scheme is not None and scheme.padding == "refuse":
            step = BLOCK[scheme.format] or scheme.columns
            if entry.shape[0] % step:
                return f"dgrad.{side} is {kind!r} in blocks of {step} along N, and {entry.name} has {entry.shape[0]} rows"
    return ""


def _sizes(parameter: Tensor) -> tuple[int, int, int]:
    """E, rows and columns of a parameter [N, K] or [E, N, K]."""
    shape = parameter.shape if parameter.dim() == 3 else (1, *parameter.shape)
    return shape[0], shape[1], shape[2]


def _is_experts(module: nn.Module, attribute: str) -> bool:
    """Whether `module` is what transformers' experts interface runs; raises `CannotTrain` for layouts of its own."""
    if attribute not in ("gate_up_proj", "down_proj") or not hasattr(module, "is_transposed"):
        return False
    experts = cast(Any, module)
    odd = experts.is_transposed or experts.has_bias or not experts.has_gate or not experts.is_concatenated
    if odd or experts.has_post_expert_norm:
        raise CannotTrain(f"{type(module).__name__}: transposed, interleaved, biased or ungated experts")
    return True


def _share_outer_scales(weights: Sequence[LowBit]) -> None:
    """Give each weight the partners whose tensors share an outer scale with one of its own."""
    holders: dict[str, list[LowBit]] = {}
    for weight in weights:
        for outer in dict.fromkeys(weight.outers):
            if outer:
                holders.setdefault(outer, []).append(weight)
    for weight in weights:
        if any(weight.outers):
            together = {p.owner: p for outer in weight.outers if outer for p in holders[outer]}
            weight.share(list(together.values()))


# ---- forwards -------------------------------------------------------------------------------------------------
def _rollout_how(contract: PrecisionContract, how: How) -> How:
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
