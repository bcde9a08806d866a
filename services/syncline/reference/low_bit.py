"""Which parameters in memory hold the tensors of a contract's families, and the copies that are made of them.

All checkpoint tensors of one parameter are treated alike: the experts of a layer lie in one, gate and up side by side.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from syncline.contract.plan import PlanEntry
from syncline.contract.precision import PrecisionContract
from syncline.contract.precision_trace import Held
from syncline.contract.schemes import BLOCK, Scheme
from syncline.numerics import nvfp4
from syncline.numerics.operands import Copies, GemmName, How, problem
from syncline.reference.state import StatePlan, Window

_HELD = {"bf16": torch.bfloat16, "fp32": torch.float32}


class CannotTrain(ValueError):
    """A plan that this model cannot be trained in. Names the tensor or the contract's key."""


class LowBit:
    """One parameter in memory whose checkpoint tensors belong to a family.

    owner   name in `model.state_dict()`;  names  checkpoint names, E x P of them in memory order
    shape   [E, P, N, K]: the parameter as its checkpoint tensors
    """

    def __init__(
        self, module: nn.Module, owner: str, entries: Sequence[PlanEntry], parts: int, how: How
    ) -> None:
        self.owner, self.how, self.family = owner, how, entries[0].family
        self.names = tuple(entry.name for entry in entries)
        self.outers = tuple(entry.outer for entry in entries)
        self._module, self._attribute = module, owner.rpartition(".")[2]
        self.shape = (len(entries) // parts, parts, *entries[0].shape)
        self._partners: list[LowBit] = [self]
        self._members: Tensor | None = None  # [E x P, most members]: whose maxima share an outer scale
        self._made: tuple[object, Copies] | None = None

    @property
    def parameter(self) -> nn.Parameter:
        """The wide values, in the module's own shape."""
        return self._module.get_parameter(self._attribute)

    def windows(self) -> Tensor:
        """The checkpoint tensors as a view into the parameter: [E, P, N, K], without gradient."""
        return self.parameter.detach().view(self.shape)

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
        return nvfp4.outer_scale(shared.view(*self.shape[:2], 1, 1), scheme)


def _label(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}"


def low_bit(
    modules: dict[str, nn.Module],
    owner: str,
    entries: list[PlanEntry],
    state_plan: StatePlan,
    contract: PrecisionContract,
) -> LowBit:
    """The `LowBit` of parameter `owner`, of which `entries` are the checkpoint tensors. Raises `CannotTrain`."""
    path, _, attribute = owner.rpartition(".")
    module, name = modules.get(path), entries[0].name
    if module is None or not (type(module) is nn.Linear or _is_experts(module, attribute)):
        what = "nothing" if module is None else type(module).__name__
        raise CannotTrain(
            f"tensor {name} lies in {owner} of {what}, which is no linear layer and no fused experts"
        )
    entries = sorted(entries, key=lambda entry: state_plan.windows[entry.name].offset)
    first = entries[0]
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
    how = how_of(contract, first)
    return LowBit(module, owner, entries, rows // n, how)


def how_of(contract: PrecisionContract, entry: PlanEntry) -> How:
    """How the weight of `entry` is multiplied in training. Raises `CannotTrain` for what no GEMM can carry out."""
    if entry.weight is None:
        raise CannotTrain(f"tensor {entry.name} has no scheme")
    trainer = contract.trainer
    how = How(
        fprop=trainer.fprop,
        dgrad=trainer.dgrad,
        wgrad=trainer.wgrad,
        weight=entry.weight,
        activation=entry.activation,
        held=_HELD[trainer.operands],
    )
    wrong = problem(how) or _undivided(how, entry)
    if wrong:
        raise CannotTrain(f"family {entry.family}: trainer.{wrong}")
    return how


def _undivided(how: How, entry: PlanEntry) -> str:
    """What DGrad's contraction over N would leave of a block; empty if nothing."""
    for side, kind, scheme in (
        ("left", how.dgrad.left, how.activation),
        ("right", how.dgrad.right, how.weight),
    ):
        if kind in ("requantised", "codes") and scheme is not None and scheme.padding == "refuse":
            step = BLOCK[scheme.format] or scheme.columns
            if entry.shape[0] % step:
                return (
                    f"dgrad.{side} is {kind!r} by {step} along N, and {entry.name} has {entry.shape[0]} rows"
                )
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


def share_outer_scales(weights: Sequence[LowBit]) -> None:
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
