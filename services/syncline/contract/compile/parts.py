"""What converter and trainer do with each tensor of a plan, and what both compilers of flags share."""

from __future__ import annotations

import msgspec

from syncline.contract.artefact import Part, parts
from syncline.contract.compile import CannotCompile
from syncline.contract.plan import PlanEntry, PrecisionPlan, matches, sensitive
from syncline.contract.precision import Family, Gemm, PrecisionContract
from syncline.contract.schemes import Scheme


class Conversion(msgspec.Struct, frozen=True, kw_only=True):
    """One exported tensor and what becomes of it. `weight` None: it stays wide, and `parts` is that one tensor."""

    source: str
    family: str
    weight: Scheme | None
    outer: str  # id of the tensors under one outer scale; empty: its own
    parts: tuple[Part, ...]


class TensorGemms(msgspec.Struct, frozen=True, kw_only=True):
    """How the trainer treats one tensor. `wgrad` None: it is frozen, so there is none and no optimizer state.

    adapter   a LoRA pair is trained beside it
    """

    name: str
    family: str
    fprop: Gemm
    dgrad: Gemm
    wgrad: Gemm | None
    adapter: bool


def converter_plan(contract: PrecisionContract, plan: PrecisionPlan) -> tuple[Conversion, ...]:
    """One conversion per exported tensor, in the plan's order. Raises `ValueError` for a plan of another contract."""
    check_digest(contract, plan)
    dtype = {"bf16": "BF16", "fp32": "F32"}[contract.rollout.wide]
    made = []
    for entry in plan.entries:
        wide = Part(name=entry.name, role="codes", dtype=dtype, shape=entry.shape, source=entry.name)
        low = entry.weight is not None and contract.convert.route == "artefact"
        conversion = Conversion(
            source=entry.name,
            family=entry.family,
            weight=entry.weight if low else None,
            outer=entry.outer if low else "",
            parts=parts(entry) if low else (wide,),
        )
        made.append(conversion)
    return tuple(made)


def trainer_plan(contract: PrecisionContract, plan: PrecisionPlan) -> tuple[TensorGemms, ...]:
    """The operands of each tensor's three GEMMs, in the plan's order. Raises `ValueError` as `converter_plan` does.

    Of tensors that are no linear weights, `wgrad` says whether they train; the operands are the original ones.
    """
    check_digest(contract, plan)
    trainer, adapter = contract.trainer, contract.adapter
    made = []
    for entry in plan.entries:
        low = entry.weight is not None
        own = trainer.wgrad if low else Gemm()
        gemms = TensorGemms(
            name=entry.name,
            family=entry.family,
            fprop=trainer.fprop if low else Gemm(),
            dgrad=trainer.dgrad if low else Gemm(),
            wgrad=None if adapter is not None else own,
            adapter=adapter is not None and any(matches(target, entry.name) for target in adapter.targets),
        )
        made.append(gemms)
    return tuple(made)


def check_digest(contract: PrecisionContract, plan: PrecisionPlan) -> None:
    """Raises `ValueError` if `plan` was resolved from another contract."""
    if plan.contract != contract.digest():
        raise ValueError(
            f"the plan is of contract {plan.contract[:12]}, and {contract.name} is {contract.digest()[:12]}"
        )


def one_scheme(contract: PrecisionContract, component: str) -> Family | None:
    """The family whose schemes all others share; None without families. `component` has settings for one alone."""
    families = contract.families
    for i, family in enumerate(families[1:], 1):
        for key, own, first in (
            ("weight", family.weight, families[0].weight),
            ("activation", family.activation, families[0].activation),
        ):
            if own != first:
                raise CannotCompile(
                    f"families.{i}.{key}", f"{component} has one scheme for all, and families.0 has another"
                )
    return families[0] if families else None


def linear(entry: PlanEntry) -> bool:
    """Whether `entry` is a matrix that a linear layer multiplies by, routers and the output head included."""
    return (
        len(entry.shape) == 2
        and entry.name.endswith(".weight")
        and sensitive(entry.name) not in ("embedding", "norm")
    )


def module(name: str) -> str:
    """The module whose weight `name` is."""
    return name.removesuffix(".weight")
