"""The parts of a job spec that say how bytes reach the workers, and what is measured beside the work."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from syncline.contract.spec_part import Part


class TransferSpec(Part):
    """How the bytes of a version reach a rollout worker; see docs/transfer.md."""

    kind: Literal["files", "http", "group", "objects"] = "files"
    url: str | None = Field(None, pattern=r"^[a-z][a-z0-9+]*://\S+$", description="objects: fsspec address")
    deltas: bool = Field(False, description="send what changed, where that is smaller than the tensor")
    bucket_mb: int = Field(16, ge=1, le=1024, description="most MiB that are asked for, and held, at once")
    timeout: float = Field(45.0, gt=0, le=3600, description="seconds in which a worker must have a version")


class DiagnosticsSpec(Part):
    """Same-version scores of a share of the trained trajectories; see docs/decisions/0007."""

    trajectories: int = Field(
        4, ge=0, le=4096, description="trajectories of each update to re-score; 0: none"
    )
    every: int = Field(1, ge=1, description="updates between measurements")
    learn: int = Field(5, ge=1, description="measured updates from which the baseline is learned")
    drift: float = Field(
        3.0, gt=1, description="a term's mean that is twice running this many times its baseline is an alarm"
    )
