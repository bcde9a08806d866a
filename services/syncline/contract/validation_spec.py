"""The part of a job spec that says what of the validation ladder must hold before a job, or a version, may go on."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

from pydantic import Field, field_validator

from syncline.contract.spec_part import Part

Before = Literal[1, 2, 3, 4, 5]


class ValidationSpec(Part):
    """Gates and defaults of the validation ladder. See docs/ladder.md."""

    levels: tuple[Literal[1, 2, 3, 4, 5, 6, 7, 8, 9], ...] = Field(
        (1, 2, 3, 4, 5, 6, 7),
        min_length=1,
        description="levels of a validation that is asked for without naming any; 8 is a short run, 9 a profile",
    )
    before_start: tuple[Before, ...] = Field(
        (),
        description="levels that must hold before the job starts its engines: any of 1 to 5; a job whose level fails "
        "ends as failed, and says which boundary",
    )
    before_active: tuple[Literal[6], ...] = Field(
        (),
        description="[6]: each version must pass the live update out of rotation before any worker samples under it; "
        "takes a process that holds two more engines",
    )
    wait: float = Field(
        900.0, gt=0, description="seconds that `before_start` may take before the job fails for it"
    )

    @field_validator("levels", "before_start", "before_active")
    @classmethod
    def _each_once(cls, given: tuple[int, ...]) -> Any:
        """Raises `ValueError` for a level that is named twice; the order is the ladder's."""
        twice = sorted({level for level in given if given.count(level) > 1})
        if twice:
            raise ValueError(f"names level {twice[0]} more than once")
        return tuple(sorted(given))


def contradictions(part: ValidationSpec, kind: str, engine: str) -> Iterator[tuple[str, str, str]]:
    """(key, message, hint) of what a job of `kind`, whose rollout is by `engine`, cannot ask for."""
    for key in ("before_start", "before_active"):
        given = part.before_start if key == "before_start" else part.before_active
        if given and kind != "train":
            yield (
                f"validation.{key}",
                "an evaluation trains nothing that could part from rollout",
                "leave it out",
            )
    if part.before_active and engine != "reference":
        message = f"a version is proved on the reference engine, and rollout.engine is {engine!r}"
        yield (
            "validation.before_active",
            message,
            "leave it out; before_start and `syncline validate` look at it",
        )
