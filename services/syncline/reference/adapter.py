"""LoRA over a frozen base: y = base(x) + scale * (x A^T) B^T, whatever the base's forward is.

`attach` adds parameters `lora_A` [r, K] and `lora_B` [N, r] to each target's module and puts their product onto the
module's present forward, so it comes last: after `train_in` or `pack`, where those apply. No name changes; the base
needs no gradient afterwards, and gradients flow through it to adapters of earlier layers.

A is random by the seed and B zero, so that a new adapter changes nothing. Values are BF16 on both sides once they
have been rounded (trainer) or loaded (rollout); the arithmetic is FP32, in one order on both sides.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from syncline.contract.adapters import DOWN, UP, tensor_names
from syncline.contract.plan import adapter_targets
from syncline.contract.precision import Adapter
from syncline.reference.packed import PackedLinear
from syncline.reference.state import StatePlan, Window


class CannotAdapt(ValueError):
    """A target that can have no adapter in this model. The message names it."""


class Adapters:
    """The adapters of one model.

    state        windows of the adapter tensors by checkpoint name, sorted; without the base's
    parameters   the same tensors by their names in the model: all that trains
    """

    def __init__(
        self, adapter: Adapter, windows: Mapping[str, Window], parameters: Mapping[str, nn.Parameter]
    ) -> None:
        self.scale = adapter.scale()
        self.state = StatePlan(windows=dict(sorted(windows.items())), ties=())
        self.parameters = dict(parameters)
        self._on = True

    @property
    def on(self) -> bool:
        """Whether forwards add the adapters' product now."""
        return self._on

    @contextmanager
    def disabled(self) -> Iterator[None]:
        """Inside, the model is its base alone: the reference policy of a LoRA job."""
        before, self._on = self._on, False
        try:
            yield
        finally:
            self._on = before

    def views(self) -> dict[str, Tensor]:
        """Checkpoint name -> the live tensor, without gradient."""
        return {name: self.parameters[w.owner].detach() for name, w in self.state.windows.items()}

    def whole(self, base: StatePlan) -> StatePlan:
        """The plan of base and adapter together."""
        return StatePlan(windows=dict(sorted((base.windows | self.state.windows).items())), ties=base.ties)

    def nbytes(self) -> int:
        """Bytes of the adapter tensors."""
        return sum(p.numel() * p.element_size() for p in self.parameters.values())


def attach(model: nn.Module, state: StatePlan, adapter: Adapter, seed: int) -> Adapters:
    """Give `model`, whose base has the plan `state`, the adapters of `adapter`. Freezes everything else.

    seed   of `initial`

    Raises `BadPlan` (patterns, shapes, rank) or `CannotAdapt` naming a target that is no linear layer of its own.
    """
    shapes = {name: window.shape for name, window in state.windows.items()}
    begins = initial(adapter, shapes, seed)
    model.requires_grad_(False)
    windows: dict[str, Window] = {}
    parameters: dict[str, nn.Parameter] = {}
    modules: list[tuple[nn.Module, str]] = []
    for name in adapter_targets(adapter, shapes):
        window = state.windows[name]
        modules.append((_linear(model, name, window), name))
        path = window.owner.removesuffix(".weight")
        for leaf, written in zip((DOWN, UP), tensor_names(name), strict=True):
            values = begins[written]
            owner = f"{path}.{leaf}"
            r, c = values.shape
            windows[written] = Window(owner=owner, shape=(r, c), stride=(c, 1), offset=0)
            parameters[owner] = nn.Parameter(values.to(_device(modules[-1][0])))
    adapters = Adapters(adapter, windows, parameters)
    for module, name in modules:
        path = state.windows[name].owner.removesuffix(".weight")
        module.register_parameter(DOWN, parameters[f"{path}.{DOWN}"])
        module.register_parameter(UP, parameters[f"{path}.{UP}"])
        module.forward = partial(_forward, adapters, module, module.forward)
    return adapters


def initial(adapter: Adapter, shapes: Mapping[str, tuple[int, ...]], seed: int) -> dict[str, Tensor]:
    """Every adapter tensor of a base with tensors `shapes` as it begins, FP32, by checkpoint name. Raises `BadPlan`.

    seed   of A: Kaiming uniform, each target drawn in the order of names
    """
    generator = torch.Generator().manual_seed(seed)
    out: dict[str, Tensor] = {}
    for name in adapter_targets(adapter, shapes):
        n, k = shapes[name]
        down, up = tensor_names(name)
        bound = k**-0.5  # Kaiming uniform with a = sqrt(5), as peft draws
        out[down] = torch.empty(adapter.rank, k).uniform_(-bound, bound, generator=generator)
        out[up] = torch.zeros(n, adapter.rank)
    return out


def _linear(model: nn.Module, name: str, window: Window) -> nn.Module:
    """The linear layer whose whole weight is the checkpoint tensor `name`."""
    path, _, leaf = window.owner.rpartition(".")
    module = model.get_submodule(path)
    plain = type(module) is nn.Linear or isinstance(module, PackedLinear)
    if not plain or leaf != "weight":
        raise CannotAdapt(
            f"adapter: target {name} lies in {window.owner} of {type(module).__name__}, which is no plain linear layer"
        )
    linear: Any = module
    whole = Window(
        owner=window.owner, shape=(linear.out_features, linear.in_features), stride=window.stride, offset=0
    )
    if window != whole or window.stride != (linear.in_features, 1):
        raise CannotAdapt(f"adapter: target {name} is a part of {window.owner}, which other tensors share")
    if hasattr(module, DOWN):
        raise CannotAdapt(f"adapter: target {name} has an adapter already")
    return module


def _device(module: nn.Module) -> torch.device:
    weight: Any = module.weight
    device: torch.device = weight.device
    return device


def _forward(adapters: Adapters, module: nn.Module, base: Any, x: Tensor) -> Tensor:
    y: Tensor = base(x)
    if not adapters.on:
        return y
    down, up = module.get_parameter(DOWN), module.get_parameter(UP)
    return y + adapters.scale * F.linear(F.linear(x, down), up)
