"""What contradicts itself inside one `PrecisionContract`, without any model, hardware or job. Each rule is a function.

A contract that passes says one thing per key; whether a model fits it is `plan.resolve`, whether a machine can run it
is `support.decide`, and whether its values agree with settings written elsewhere is `foreign.cross_check`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

from syncline.contract.job import Problem
from syncline.contract.precision import Family, Gemm, PrecisionContract
from syncline.contract.schemes import problem

FOUR_BIT = frozenset({"int4", "mxfp4", "nvfp4"})
_GEMMS = ("fprop", "dgrad", "wgrad")


def contradictions(contract: PrecisionContract) -> list[Problem]:
    """Everything in `contract` that cannot be true. Paths count from the contract: `families.0.weight`."""
    return [found for rule in RULES for found in rule(contract)]


def _problem(path: str, message: str, hint: str) -> Problem:
    return Problem(path=path, message=message, hint=hint)


def _gemm(contract: PrecisionContract, name: str) -> Gemm:
    trainer = contract.trainer
    return {"fprop": trainer.fprop, "dgrad": trainer.dgrad, "wgrad": trainer.wgrad}[name]


# ---- families -------------------------------------------------------------------------------------------------
def _names(contract: PrecisionContract) -> Iterator[Problem]:
    if not contract.name:
        yield _problem("name", "is empty", "give the contract a name")
    seen: set[str] = set()
    for i, family in enumerate(contract.families):
        if not family.name:
            yield _problem(f"families.{i}.name", "is empty", "the empty name means: no family, wide")
        if family.name in seen:
            yield _problem(f"families.{i}.name", f"{family.name!r} is a family already", "one name each")
        seen.add(family.name)
        if not family.match:
            yield _problem(f"families.{i}.match", "is empty", "name the tensors, or leave the family out")


def _schemes(contract: PrecisionContract) -> Iterator[Problem]:
    for i, family in enumerate(contract.families):
        for key, scheme in (("weight", family.weight), ("activation", family.activation)):
            if scheme is not None and (wrong := problem(scheme)):
                yield _problem(f"families.{i}.{key}", wrong, "name a shipped scheme, or correct the table")
        if family.weight.outer == "row":
            yield _problem(
                f"families.{i}.weight.outer",
                "'row' is for activations: a stored weight has one outer scale",
                "use 'tensor', or fuse",
            )
        activation = family.activation
        if activation is not None and activation.format == "nvfp4" and activation.outer != "row":
            yield _problem(
                f"families.{i}.activation.outer",
                "'tensor' makes a token's codes depend on the other tokens of its batch",
                "use scheme 'nvfp4_row'",
            )
        if activation is not None and activation.rows != 1:
            yield _problem(
                f"families.{i}.activation.rows",
                f"{activation.rows} rows under one scale make a token's codes depend on its neighbours",
                "use 1, as scheme 'fp8_tile' does",
            )


def _pairs(contract: PrecisionContract) -> Iterator[Problem]:
    """A kernel that reads codes on both sides walks both in the same blocks along K."""
    if "codes" not in _readers(contract):
        return
    for i, family in enumerate(contract.families):
        weight, activation = family.weight, family.activation
        if activation is None:
            continue
        if weight.format != activation.format:
            yield _problem(
                f"families.{i}.activation.format",
                f"{activation.format} against weights in {weight.format}: no kernel multiplies the two",
                "one format for both, or leave the activation wide",
            )
        elif weight.columns != activation.columns:
            yield _problem(
                f"families.{i}.activation.columns",
                f"groups of {activation.columns} along K against {weight.columns} of the weight",
                f"use {weight.columns}, or change families.{i}.weight.columns",
            )


def _readers(contract: PrecisionContract) -> set[str]:
    read: set[str] = {contract.rollout.kernel}
    for name in _GEMMS:
        gemm = _gemm(contract, name)
        read |= {gemm.left, gemm.right}
    return read


def _fused(contract: PrecisionContract) -> Iterator[Problem]:
    for i, family in enumerate(contract.families):
        if family.fuse and family.weight.format != "nvfp4":
            yield _problem(
                f"families.{i}.fuse", f"{family.weight.format} has no outer scale to share", "leave it out"
            )
        members = [name for group in family.fuse for name in group]
        if len(members) != len(set(members)):
            yield _problem(f"families.{i}.fuse", "names a module twice", "each module has one outer scale")
        for j, group in enumerate(family.fuse):
            if len(group) < 2:
                yield _problem(f"families.{i}.fuse.{j}", "has no partner to share with", "name two or more")


# ---- GEMMs ----------------------------------------------------------------------------------------------------
def _sources(contract: PrecisionContract) -> Iterator[Problem]:
    """Each operand that is not the original needs something that it is quantised by."""
    weight_only = next((family for family in contract.families if family.activation is None), None)
    for name in _GEMMS:
        gemm = _gemm(contract, name)
        for side, operand in (("left", gemm.left), ("right", gemm.right)):
            if operand == "original":
                continue
            key = f"trainer.{name}.{side}"
            if not contract.families:
                yield _problem(key, f"{operand!r}, and no family is quantised", "use 'original'")
            elif _tensor(name, side) != "W" and weight_only is not None:
                yield _weight_only(key, operand, _tensor(name, side), weight_only)
    if contract.rollout.kernel == "codes" and not contract.families:
        yield _problem("rollout.kernel", "'codes', and no family is quantised", "use 'dequantised'")


def _tensor(name: str, side: str) -> str:
    """Which tensor a side of a GEMM is (seed section 3.2)."""
    if side == "left":
        return "X" if name == "fprop" else "G_Y"
    return "X" if name == "wgrad" else "W"


def _weight_only(key: str, operand: str, tensor: str, family: Family) -> Problem:
    return _problem(
        key,
        f"{operand!r} for {tensor}, and family {family.name} has no activation scheme",
        "use 'original', or give the family one",
    )


def _chain(contract: PrecisionContract) -> Iterator[Problem]:
    """`reconstructed` in the backward pass is what FProp's codes stand for: FProp must have made some."""
    trainer = contract.trainer
    for name in _GEMMS:
        gemm = _gemm(contract, name)
        if name == "fprop":
            for side, operand in (("left", gemm.left), ("right", gemm.right)):
                if operand == "requantised":
                    yield _problem(
                        f"trainer.fprop.{side}",
                        "'requantised' along FProp's own contraction is 'reconstructed'",
                        "use 'reconstructed'",
                    )
            continue
        if gemm.left == "reconstructed":
            yield _problem(
                f"trainer.{name}.left",
                "'reconstructed' for G_Y, which FProp never saw",
                "use 'original', 'requantised' or 'codes'",
            )
        source = trainer.fprop.right if name == "dgrad" else trainer.fprop.left
        if gemm.right == "reconstructed" and source == "original":
            side = "right" if name == "dgrad" else "left"
            yield _problem(
                f"trainer.{name}.right",
                f"'reconstructed', and trainer.fprop.{side} is 'original': there are no codes to reconstruct",
                f"use 'original' or 'requantised', or quantise trainer.fprop.{side}",
            )


def _kernels(contract: PrecisionContract) -> Iterator[Problem]:
    for name in _GEMMS:
        gemm = _gemm(contract, name)
        if gemm.left == "codes" and gemm.right != "codes":
            yield _problem(
                f"trainer.{name}.right",
                f"{gemm.right!r} beside codes on the left: no kernel reads codes of the left operand alone",
                "use 'codes' on both sides",
            )


# ---- what is held and moved -------------------------------------------------------------------------------------
def _gather(contract: PrecisionContract) -> Iterator[Problem]:
    trainer = contract.trainer
    if trainer.gather != "fp8_block":
        return
    if trainer.adam_offload:
        yield _problem(
            "trainer.gather",
            "'fp8_block' needs Transformer Engine's FusedAdam, and trainer.adam_offload puts Adam on the CPU",
            "gather 'bf16', or leave adam_offload out",
        )
    if contract.adapter is not None:
        yield _problem("trainer.gather", "'fp8_block', and the base is frozen", "gather 'bf16'")
    other = [family for family in contract.families if family.weight.format != "fp8_block"]
    if other:
        message = f"'fp8_block', and family {other[0].name} is {other[0].weight.format}"
        yield _problem("trainer.gather", message, "gather 'bf16'")
    elif not contract.families:
        yield _problem("trainer.gather", "'fp8_block', and no family is quantised", "gather 'bf16'")


def _bridge(contract: PrecisionContract) -> Iterator[Problem]:
    if contract.convert.route != "bf16_bridge":
        return
    for i, family in enumerate(contract.families):
        if family.weight.format in FOUR_BIT:
            yield _problem(
                "convert.route",
                f"'bf16_bridge' leaves the quantisation to the engine's loader, which has none for families.{i} "
                f"({family.weight.format})",
                "use 'artefact'",
            )
    if contract.trainer.parameters == "fp32" and contract.trainer.fprop.right != "original":
        yield _problem(
            "convert.route",
            "'bf16_bridge' rounds the FP32 parameters before rollout quantises them; FProp quantises them unrounded",
            "use 'artefact', or trainer.parameters 'bf16'",
        )


def _place(contract: PrecisionContract) -> Iterator[Problem]:
    """The bridge is the one route that ends in the worker's engine, and it ends nowhere else."""
    convert = contract.convert
    if (convert.route == "bf16_bridge") != (convert.where == "rollout_worker"):
        other = "'sync' or 'trainer_rank'" if convert.route == "artefact" else "'rollout_worker'"
        yield _problem(
            "convert.place",
            f"{convert.where!r}, and convert.route is {convert.route!r}",
            f"use {other}, or the other route",
        )


def _adapter(contract: PrecisionContract) -> Iterator[Problem]:
    adapter = contract.adapter
    if adapter is None:
        return
    if adapter.rank < 1:
        yield _problem("adapter.rank", f"{adapter.rank}", "use at least 1")
    if not (math.isfinite(adapter.alpha) and adapter.alpha > 0):
        yield _problem("adapter.alpha", f"{adapter.alpha}", "use a finite number above 0")
    if not adapter.targets:
        yield _problem("adapter.targets", "is empty: nothing would train", "name linear weights")
    if len(adapter.targets) != len(set(adapter.targets)):
        yield _problem("adapter.targets", "names a pattern twice", "once each")
    for side, operand in (("left", contract.trainer.wgrad.left), ("right", contract.trainer.wgrad.right)):
        if operand != "original":
            yield _problem(
                f"trainer.wgrad.{side}",
                f"{operand!r}, and the base is frozen under an adapter: its WGrad is never computed",
                "use 'original'; the adapter's own WGrad is wide",
            )


def _numbers(contract: PrecisionContract) -> Iterator[Problem]:
    tolerance, expected = contract.convert.tolerance, contract.expected
    if not (math.isfinite(tolerance) and tolerance > 0):
        hint = "use a finite number above 0: equal functions still add in another order"
        yield _problem("convert.tolerance", f"{tolerance}", hint)
    if not (math.isfinite(expected.low) and expected.low >= 0):
        yield _problem("expected.low", f"{expected.low}", "use a finite number, at least 0")
    if expected.high is not None and not (math.isfinite(expected.high) and expected.high >= expected.low):
        yield _problem("expected.high", f"{expected.high} is not above low {expected.low}", "low <= high")
    if contract.max_lag is not None and contract.max_lag < 0:
        yield _problem("max_lag", f"{contract.max_lag}", "use at least 0")


RULES: tuple[Callable[[PrecisionContract], Iterator[Problem]], ...] = (
    _names,
    _schemes,
    _pairs,
    _fused,
    _sources,
    _chain,
    _kernels,
    _gather,
    _bridge,
    _place,
    _adapter,
    _numbers,
)
