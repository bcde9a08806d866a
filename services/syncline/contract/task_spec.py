"""The parts of a job spec that say what is asked and who judges."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from syncline.contract.spec_part import Part


class TaskSpec(Part):
    environment: Literal[
        "calculator", "characters", "composite", "jsonl", "python", "reasoning_gym", "verifiers"
    ] = "characters"
    options: dict[str, str | int | float | bool | list[str | int | float]] = Field(
        default_factory=dict,
        description="what the environment itself takes; it refuses what it does not know",
    )


class RewardSpec(Part):
    source: Literal["environment", "python", "http"] = "environment"
    function: str | None = Field(
        None, pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$", description="module:function"
    )
    url: str | None = Field(None, pattern=r"^https?://\S+$")
    timeout: float = Field(5.0, gt=0, le=3600, description="seconds for one trajectory")
    memory_mb: int = Field(512, ge=64, le=65536)
    retries: int = Field(2, ge=0, le=20)
