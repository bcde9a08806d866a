"""What a validation is: the levels that were asked for, how far the climb is, what each level found.

A validation is a climb of the ladder (docs/ladder.md) for one job. It has a number within its job and a folder of its
own, `validations/<number>/` in the job's folder; what lies there is the truth, and nothing else knows more.
"""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal, TypeVar

import msgspec

from syncline.contract.hops import Hop
from syncline.contract.version_path import Canary, VersionId

T = TypeVar("T")
Level = Literal[1, 2, 3, 4, 5, 6, 7, 8, 9]
LEVELS: tuple[Level, ...] = (1, 2, 3, 4, 5, 6, 7, 8, 9)
TITLES: dict[Level, tuple[str, str]] = {
    1: ("precision contract", "an undefined expectation, and no discrepancy of an implementation"),
    2: ("quantizer and converter", "numerical representation or serialization"),
    3: ("one operator", "quantization error, or that of kernel, layout or accumulation"),
    4: ("fixed-prefix scoring", "the forward pass of one version, end to end"),
    5: ("routes and request state", "discontinuous routing, or the history of a request"),
    6: ("live update", "shard mapping, transfer, installation or activation"),
    7: ("deterministic training step", "gradients, the optimizer, or a precision's own update"),
    8: ("bounded RL run", "mismatch, staleness and learning acting together"),
    9: ("performance profile", "whether the precision improves the whole system"),
}
"""Level -> its name, and what a failure there localizes (seed Table 6)."""

CLIMBED = Hop(
    name="validation.climbed",
    done_by="validation",
    reads=("engine",),
    # version: "none": the job's own climb; levels: as asked for, with commas; boundary: the level that fails, or "none"
    attributes=("number", "why", "version", "levels", "verdict", "boundary", "evidence"),
)
LEVEL = Hop(
    name="validation.level",
    done_by="validation",
    reads=("engine",),
    # worst: the first check that fails, or of those that hold the one nearest to its bound; "none": nothing to compare
    attributes=("number", "level", "verdict", "checks", "worst", "found", "bound"),
)
VALIDATION_PATH: tuple[Hop, ...] = (CLIMBED, LEVEL)
"""The hops of a validation: one climb, and inside it a `level` for each. That of a version hangs in the version's
trace, beside its own hops; that of a job is a trace of its own with a link to the newest version's."""

FOLDER = "validations"
REQUEST, PROGRESS, FAILURE, CANCELLED = "request.json", "progress.json", "failed.json", "cancelled"
REPORT, PAGE, EVIDENCE, LOCK = "validation.json", "validation.html", "evidence", "lock"
"""Files of a validation's folder; `evidence` is a folder with a file for each level."""

Why = Literal["asked", "before_start", "before_active"]


class Check(msgspec.Struct, frozen=True, kw_only=True):
    """One comparison. It holds where `found` is at most `bound`.

    found     in `unit`; for what must be equal: how many are not
    source    where the bound comes from
    where     the tensor, layer, token or key at which it is worst; empty where nothing is wrong
    baseline  what the newest earlier climb of the same contract and model that held has found; None: there is none
    applies   False: there is nothing to compare, and `source` says why
    """

    name: str
    found: float
    bound: float
    source: str
    unit: str = ""
    where: str = ""
    baseline: float | None = None
    applies: bool = True

    @property
    def holds(self) -> bool:
        """Whether it is within its bound; what is not a number is not."""
        return self.found <= self.bound


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """One level. `broke`: what kept it from comparing at all; that is a failure. `evidence`: its file."""

    level: Level
    checks: tuple[Check, ...]
    seconds: float
    broke: str = ""
    evidence: str = ""

    @property
    def holds(self) -> bool:
        """Whether every check holds."""
        return not self.broke and all(check.holds for check in self.checks)

    @property
    def failed(self) -> tuple[Check, ...]:
        """The checks that do not hold."""
        return tuple(check for check in self.checks if not check.holds)


class Diagnosis(msgspec.Struct, frozen=True, kw_only=True):
    """From the first failing boundary and its pattern to a cause and the next check (seed section 6.1)."""

    symptom: str
    cause: str
    check_next: str


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """One climb. `results` in order; the climb ends at the first that fails (level 4 runs 5 as diagnosis)."""

    recipe: str
    model: str
    contract: str
    seed: int
    results: tuple[Result, ...]
    diagnosis: Diagnosis | None = None
    engine: Literal["reference", "sglang"] = "reference"  # of rollout

    @property
    def failed_at(self) -> Level | None:
        """The first level that fails; None: all that were climbed hold."""
        return next((result.level for result in self.results if not result.holds), None)


class ValidationRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """`request.json`: what is to be climbed. Stamped by whoever begins it: the gateway, or the scheduler as a gate."""

    job: str
    number: int
    levels: tuple[Level, ...]
    why: Why
    spec: str  # the job's resolved spec, as JSON
    at: float  # wall-clock unix seconds
    version: str = ""  # with `before_active`: EPOCH.NUMBER
    traceparent: str = ""  # of the version, with `before_active`
    links: tuple[str, ...] = ()  # traces that the climb belongs to: those of the job's newest version


class ValidationProgress(msgspec.Struct, frozen=True, kw_only=True):
    """`progress.json`: what has ended, and the level that is being climbed; None: the report is being written."""

    results: tuple[Result, ...]
    now: Level | None


class ValidationFailure(msgspec.Struct, frozen=True, kw_only=True):
    """`failed.json`: why there is no report."""

    reason: str


ValidationState = Literal["running", "holds", "fails", "broken", "interrupted", "cancelled"]
"""`fails`: a level does; `broken`: the climb could not be made; `interrupted`: its process is gone and left no word."""


class Validation(msgspec.Struct, frozen=True, kw_only=True):
    """A validation as it stands. `boundary`: the name of the first level that fails; `reason`: why there is no report.

    results    of the levels that have ended, also while it runs
    evidence   folder of the figures, below the run root
    """

    job: str
    number: Annotated[int, msgspec.Meta(ge=1)]
    why: Why
    state: ValidationState
    levels: tuple[Level, ...]
    began: float
    version: str = ""
    now: Level | None = None
    failed_at: Level | None = None
    boundary: str = ""
    reason: str = ""
    results: tuple[Result, ...] = ()
    diagnosis: Diagnosis | None = None
    recipe: str = ""
    model: str = ""
    contract: str = ""
    evidence: str = ""


# ---- a version before it may be active --------------------------------------------------------------------------
class Wanted(msgspec.Struct, frozen=True, tag="wanted", forbid_unknown_fields=True, kw_only=True):
    """A version must pass level 6 before a worker may commit it. Stamped by sync, read by the validator.

    before   the version that workers serve, or are about to; None: there is none
    """

    version: VersionId
    digest: str  # of its manifest
    before: VersionId | None
    canaries: tuple[Canary, ...]
    tolerance: float
    traceparent: str


class Proof(msgspec.Struct, frozen=True, tag="proof", forbid_unknown_fields=True, kw_only=True):
    """What level 6 says of a version. Stamped by the validator, read by sync. `reason`: why it does not hold."""

    version: VersionId
    digest: str
    holds: bool
    reason: str
    number: int  # of the validation
    seconds: float


class VersionRefused(
    msgspec.Struct, frozen=True, tag="version_refused", forbid_unknown_fields=True, kw_only=True
):
    """A version did not pass the level that it must pass before it is active, and never will be. Stamped by sync.

    The job goes on under `active` until the next version, which gets its own chance.
    """

    version: VersionId
    active: VersionId
    reason: str


def read(raw: bytes, kind: type[T]) -> T:
    """One of these records from its JSON, which has null for a figure that is not finite: that is read as infinite.

    Raises `msgspec.MsgspecError`.
    """
    return msgspec.convert(_figures(msgspec.json.decode(raw)), kind)


def _figures(value: Any, name: str = "") -> Any:
    if isinstance(value, dict):
        return {key: _figures(inner, key) for key, inner in value.items()}
    if isinstance(value, list):
        return [_figures(inner) for inner in value]
    return math.inf if value is None and name in ("found", "bound") else value


def same(name: str, wrong: list[str], source: str) -> Check:
    """A comparison of things that must be equal: `wrong` names those that are not."""
    return Check(
        name=name, found=len(wrong), bound=0, source=source, unit="differ", where="; ".join(wrong[:3])
    )


def absent(name: str, reason: str) -> Check:
    """A comparison that this model, recipe or engine has nothing for: told with its reason, never passed over."""
    return Check(name=name, found=0, bound=0, source=reason, unit="not applicable", applies=False)
