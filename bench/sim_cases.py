"""What is simulated: published phase times of real runs, and what had to be assumed beside them.

Every case names where its numbers are from. What nobody published (how lengths are spread, how many requests an
engine decodes at once) is set so that the colocated run samples for as long as was published; the speed-up over it is
then a result and no input.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import msgspec

Mode = Literal["colocated", "disjoint"]


class Fleet(msgspec.Struct, frozen=True, kw_only=True):
    """What a mode has to work with. Seconds are of one update, one publication, one worker."""

    workers: int
    train: float  # scoring and stepping, per update
    publish: float  # from minted to a signed manifest that workers may stage
    stage: float  # a worker's, beside its decoding
    commit: float  # the pause of decoding
    wake: float = 0.0  # an engine comes back to the device
    sleep: float = 0.0  # and leaves it


class Case(msgspec.Struct, frozen=True, kw_only=True):
    """One run. Lengths are log-normal with this median and sigma, cut at `longest`: what a limit on tokens does."""

    name: str
    source: str
    assumed: str
    groups: int  # per update
    members: int  # per group
    median: float  # tokens
    sigma: float
    longest: int
    token: float  # seconds per token of one request
    slots: int  # requests that a worker decodes at once
    fleets: dict[Mode, Fleet]
    published: float | None = None  # speed-up of the asynchronous run over the synchronous one
    max_lag: int = 1
    slow_share: float = 0.0  # workers that are `slow_by` times slower
    slow_by: float = 1.0
    mtbf: float = 0.0  # seconds between two failures of one worker; 0: none fails
    restart: float = 60.0


def seven_b(max_lag: int = 1) -> Case:
    """Qwen2.5-Math-7B, DAPO, 128 H20: the pair of runs with the most complete table of phases."""
    return Case(
        name="7B, 128 GPUs",
        source="verl docs/advance/fully_async: colocated 356 s per step (178 generation, 54 old log-probs, 114 "
        "update); 64:64 disjoint 151 s (113 update), 2.35 to 2.67 times as fast",
        assumed="one-GPU engines of 128 slots; log-normal lengths, sigma 1.1, cut at 28 K; 5 ms per token; 10 s to "
        "change sides",
        groups=512,
        members=16,
        median=2_600,
        sigma=1.1,
        longest=28_000,
        token=0.0055,
        slots=128,
        published=2.35,
        max_lag=max_lag,
        fleets={
            "colocated": Fleet(workers=128, train=168, publish=1, stage=1, commit=0.3, wake=5, sleep=5),
            "disjoint": Fleet(workers=64, train=113, publish=1, stage=1, commit=0.3),
        },
    )


def thirty_b(max_lag: int = 1) -> Case:
    """Qwen3-30B-A3B: one step off against synchronous."""
    return Case(
        name="Qwen3-30B-A3B",
        source="NeMo-RL performance summary: 192 s per synchronous step, 152 s one step off; miles: 2.2 s per sync",
        assumed="the synchronous step samples for 100 s and trains for 85 s; engines of two GPUs, 16 of 32 GPUs "
        "in either pool; training on half of the GPUs takes 1.6 times as long",
        groups=64,
        members=32,
        median=3_000,
        sigma=0.8,
        longest=16_000,
        token=0.006,
        slots=128,
        published=192 / 152,
        max_lag=max_lag,
        fleets={
            "colocated": Fleet(workers=16, train=85, publish=1, stage=1.2, commit=0.4, wake=3, sleep=3),
            "disjoint": Fleet(workers=8, train=136, publish=1, stage=1.2, commit=0.4),
        },
    )


def glm52(max_lag: int = 2) -> Case:
    """GLM-5.2, agentic, full refresh from 744 B parameters: the disjoint schedule."""
    return Case(
        name="GLM-5.2 agentic",
        source="miles: 64 GB300, some 4.5 min per step, mean lag 1.7 steps; Stitch: NVFP4 prepare 41 s, commit 2.74 s; "
        "P2P sync 8.5 s",
        assumed="8 engines of 4 GPUs in the pool; colocated, 16 engines; training takes 260 s on half of the GPUs and "
        "145 s on all; 30 s to change sides; several turns end to end as one long response",
        groups=32,
        members=8,
        median=9_000,
        sigma=0.9,
        longest=48_000,
        token=0.012,
        slots=32,
        max_lag=max_lag,
        fleets={
            "colocated": Fleet(workers=16, train=145, publish=8.5, stage=41, commit=2.74, wake=15, sleep=15),
            "disjoint": Fleet(workers=8, train=260, publish=8.5, stage=41, commit=2.74),
        },
    )


def k3(max_lag: int = 1) -> Case:
    """Kimi K3, an adapter over a frozen base: the colocated schedule."""
    return Case(
        name="K3 adapter",
        source="miles: 60 steps in 12 hours, evaluation included; commit at most 3.82 s (Stitch)",
        assumed="16 engines on all GPUs; sampling some 6 min and training 5 min of each 12 min step; adapters are "
        "staged in 2 s and committed in 0.5 s; 25 s to change sides",
        groups=64,
        members=8,
        median=8_000,
        sigma=0.9,
        longest=32_000,
        token=0.012,
        slots=32,
        max_lag=max_lag,
        fleets={
            "colocated": Fleet(workers=16, train=300, publish=3, stage=2, commit=0.5, wake=12, sleep=13),
            "disjoint": Fleet(workers=8, train=540, publish=3, stage=2, commit=0.5),
        },
    )


def wide(workers: int) -> Case:
    """As many workers as asked for, with stragglers and failures: what the scheduler and sync have to carry."""
    return Case(
        name=f"{workers:,} workers",
        source="nobody has published a run of this size",
        assumed="as the 7B run per worker, with 8 slots; 2 % of the workers are half as fast; each fails every 12 "
        "hours and is back in 2 minutes",
        groups=max(8, workers // 2),
        members=16,
        median=2_600,
        sigma=1.1,
        longest=28_000,
        token=0.0055,
        slots=8,
        max_lag=2,
        slow_share=0.02,
        slow_by=2.0,
        mtbf=12 * 3600,
        restart=120,
        fleets={
            "colocated": Fleet(workers=workers, train=150, publish=5, stage=4, commit=0.3, wake=5, sleep=5),
            "disjoint": Fleet(workers=workers, train=90, publish=5, stage=4, commit=0.3),
        },
    )


Make = Callable[[], Case]
PUBLISHED: tuple[Make, ...] = (seven_b, thirty_b, glm52, k3)
