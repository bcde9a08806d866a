"""Trajectories and rewards for tests, whole and consistent."""

from __future__ import annotations

import random
from array import array

from syncline.contract.token_path import (
    Reward,
    SamplingConvention,
    Segment,
    Timing,
    Trajectory,
    VersionSpan,
    check,
    trajectory_id,
)
from syncline.contract.version_path import VersionId
from syncline.runtime.tracing import new_traceparent


def trajectory(
    job: str = "j0",
    group: int = 0,
    index: int = 0,
    *,
    seed: int = 0,
    sampled: int | None = None,
    versions: tuple[int, ...] = (0,),
    epoch: int = 0,
    attempt: int = 1,
    contract: str = "c",
    temperature: float = 1.0,
    vocab: int = 100,
    experts: bool = False,
    worker: str = "w0",
) -> Trajectory:
    """A record whose spans, one per version, are about equally long. Its contents follow from the arguments."""
    r = random.Random(f"{seed}/{group}/{index}")
    prompt = r.randint(3, 7)
    count = sampled if sampled is not None else r.randint(max(4, len(versions)), 12)
    tokens = array("i", [r.randrange(3, vocab) for _ in range(prompt + count)])
    edges = [round(i * count / len(versions)) for i in range(len(versions) + 1)]
    spans = tuple(
        VersionSpan(start=a, end=b, version=VersionId(epoch, v), digest=f"d{v}", worker=worker)
        for a, b, v in zip(edges[:-1], edges[1:], versions, strict=True)
    )
    shape = (len(tokens) - 1, 2, 2) if experts else None
    return check(
        Trajectory(
            job=job,
            trajectory=trajectory_id(job, group, index),
            group=group,
            index=index,
            attempt=attempt,
            prompt=group,
            tokens=tokens,
            segments=(
                Segment(kind="prompt", start=0, end=prompt),
                Segment(kind="sampled", start=prompt, end=len(tokens)),
            ),
            logprobs=array("f", [-r.random() * 5 - 0.01 for _ in range(count)]),
            loss_mask=bytes([1] * count),
            spans=spans,
            convention=SamplingConvention(temperature=temperature),
            finish="length",
            contract=contract,
            text=f"täxt {r.random()}\u0000\n",
            traceparent=new_traceparent(),
            timing=Timing(started=1.5, queued=0.1, prefill=0.2, decode=0.3),
            expert_ids=bytes(r.randrange(8) for _ in range((len(tokens) - 1) * 4)) if experts else None,
            expert_shape=shape,
            expert_dtype="u1" if experts else None,
        )
    )


def reward(of: Trajectory, value: float | None) -> Reward:
    """Scored with `value`, or unscored."""
    return Reward(
        trajectory=of.trajectory,
        attempt=of.attempt,
        state="unscored" if value is None else "scored",
        value=value,
        reason="" if value is not None else "timed out",
        judge="test/1",
        seconds=0.01,
    )
