"""A job's precision at the door and afterwards: its contract against the model's headers, and what sync resolved."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Literal

import msgspec
from safetensors import SafetensorError, safe_open

from syncline.contract import support
from syncline.contract.events import TERMINAL_JOB_STATES
from syncline.contract.job import JobSpec, Problem
from syncline.contract.job_rules import contract_key
from syncline.contract.plan import BadPlan, PlanEntry, PrecisionPlan, resolve
from syncline.contract.precision import PrecisionContract
from syncline.contract.support_rules import MODEL_TYPES, ModelFamily
from syncline.gateway import model_root
from syncline.gateway.records import JobRecord
from syncline.gateway.shapes import PrecisionBrief
from syncline.runtime.bus import BadMessage

PLAN_FILE = "precision_plan.json"  # in the job's folder, written by sync
PlanState = Literal["resolved", "validating", "unresolved"]


class BadHeader(ValueError):
    """A safetensors file whose header cannot be read. Names the file."""


def problems(root: Path, spec: JobSpec) -> list[Problem]:
    """What keeps the spec's contract from fitting its model, where the model's folder has headers to tell."""
    if model_root.problems(root, spec.model):
        return []  # told already
    try:
        resolved_here(root, spec)
    except BadHeader as error:
        return [Problem(path="model.name", message=str(error), hint="put whole safetensors files there")]
    except BadPlan as error:
        hint = "patterns are matched against the names in the model's safetensors"
        return [Problem(path=contract_key(spec, error.key), message=str(error), hint=hint)]
    return []


def machine_problems(root: Path, spec: JobSpec) -> list[Problem]:
    """What the engines here, or the model, cannot do. Both are known before anything runs."""
    found = []
    hardware = spec.device.hardware
    if hardware != "cpu":
        message = (
            f"{hardware!r}, and the engines of this installation run on the CPU: nothing would run natively"
        )
        hint = (
            f"set it to 'cpu'; `syncline precision RECIPE --hardware {hardware}` tells what would run there"
        )
        found.append(Problem(path="device.hardware", message=message, hint=hint))
    if spec.trainer.router_replay and model_family(root, spec) == "dense":
        message = f"model {spec.model.name!r} has no routers: there is nothing to replay"
        hint = "leave it out, or choose a model with experts"
        found.append(Problem(path="trainer.router_replay", message=message, hint=hint))
    return found


def resolved_here(root: Path, spec: JobSpec) -> PrecisionPlan | None:
    """The plan from the model folder's headers; None: it has none, so only a worker can resolve it.

    Raises `BadPlan`, `BadHeader`.
    """
    shapes = header_shapes(root / spec.model.name)
    return resolve(spec.contract(), shapes) if shapes else None


def header_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Names and shapes of all tensors in the folder's safetensors; no tensor is read. Raises `BadHeader`."""
    shapes: dict[str, tuple[int, ...]] = {}
    for file in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(file, "np") as header:
                for name in header.keys():  # noqa: SIM118
                    shapes[name] = tuple(header.get_slice(name).get_shape())
        except (SafetensorError, OSError) as error:
            raise BadHeader(f"{file.name} has no readable header: {error}") from None
    return shapes


def model_family(root: Path, spec: JobSpec) -> ModelFamily | None:
    """The family that the support matrix counts the model to; None: it knows none of this type."""
    try:
        config = json.loads((root / spec.model.name / "config.json").read_bytes())
    except (OSError, ValueError):
        return None
    kind = config.get("model_type") if isinstance(config, dict) else None
    return MODEL_TYPES.get(kind) if isinstance(kind, str) else None


def contract_of(spec: JobSpec) -> PrecisionContract | None:
    """The job's contract; None: of a recipe that this installation no longer ships."""
    try:
        return spec.contract()
    except ValueError:
        return None


def plan_of(root: Path, record: JobRecord) -> tuple[PlanState, PrecisionPlan | None]:
    """The job's plan: as sync resolved it, or from the model's headers, or not yet. Raises `BadMessage`."""
    kept = record.folder / PLAN_FILE
    if kept.is_file():
        try:
            return "resolved", msgspec.json.decode(kept.read_bytes(), type=PrecisionPlan)
        except msgspec.MsgspecError as error:
            raise BadMessage(f"{PLAN_FILE} of {record.id}: {error}") from None
    try:
        made = resolved_here(root, record.spec) if contract_of(record.spec) is not None else None
    except (BadPlan, BadHeader):  # the folder has changed since the job was taken
        made = None
    if made is not None:
        return "resolved", made
    ended = record.state in TERMINAL_JOB_STATES or record.state == "unrecorded"
    return ("unresolved" if ended else "validating"), None


def decision_of(root: Path, spec: JobSpec, contract: PrecisionContract) -> support.Decision:
    """How the job's hardware carries out its contract."""
    return support.decide(contract, spec.device.hardware, model=model_family(root, spec))


def brief(root: Path, record: JobRecord) -> PrecisionBrief | None:
    """The job's precision in a few words; None where its recipe is no longer shipped. Raises `BadMessage`."""
    contract = contract_of(record.spec)
    if contract is None:
        return None
    decision = decision_of(root, record.spec, contract)
    state, plan = plan_of(root, record)
    return PrecisionBrief(
        contract=contract.name,
        digest=contract.digest(),
        representation=contract.representation,
        runs=decision.kind,
        emulations=decision.emulations,
        plan=state,
        plan_digest=plan.digest() if plan else None,
        low_bit=len(plan.low_bit()) if plan else None,
    )


def grouped(entries: tuple[PlanEntry, ...]) -> dict[tuple[str, str, tuple[int, ...], str, str], int]:
    """(name with numbers as `*`, family, shape, format, reason) -> how many tensors are so, in the plan's order."""
    found: dict[tuple[str, str, tuple[int, ...], str, str], int] = {}
    for entry in entries:
        name = ".".join("*" if part.isdecimal() else part for part in entry.name.split("."))
        format_name = entry.weight.format if entry.weight else ""
        key = (name, entry.family, entry.shape, format_name, entry.reason)
        found[key] = found.get(key, 0) + 1
    return found
