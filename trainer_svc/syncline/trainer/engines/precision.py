"""The contract's numerics around one awake model of the torch engine, and what a step really used of them.

The trace is read from what ran: GEMMs as the swapped modules metered them, dtypes and values of the tensors that
exist, bytes of the copies that are held. Nothing in it is copied from the contract.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext

import msgspec
import torch
from torch import Tensor

from syncline.contract.plan import resolve
from syncline.contract.precision import PrecisionContract
from syncline.contract.precision_trace import ComponentTrace, Held, Use
from syncline.numerics.gemm import quantize_stack
from syncline.numerics.operands import GemmName
from syncline.numerics.quantized import dequantize
from syncline.reference.model import LoadedModel
from syncline.reference.trained import LowBit, Trained, train_in
from syncline.trainer.engines.state import Gathered, Live, Sizes

_GEMMS: tuple[GemmName, ...] = ("fprop", "dgrad", "wgrad")


def check_contract(contract: PrecisionContract) -> None:
    """Raise `ValueError` naming the key of what the torch engine does not carry out."""
    where, trainer = f"precision contract {contract.name!r}", contract.trainer
    if contract.compute == "bf16" and (trainer.parameters, contract.rollout.wide) != ("bf16", "bf16"):
        raise ValueError(f"{where}: compute 'bf16' needs trainer.parameters and rollout.wide 'bf16' too")
    if contract.compute == "bf16" and contract.adapter is not None:
        raise ValueError(f"{where}: compute 'bf16' with an adapter is not offered: its products are FP32")
    if trainer.adam_offload:
        raise ValueError(f"{where}: trainer.adam_offload: the torch engine keeps Adam where the model is")
    if trainer.gather == "fp8_block":
        if trainer.parameters != "bf16":
            raise ValueError(
                f"{where}: trainer.gather 'fp8_block' with trainer.parameters 'fp32': the torch engine's FP32 "
                "parameters are the masters, which nothing may round"
            )
        if not any(family.weight.format == "fp8_block" for family in contract.families):
            raise ValueError(f"{where}: trainer.gather 'fp8_block': no family has that format")


def elements(contract: PrecisionContract, sizes: Sizes, reference: bool) -> int:
    """FP32 elements that a trainer of `sizes` holds, at most. `reference`: it compares with one."""
    # of low-bit weights codes, and values that they stand for
    model = sizes.parameters * (3 if contract.families else 1)
    # masters, two moments and gradients of what trains; where the model's values are not the masters, both
    trained = 4 if contract.trainer.parameters == "bf16" else 3
    if contract.adapter is not None:
        # without its adapter the model is its own reference
        return model + (trained + 1) * contract.adapter.rank * sizes.per_rank
    return model + sizes.parameters * (trained + (1 if reference else 0))


class Numerics:
    """One awake model in its contract's numerics.

    Raises `BadPlan` or `CannotTrain`, both `ValueError`s, if the contract does not fit the model.
    """

    def __init__(self, loaded: LoadedModel, contract: PrecisionContract) -> None:
        shapes = {name: window.shape for name, window in loaded.plan.windows.items()}
        plan = resolve(contract, shapes)
        self._contract, self._names = contract, len(shapes)
        self.exports = (
            plan if contract.convert.where == "trainer_rank" else None
        )  # what this rank converts by
        self._trained: Trained | None = None
        if plan.low_bit():
            self._trained = train_in(loaded.model, loaded.plan, plan, contract)
        self._gathered: dict[str, int] = {}  # bytes of what was gathered as codes and scales

    # ---- parameters -----------------------------------------------------------------------------------------
    @property
    def gathers(self) -> Gathered | None:
        """What other ranks would receive of a master, if that is not its own values."""
        return self._through_codes if self._contract.trainer.gather == "fp8_block" else None

    def _through_codes(self, name: str, value: Tensor) -> Tensor:
        weight = self._weights().get(name)
        if weight is None or weight.how.weight.format != "fp8_block":
            return value
        codes = quantize_stack(value.detach().view(weight.shape), weight.how.weight, name)
        self._gathered[name] = codes.nbytes()
        return dequantize(codes).view(value.shape)

    @contextmanager
    def as_rollout(self, live: Live) -> Iterator[None]:
        """Inside, the model is what rollout will hold of the present weights, and multiplies as rollout does."""
        # an artefact is made of the export as it is; a bridge carries BF16 tensors
        exact = frozenset(self._weights()) if self._contract.convert.route == "artefact" else frozenset()
        rounded = live.rounded_for_rollout(exact) if self._contract.rollout.wide == "bf16" else nullcontext()
        with rounded, nullcontext() if self._trained is None else self._trained.as_rollout():
            yield

    def _weights(self) -> dict[str, LowBit]:
        return {} if self._trained is None else self._trained.weights

    # ---- the trace ------------------------------------------------------------------------------------------
    def begin(self) -> None:
        """A step begins: forget what was metered."""
        if self._trained is not None:
            self._trained.meter.reset()

    def gemms(self, live: Live, whole: bool) -> tuple[ComponentTrace, ...]:
        """FProp, DGrad and WGrad of the step so far; to be asked for while the gradients exist.

        whole   every pass ran to its end. Raises `NotMultiplied` then, naming a weight that FProp never read
        """
        if self._trained is not None and whole:
            self._trained.check_multiplied()
        parameters = dict(live.loaded.model.named_parameters())
        values = {name: _values(p) for name, p in parameters.items()}
        adapter = frozenset[str]() if live.base is None else frozenset(live.base.adapters.parameters)
        return tuple(self._gemm(which, parameters, values, adapter) for which in _GEMMS)

    def optimizer(self, live: Live, stepped: bool) -> ComponentTrace:
        """The optimizer, after it has stepped, or been skipped."""
        moments = [t for state in live.optimizer.state.values() for t in state.values() if _is_moment(t)]
        masters = list(live.masters.values())
        kernel = type(live.optimizer).__name__ if stepped else "none: the step was skipped"
        use = Use(
            family="" if live.base is None else "adapter",
            tensors=len(masters),
            encoded=f"master {_dtypes(masters)}, moments {_dtypes(moments)}",
            operands="gradient, master, moments",
            kernel=kernel,
            persistent=_dtypes(masters),
            communicated=self._communicated(),
        )
        held: dict[Held, int] = {"master": _bytes(masters), "gathered": self._gathered_bytes(live)}
        if moments:
            held["moments"] = _bytes(moments)
        return ComponentTrace(component="optimizer", uses=(use,), bytes=held)

    def _gemm(
        self,
        which: GemmName,
        parameters: Mapping[str, Tensor],
        values: Mapping[str, str],
        adapter: frozenset[str],
    ) -> ComponentTrace:
        weights = self._weights()
        seen = {} if self._trained is None else self._trained.meter.seen[which]
        uses: dict[Use, int] = {}
        for name, rans in seen.items():
            for ran in rans:
                use = Use(
                    family=weights[name].family,
                    tensors=0,
                    encoded=ran.encoded or ("X as it came" if which == "wgrad" else values[name]),
                    operands=ran.operands,
                    kernel=ran.kernel,
                    persistent=values[name],
                    communicated=self._communicated(name) if which == "fprop" else "",
                )
                uses[use] = uses.get(use, 0) + len(weights[name].names)
        rest = {n: p for n, p in parameters.items() if n not in weights and n not in adapter}
        mine = {n: p for n, p in parameters.items() if n in adapter}
        total = [_counted(use, count) for use, count in uses.items()]
        return ComponentTrace(
            component=which,
            uses=(
                *sorted(total, key=lambda use: (use.family, use.operands)),
                *self._wide(which, rest, values),
                *self._wide(which, mine, values, "adapter"),
            ),
            bytes=self._held(which, parameters, adapter),
        )

    def _wide(
        self, which: GemmName, rest: Mapping[str, Tensor], values: Mapping[str, str], family: str = ""
    ) -> tuple[Use, ...]:
        """What no family names, and the adapter: torch's own operations on the parameters as they are."""
        if which == "wgrad":
            rest = {n: p for n, p in rest.items() if p.grad is not None}
        if not rest:
            return ()
        stored = " + ".join(sorted({values[name] for name in rest}))
        operands = {"fprop": "X original, W original", "dgrad": "G_Y original, W original"}
        use = Use(
            family=family,
            tensors=len(rest),
            encoded="X as it came" if which == "wgrad" else stored,
            operands=operands.get(which, "G_Y original, X original"),
            kernel=f"wide {_dtypes(list(rest.values()))}",
            persistent=stored,
            communicated=self._communicated() if which == "fprop" else "",
        )
        return (use,)

    def _held(
        self, which: GemmName, parameters: Mapping[str, Tensor], adapter: frozenset[str]
    ) -> dict[Held, int]:
        held: dict[Held, int] = {}
        for weight in self._weights().values():
            for kind, size in weight.bytes(which).items():
                held[kind] = held.get(kind, 0) + size
        if which == "fprop":
            held["wide"] = _bytes(p for n, p in parameters.items() if n not in adapter)
            if adapter:
                held["adapter"] = _bytes(parameters[n] for n in adapter)
        if which == "wgrad":
            held["gradients"] = _bytes(p.grad for p in parameters.values() if p.grad is not None)
        if self._trained is not None:
            held["workspace"] = self._trained.meter.workspace[which]
            if which == "wgrad":
                held["saved_activations"] = self._trained.meter.saved
        return held

    def _communicated(self, name: str = "") -> str:
        if name in self._gathered:
            return "E4M3 and FP32 scales"
        trainer = self._contract.trainer
        return "fp32" if "fp32" in (trainer.parameters, trainer.gather) else "bf16"

    def _gathered_bytes(self, live: Live) -> int:
        """One copy of what each trained parameter is exchanged as, per update."""
        wide = 4 if self._communicated() == "fp32" else 2
        return sum(
            self._gathered.get(name, wide * t.numel()) for name, t in live.masters.items() if t.requires_grad
        )


def _counted(use: Use, count: int) -> Use:
    return msgspec.structs.replace(use, tensors=count)


def _is_moment(value: object) -> bool:
    return isinstance(value, Tensor) and value.dim() > 0


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)


def _dtypes(tensors: Iterable[Tensor]) -> str:
    short = {torch.float32: "fp32", torch.bfloat16: "bf16"}
    return "+".join(sorted({short.get(t.dtype, str(t.dtype)) for t in tensors})) or "none"


def _values(t: Tensor) -> str:
    """What the numbers are, whatever dtype holds them: BF16 values have nothing in the lower half of an FP32."""
    rounded = t.dtype == torch.bfloat16 or not bool((t.detach().view(torch.int32) & 0xFFFF).any())
    return f"{'bf16' if rounded else 'fp32'} values in {_dtypes([t])}"
