"""Routers of a model: which experts each token goes to, caught in a forward pass or prescribed to it.

*Replay* prescribes the choice and nothing else: each router computes its scores from its own weights and weighs the
prescribed experts by its family's own rule (softmax or sigmoid, bias in the choice alone, normalisation, scaling), so
gradients reach it as ever. No family's rule is copied here: inside a router's forward the one `topk` over all experts
is answered with the prescribed ids and the router's own values at them.

Legend: N tokens (rows x columns of the batch, row by row), L routing layers in order, K experts per token, E experts.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Literal, Self, cast

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode


class CannotReplay(ValueError):
    """A model, a router or a record that replay cannot be exact for. The message names it."""


@dataclass(frozen=True)
class RecordedRoutes:
    """Expert ids as a trajectory carries them: little-endian, C order, `shape` [tokens fed, L, K]."""

    data: bytes
    shape: tuple[int, int, int]
    dtype: Literal["u1", "u2"]

    def ids(self) -> Tensor:
        """int64 [tokens fed, L, K]."""
        kind = torch.uint8 if self.dtype == "u1" else torch.uint16
        return torch.frombuffer(bytearray(self.data), dtype=kind).reshape(self.shape).long()


def routers(model: nn.Module) -> dict[str, nn.Module]:
    """The model's routers by name, in layer order: modules whose class is called ...Router."""
    return {
        name: module
        for name, module in model.named_modules()
        if type(module).__name__.lower().endswith("router")
    }


@dataclass(frozen=True)
class Routing:
    """How a model routes: L layers, K experts per token, E experts to choose from. All 0: it does not route."""

    layers: int
    topk: int
    experts: int

    @classmethod
    def of(cls, model: nn.Module) -> Self:
        """Read from the model's routers. Raises `CannotReplay` naming the router that differs from the first."""
        found = routers(model)
        shapes = {name: (_topk(router), _experts(router)) for name, router in found.items()}
        for name, shape in shapes.items():
            if shape != next(iter(shapes.values())):
                raise CannotReplay(
                    f"router {name} chooses {shape[0]} of {shape[1]} experts, the first does not"
                )
        topk, experts = next(iter(shapes.values()), (0, 0))
        return cls(len(found), topk, experts)

    def check(self, ids_NLK: Tensor, what: str) -> None:
        """Raise `CannotReplay` naming `what` unless `ids_NLK` are K different experts in each layer."""
        if ids_NLK.dim() != 3 or tuple(ids_NLK.shape[1:]) != (self.layers, self.topk):
            raise CannotReplay(
                f"{what}: expert ids of shape {list(ids_NLK.shape)}, the model routes in {self.layers} layers to "
                f"{self.topk} experts"
            )
        if not ids_NLK.numel():
            return
        low, high = int(ids_NLK.min()), int(ids_NLK.max())
        if low < 0 or high >= self.experts:
            raise CannotReplay(
                f"{what}: expert {low if low < 0 else high}, the model has experts 0 to {self.experts - 1}"
            )
        ordered = ids_NLK.sort(dim=-1).values
        twice = (ordered[..., 1:] == ordered[..., :-1]).any(dim=-1).nonzero()
        if len(twice):
            token, layer = twice[0].tolist()
            raise CannotReplay(f"{what}: token {token} goes to one expert twice in routing layer {layer}")


def _experts(router: nn.Module) -> int:
    return cast(Tensor, router.weight).shape[0]


def _topk(router: nn.Module) -> int:
    return cast(int, cast(Any, router).top_k)


# ---- catching -----------------------------------------------------------------------------------------------
class _Catching(threading.local):
    """What one thread catches now; None: nothing."""

    caught: list[Tensor] | None = None


class RouteTap:
    """Expert ids of a forward pass, caught at the model's routers in layer order.

    Each thread catches its own passes: a version that is staged again is scored in a second one while it serves.
    """

    def __init__(self, model: nn.Module) -> None:
        self.routing = Routing.of(model)
        self.layers, self.topk = self.routing.layers, self.routing.topk
        self.dtype = torch.uint8 if self.routing.experts <= 256 else torch.uint16
        self._here = _Catching()
        for router in routers(model).values():
            router.register_forward_hook(self._hook)

    def _hook(self, module: nn.Module, args: Any, output: tuple[Tensor, ...]) -> None:
        if self._here.caught is not None:
            self._here.caught.append(output[-1])

    @contextmanager
    def catching(self, wanted: bool) -> Iterator[list[Tensor]]:
        """Inside, each router appends its ids [tokens, topk], if `wanted` and the model routes."""
        caught: list[Tensor] = []
        self._here.caught = caught if wanted and self.layers else None
        try:
            yield caught
        finally:
            self._here.caught = None

    def stacked(self, caught: Sequence[Tensor]) -> Tensor:
        """[tokens, layers, topk] of `dtype`. Raises `RuntimeError` if a router ran twice or never."""
        if len(caught) != self.layers:
            raise RuntimeError(
                f"{len(caught)} router calls in a forward pass of {self.layers} routing layers"
            )
        return torch.stack(list(caught), dim=1).to(self.dtype)


# ---- replay -------------------------------------------------------------------------------------------------
class _Choice(TorchFunctionMode):
    """Answers a router's `topk` over all experts with `ids_NK`; keeps what it would have been in `free`."""

    def __init__(self, ids_NK: Tensor, experts: int) -> None:
        super().__init__()
        self._ids_NK, self._experts = ids_NK, experts
        self.free: list[Tensor] = []

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if func not in (torch.topk, torch.Tensor.topk):
            return out
        scores = args[0] if args else (kwargs or {})["input"]
        # group-limited routers also choose groups; those scores have another shape
        if scores.shape[1:] != (self._experts,) or out[1].shape != self._ids_NK.shape:
            return out
        self.free.append(out[1])
        return torch.return_types.topk((scores.gather(1, self._ids_NK), self._ids_NK))


@contextmanager
def replaying(model: nn.Module, ids_NLK: Tensor) -> Iterator[list[Tensor]]:
    """Inside, one forward pass of `model` routes each token to `ids_NLK` (int64, on the model's device).

    ids_NLK   one row per token of the padded batch; pads take any K different experts
    Yields a list to which each router appends the ids [N, K] that it would have chosen freely, given what the
    replayed layers below made of its input. Raises `CannotReplay` if the model does not route, if the ids do not fit
    it, or if a router did not take them; `RuntimeError` if a router ran twice, or not at all.
    """
    found = routers(model)
    if not found:
        raise CannotReplay(f"{type(model).__name__} does not route: there is nothing to replay")
    Routing.of(model).check(ids_NLK, "replay")
    free: list[Tensor] = []
    ran: list[str] = []
    with ExitStack() as stack:
        for layer, (name, router) in enumerate(found.items()):
            stack.enter_context(_prescribed(name, router, ids_NLK[:, layer].contiguous(), free, ran))
        yield free
    if ran != list(found):
        raise RuntimeError(f"routers ran in the order {ran}, the model has {list(found)}")


@contextmanager
def _prescribed(
    name: str, router: nn.Module, ids_NK: Tensor, free: list[Tensor], ran: list[str]
) -> Iterator[None]:
    """Inside, the router's forward chooses `ids_NK`."""
    own, replaced = router.forward, vars(router).get("forward")

    def forward(*args: Any, **kwargs: Any) -> Any:
        with _Choice(ids_NK, _experts(router)) as choice:
            out = own(*args, **kwargs)
        taken = out[-1] is ids_NK or torch.equal(out[-1], ids_NK)  # a comparison waits for the device
        if len(choice.free) != 1 or not taken:
            raise CannotReplay(
                f"router {name} ({type(router).__name__}) does not choose its experts by one topk over all of "
                f"them for {ids_NK.shape[0]} tokens: its routes cannot be prescribed"
            )
        free.append(choice.free[0].detach())
        ran.append(name)
        return out

    router.forward = forward
    try:
        yield
    finally:
        if replaced is None:
            del router.forward
        else:
            router.forward = replaced


@torch.no_grad()
def check_replayable(model: nn.Module) -> None:
    """Raise `CannotReplay` naming the model or router that cannot be replayed. Runs each router on one token."""
    found = routers(model)
    if not found:
        raise CannotReplay(f"{type(model).__name__} does not route: there is nothing to replay")
    for name, router in found.items():
        weight = cast(Tensor, router.weight)
        hidden = torch.zeros(1, weight.shape[1], dtype=weight.dtype, device=weight.device)
        last = torch.arange(weight.shape[0] - _topk(router), weight.shape[0], device=weight.device)[None]
        with _prescribed(name, router, last, [], []):
            router(hidden)
