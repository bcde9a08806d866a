"""The parts of a job spec that say what is asked and who judges."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from syncline.contract.spec_part import Part

One = Literal[
    "calculator",
    "characters",
    "composite",
    "http",
    "jsonl",
    "openenv",
    "python",
    "reasoning_gym",
    "verifiers",
]
"""Environments with one data set."""


class PartSpec(Part):
    """One data set of a mix, drawn `weight` times in each round of as many draws as all weights add up to."""

    environment: One
    options: dict[str, str | int | float | bool | list[str | int | float]] = Field(
        default_factory=dict, description="as task.options"
    )
    name: str | None = Field(
        None, min_length=1, max_length=64, description="in counts and reports; null: the environment's"
    )
    weight: int = Field(1, ge=1, le=1000)
    first: int = Field(0, ge=0, description="first item that is drawn; those before it are held out")
    last: int | None = Field(None, ge=0, description="last item that is drawn; null: the data set's last")

    @property
    def label(self) -> str:
        """What it is called."""
        return self.name or self.environment


class TaskSpec(Part):
    environment: Literal[One, "mix"] = "characters"
    options: dict[str, str | int | float | bool | list[str | int | float]] = Field(
        default_factory=dict,
        description="what the environment itself takes; it refuses what it does not know",
    )
    network: bool = Field(
        False,
        description="python, verifiers: its code may reach the network; http and openenv do by their nature, and "
        "others never",
    )
    parts: tuple[PartSpec, ...] = Field(
        (), max_length=64, description="data sets of environment 'mix', by weight; see docs/prompts.md"
    )


class RewardSpec(Part):
    source: Literal["environment", "python", "http"] = "environment"
    function: str | None = Field(
        None, pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$", description="module:function"
    )
    url: str | None = Field(
        None, pattern=r"^https?://\S+$", description="http: the judge; see docs/judges.md"
    )
    network: bool = Field(False, description="python: the function may reach the network")
    timeout: float = Field(
        5.0, gt=0, le=3600, description="seconds for one trajectory; http: for one request"
    )
    memory_mb: int = Field(512, ge=64, le=65536)
    retries: int = Field(2, ge=0, le=20, description="more tries after a failure that may pass")
    batch: int = Field(1, ge=1, le=1024, description="http: responses in one request; more than 1: as a list")
    parallel: int = Field(
        8, ge=1, le=1024, description="http: requests in flight at a time, over the whole installation"
    )
    breaker: int = Field(
        5, ge=1, le=1000, description="http: failures in a row after which one request at a time is tried"
    )
    budget: float | None = Field(
        None,
        gt=0,
        description="http: seconds after its publication in which a response must be judged, or is unscored; "
        "null: half of limits.batch_wait",
    )

    def within(self, batch_wait: float) -> float:
        """Seconds after its publication in which an HTTP judge must have judged a response.

        batch_wait   `limits.batch_wait` of the job
        """
        return batch_wait / 2 if self.budget is None else self.budget
