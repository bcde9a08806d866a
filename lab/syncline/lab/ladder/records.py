"""What a level found, and the whole climb. Plain data, as JSON and on the page."""

from __future__ import annotations

from typing import Literal

import msgspec

Level = Literal[1, 2, 3, 4, 5, 6, 7, 8, 9]
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


class Check(msgspec.Struct, frozen=True, kw_only=True):
    """One comparison. It holds where `found` is at most `bound`.

    found    in `unit`; for what must be equal: how many are not
    source   where the bound comes from
    where    the tensor, layer, token or key at which it is worst; empty where nothing is wrong
    """

    name: str
    found: float
    bound: float
    source: str
    unit: str = ""
    where: str = ""

    @property
    def holds(self) -> bool:
        """Whether it is within its bound; what is not a number is not."""
        return self.found <= self.bound


def same(name: str, wrong: list[str], source: str) -> Check:
    """A comparison of things that must be equal: `wrong` names those that are not."""
    return Check(
        name=name, found=len(wrong), bound=0, source=source, unit="differ", where="; ".join(wrong[:3])
    )


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """One level. `broke`: what kept it from comparing at all; that is a failure."""

    level: Level
    checks: tuple[Check, ...]
    seconds: float
    broke: str = ""

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

    @property
    def failed_at(self) -> Level | None:
        """The first level that fails; None: all that were climbed hold."""
        return next((result.level for result in self.results if not result.holds), None)
