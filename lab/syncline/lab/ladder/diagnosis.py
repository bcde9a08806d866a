"""From the first failing boundary and its pattern to a likely cause and the next check (seed section 6.1). Pure."""

from __future__ import annotations

from collections.abc import Sequence

from syncline.lab.ladder.readings import READINGS
from syncline.lab.ladder.records import TITLES, Diagnosis, Result


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
    for reading in READINGS:
        if reading.level == failed.level and reading.words in first.name:
            return _says(reading.symptom, reading.cause, reading.check_next)
    return _says(first.name, TITLES[failed.level][1], first.where or "the check's own figures")


def _says(symptom: str, cause: str, check_next: str) -> Diagnosis:
    return Diagnosis(symptom=symptom, cause=cause, check_next=check_next)
