"""From the first failing boundary and its pattern to a likely cause and the next check (seed section 6.1). Pure."""

from __future__ import annotations

from collections.abc import Sequence

from syncline.lab.ladder.readings import READINGS
from syncline.lab.ladder.records import TITLES, Diagnosis, Result

EXPERTS = "experts: trainer against prefill"


def diagnose(results: Sequence[Result]) -> Diagnosis | None:
    """Of the first level that fails; None: none does."""
    failed = next((result for result in results if not result.holds), None)
    if failed is None:
        return None
    if failed.broke:
        return _says(
            f"level {failed.level} ({TITLES[failed.level][0]}) could not compare: {failed.broke}",
            TITLES[failed.level][1],
            "the message names what was refused",
        )
    first = failed.failed[0]
    if failed.level == 4 and (layer := _parts_at(results)):
        return _says(
            f"{first.name}: log-probs differ, and the difference begins at one MoE layer: in every routing layer"
            f" before number {layer} both sides choose the same experts",
            "expert packing or an expert's products one routing layer before, or here router inputs and selection",
            f"router logits of routing layer {layer} on both sides; then each expert's output in the layer before",
        )
    for reading in READINGS:
        if reading.level == failed.level and reading.words in first.name:
            return _says(reading.symptom, reading.cause, reading.check_next)
    return _says(first.name, TITLES[failed.level][1], first.where or "the check's own figures")


def _parts_at(results: Sequence[Result]) -> int:
    """The first routing layer whose experts differ, as level 5 found it; 0: the first of all, or none does."""
    for check in (check for result in results if result.level == 5 for check in result.failed):
        if check.name == EXPERTS and check.where.startswith("layer "):
            return int(check.where.removeprefix("layer "))
    return 0


def _says(symptom: str, cause: str, check_next: str) -> Diagnosis:
    return Diagnosis(symptom=symptom, cause=cause, check_next=check_next)
