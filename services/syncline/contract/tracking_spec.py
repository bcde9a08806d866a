"""`[tracking]` of a job spec: who else is told of each update. Secrets have no key here; see docs/tracking.md."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from syncline.contract.spec_part import Part

Tracker = Literal["tensorboard", "wandb"]


class WandbSpec(Part):
    """A run of Weights & Biases. The key comes from WANDB_API_KEY in the gateway's environment, and nowhere else."""

    project: str = Field(pattern=r"^[A-Za-z0-9_.-]{1,128}$", description="project that the run is put in")
    entity: str | None = Field(
        None, pattern=r"^[A-Za-z0-9_.-]{1,128}$", description="user or team; null: the key's own"
    )
    mode: Literal["online", "offline"] = Field(
        "online",
        description="offline: into the job's folder, to be uploaded by `wandb sync`; WANDB_MODE=offline does the same",
    )
    tags: tuple[str, ...] = Field((), description="tags of the run")


class TrackingSpec(Part):
    """Writers beside the job's own records. A writer that fails never stops a job."""

    tensorboard: bool = Field(
        False,
        description="write an event file into the job's folder, `tensorboard/`; needs the extra `tensorboard`",
    )
    wandb: WandbSpec | None = Field(
        None, description="log to Weights & Biases; needs the extra `wandb`; null: not"
    )

    def trackers(self) -> tuple[Tracker, ...]:
        """The writers that are wanted."""
        found: list[Tracker] = []
        if self.tensorboard:
            found.append("tensorboard")
        if self.wandb is not None:
            found.append("wandb")
        return tuple(found)
