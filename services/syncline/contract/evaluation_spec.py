"""The part of a job spec that says what is asked of a version on prompts that training never draws."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from syncline.contract.spec_part import Part

HELD_OUT = 1 << 40
"""First index that is reserved for evaluation: training counts prompts up from 0, and no job gets so far."""


class EvaluationSpec(Part):
    """What is sampled, and how it is counted. See docs/evaluation.md."""

    job: str | None = Field(
        None, pattern=r"^j[0-9a-f]{10}$", description="kind evaluate: the training job whose version is asked"
    )
    version: str | None = Field(
        None, pattern=r"^\d{1,9}\.\d{1,9}$", description="kind evaluate: the version, as EPOCH.NUMBER"
    )
    every: int = Field(
        0, ge=0, description="kind train: evaluate each n-th version on the job's own workers; 0: never"
    )
    share: float = Field(
        0.25,
        gt=0,
        le=1,
        description="kind train: share of a worker's requests that evaluation may take from training",
    )
    prompts: int = Field(64, ge=1, le=65536, description="held-out prompts")
    samples: int = Field(4, ge=1, le=4096, description="samples of each prompt")
    k: tuple[Annotated[int, Field(ge=1, le=4096)], ...] = Field(
        (1,),
        min_length=1,
        max_length=16,
        description="pass@k is told for each of these; none above `samples`",
    )
    first: int = Field(
        HELD_OUT, ge=0, lt=1 << 52, description="index of the first prompt; those that follow count up"
    )
    correct: float = Field(1.0, description="reward from which a sample counts as correct")
