"""Whether a machine can carry out a contract: natively, by an emulation that has a name, or not at all."""

from __future__ import annotations

from typing import Literal

import msgspec

from syncline.contract.job import Problem
from syncline.contract.precision import Gemm, Hardware, PrecisionContract
from syncline.contract.schemes import Scheme
from syncline.contract.support_rules import (
    RULES,
    Evidence,
    FormatName,
    Framework,
    How,
    Kernel,
    ModelFamily,
    Path,
    Rule,
)

_WEAKEST: tuple[Evidence, ...] = ("run", "read", "unproven")


class Cell(msgspec.Struct, frozen=True, kw_only=True):
    """What one path makes of one family. `family` empty: everything that no family names. `rule` is why."""

    path: Path
    framework: Framework
    family: str
    format: FormatName
    kernel: Kernel
    how: How
    evidence: Evidence
    says: str
    key: str  # of the contract: what would have to change


class Decision(msgspec.Struct, frozen=True, kw_only=True):
    """`native`: every kernel exists. `emulation`: what does not exist is emulated, by name. `refused`: neither.

    `evidence` is that of the weakest cell.
    """

    hardware: Hardware
    kind: Literal["native", "emulation", "refused"]
    evidence: Evidence
    emulations: tuple[str, ...]
    refusals: tuple[str, ...]
    cells: tuple[Cell, ...]


def lookup(
    framework: Framework,
    hardware: Hardware,
    format: FormatName,
    kernel: Kernel,
    path: Path,
    model: ModelFamily | None = None,
) -> Rule:
    """The first rule that fits. `model` None: not known, so a rule about single models fits nothing."""
    for rule in RULES:
        if rule.framework != framework or (rule.models and model not in rule.models):
            continue
        asked = (
            (rule.hardware, hardware),
            (rule.formats, format),
            (rule.kernels, kernel),
            (rule.paths, path),
        )
        if all(not allowed or value in allowed for allowed, value in asked):
            return rule
    raise NoRule(f"no rule of the support matrix fits {framework} {hardware} {format} {kernel} {path}")


class NoRule(Exception):
    """The matrix has a hole. Cannot happen: the last rule of each framework fits everything."""


def decide(
    contract: PrecisionContract,
    hardware: Hardware,
    rollout: Framework = "reference",
    trainer: Framework = "reference",
    model: ModelFamily | None = None,
) -> Decision:
    """How `contract` runs on `hardware` with these frameworks. Never raises for a contract without contradictions."""
    found = tuple(_cells(contract, hardware, rollout, trainer, model))
    refusals = tuple(dict.fromkeys(_refusal(cell, hardware) for cell in found if cell.how == "none"))
    emulations = tuple(dict.fromkeys(cell.says for cell in found if cell.how == "emulation"))
    return Decision(
        hardware=hardware,
        kind="refused" if refusals else "emulation" if emulations else "native",
        evidence=max((cell.evidence for cell in found), key=_WEAKEST.index),
        emulations=emulations,
        refusals=refusals,
        cells=found,
    )


def problems(decision: Decision, emulation: bool) -> list[Problem]:
    """What keeps a job from running under `decision`. `emulation` False: emulated cells are refused too."""
    refused = [cell for cell in decision.cells if cell.how == "none"]
    listed = [Problem(path=c.key, message=_refusal(c, decision.hardware), hint=_hint(c)) for c in refused]
    if not emulation and decision.emulations:
        names = "; ".join(decision.emulations)
        message = f"false, and on {decision.hardware} this contract runs only as emulation: {names}"
        hint = "set it to true, or use hardware that has the kernels"
        listed.append(Problem(path="precision.emulation", message=message, hint=hint))
    return listed


def format_name(scheme: Scheme) -> FormatName:
    """How the matrix calls a scheme: blocks with power-of-two scales are told apart."""
    if scheme.format == "fp8_block" and scheme.rule == "pow2":
        return "fp8_block_pow2"
    return scheme.format


def gemm_kernel(gemm: Gemm) -> Kernel:
    """What multiplies a GEMM's operands."""
    if gemm.right == "codes":
        return "codes" if gemm.left == "codes" else "decoded"
    return "wide" if (gemm.left, gemm.right) == ("original", "original") else "qdq"


def _refusal(cell: Cell, hardware: Hardware) -> str:
    what = "wide values" if cell.format == "wide" else cell.format
    return (
        f"{cell.framework} has no {cell.kernel} kernel for {what} in {cell.path} on {hardware}: {cell.says}"
    )


def _hint(cell: Cell) -> str:
    if "before Blackwell" in cell.says:
        return "use hardware 'blackwell', or another format"
    return "choose another kernel or format, or other hardware"


def _cells(
    contract: PrecisionContract,
    hardware: Hardware,
    rollout: Framework,
    trainer: Framework,
    model: ModelFamily | None,
) -> list[Cell]:
    made: list[Cell] = []

    def add(
        framework: Framework, path: Path, family: str, name: FormatName, kernel: Kernel, key: str
    ) -> None:
        rule = lookup(framework, hardware, name, kernel, path, model)
        cell = Cell(
            path=path,
            framework=framework,
            family=family,
            format=name,
            kernel=kernel,
            how=rule.how,
            evidence=rule.evidence,
            says=rule.says,
            key=key,
        )
        made.append(cell)

    gemms = {
        "fprop": contract.trainer.fprop,
        "dgrad": contract.trainer.dgrad,
        "wgrad": contract.trainer.wgrad,
    }
    paths: tuple[Literal["fprop", "dgrad", "wgrad"], ...] = ("fprop", "dgrad", "wgrad")
    add(rollout, "rollout", "", "wide", "wide", "rollout.wide")
    for path in paths:
        add(trainer, path, "", "wide", "wide", f"trainer.{path}")
    for i, family in enumerate(contract.families):
        name = format_name(family.weight)
        add(rollout, "rollout", family.name, name, _rollout_kernel(contract, i), f"families.{i}.weight")
        for path in paths:
            if path == "wgrad" and contract.adapter is not None:
                continue  # the base is frozen
            kernel = gemm_kernel(gemms[path])
            held: FormatName = "wide" if kernel == "wide" else name
            add(trainer, path, family.name, held, kernel, f"trainer.{path}")
        add(rollout, "sync", family.name, name, "bytes", f"families.{i}.weight")
    if contract.rollout.kv_cache == "fp8_e4m3":
        add(rollout, "rollout", "", "kv_fp8_e4m3", "bytes", "rollout.kv_cache")
    return made


def _rollout_kernel(contract: PrecisionContract, family: int) -> Kernel:
    weight_only = contract.families[family].activation is None
    if weight_only:
        return "decoded"
    return "codes" if contract.rollout.kernel == "codes" else "qdq"
