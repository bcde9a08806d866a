"""Records that ledger tests publish: small, whole and legal."""

from __future__ import annotations

from array import array

from syncline.contract.events import WorkItem
from syncline.contract.token_path import (
    Reward,
    SamplingConvention,
    Segment,
    Timing,
    Trajectory,
    VersionSpan,
    parse_trajectory_id,
    trajectory_id,
)
from syncline.contract.version_path import VersionId

TRACE = "00-" + "1" * 32 + "-" + "2" * 16 + "-01"


def items(job: str, group: int, size: int) -> list[WorkItem]:
    """The work items of one group; its prompt is the one of the same number."""
    return [
        WorkItem(
            job=job,
            trajectory=trajectory_id(job, group, index),
            group=group,
            index=index,
            prompt=group,
            traceparent=TRACE,
            submitted_at=0.0,
        )
        for index in range(size)
    ]


def record(name: str, attempt: int, version: VersionId, worker: str = "w0", sampled: int = 2) -> Trajectory:
    """A trajectory with `sampled` tokens, all of one version."""
    job, group, index = parse_trajectory_id(name)
    return Trajectory(
        job=job,
        trajectory=name,
        group=group,
        index=index,
        attempt=attempt,
        prompt=group,
        tokens=array("i", [7] + [8] * sampled),
        segments=(
            Segment(kind="prompt", start=0, end=1),
            Segment(kind="sampled", start=1, end=1 + sampled),
        ),
        logprobs=array("f", [-0.5] * sampled),
        loss_mask=b"\1" * sampled,
        spans=(VersionSpan(start=0, end=sampled, version=version, digest="d", worker=worker),),
        convention=SamplingConvention(),
        finish="stop",
        contract="c",
        text="xx",
        traceparent=TRACE,
        timing=Timing(started=0.0, queued=0.0, prefill=0.0, decode=0.0),
    )


def scored(name: str, attempt: int = 1, value: float = 1.0) -> Reward:
    """A reward that a scorer could tell."""
    return Reward(trajectory=name, attempt=attempt, state="scored", value=value)
