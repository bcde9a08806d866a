"""What a step really used: dtypes and bytes as the ranks told them of the tensors that exist."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from syncline.contract.adapters import is_adapter
from syncline.contract.job import JobSpec
from syncline.contract.precision_trace import Component, ComponentTrace, Held, Use
from syncline.trainer.engines.megatron.wire import Answer, ModelFacts

_OPERANDS: dict[Component, str] = {
    "fprop": "X original, W original",
    "dgrad": "G_Y original, W original",
    "wgrad": "G_Y original, X original",
}


def gemms(model: ModelFacts, answers: Sequence[Answer]) -> tuple[ComponentTrace, ...]:
    """FProp, DGrad and WGrad: low-bit ones as they were metered, and Megatron's wide ones on all other parameters."""
    return tuple(
        ComponentTrace(
            component=component,
            uses=(*_low_bit(component, model, answers), *_wide(component, model, answers)),
            bytes=_bytes(component, answers),
        )
        for component in _OPERANDS
    )


def _low_bit(component: Component, model: ModelFacts, answers: Sequence[Answer]) -> Iterator[Use]:
    """Each tensor counts once, however many ranks hold a part of it."""
    seen: dict[tuple[str, str, str, str], set[str]] = {}
    for ran in (ran for answer in answers for ran in answer.ran if ran.which == component):
        seen.setdefault((ran.family, ran.operands, ran.kernel, ran.encoded), set()).add(ran.tensor)
    for (family, operands, kernel, encoded), tensors in sorted(seen.items()):
        yield Use(
            family=family,
            tensors=len(tensors),
            encoded=encoded or ("X as it came" if component == "wgrad" else model.values),
            operands=operands,
            kernel=kernel,
            persistent=model.values,
            communicated=model.dtype if component == "fprop" else "",
        )


def _wide(component: Component, model: ModelFacts, answers: Sequence[Answer]) -> Iterator[Use]:
    low = {ran.tensor for answer in answers for ran in answer.ran}
    adapter = sum(is_adapter(name) for name in model.shapes)
    for family, tensors in (("", len(model.shapes) - adapter - len(low)), ("adapter", adapter)):
        frozen = adapter and not family and component == "wgrad"
        if tensors and not frozen:
            yield Use(
                family=family,
                tensors=tensors,
                encoded="X as it came" if component == "wgrad" else model.values,
                operands=_OPERANDS[component],
                kernel=f"wide {model.dtype}",
                persistent=model.values,
                communicated=model.dtype if component == "fprop" else "",
            )


def _bytes(component: Component, answers: Sequence[Answer]) -> dict[Held, int]:
    kinds: dict[str, tuple[Held, ...]] = {"fprop": ("wide", "adapter"), "wgrad": ("gradients",)}
    held = {kind: _summed(answers, kind) for kind in kinds.get(component, ())}
    return {kind: size for kind, size in held.items() if size or kind != "adapter"}


def optimizer(model: ModelFacts, answers: Sequence[Answer], stepped: bool, spec: JobSpec) -> ComponentTrace:
    """The optimizer after it has stepped, or been skipped."""
    names = {"adamw": "AdamW", "sgd": "SGD"}
    use = Use(
        family="adapter" if len(model.trained) < len(model.shapes) else "",
        tensors=len(model.trained),
        encoded=f"master fp32, moments {'fp32' if _summed(answers, 'moments') else 'none'}",
        operands="gradient, master, moments",
        kernel=f"{names[spec.optimizer.name]}, each master on one rank"
        if stepped
        else "none: the step was skipped",
        persistent="fp32",
        communicated=model.dtype,
    )
    held: dict[Held, int] = {kind: _summed(answers, kind) for kind in ("master", "moments")}
    return ComponentTrace(component="optimizer", uses=(use,), bytes={k: n for k, n in held.items() if n})


def _summed(answers: Sequence[Answer], kind: Held) -> int:
    return sum(answer.held.get(kind, 0) for answer in answers)
