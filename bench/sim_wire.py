"""Bytes on the streams of a simulated run, from the sizes of real messages."""

from __future__ import annotations

from array import array
from functools import cache

from sim_world import World

from syncline.contract.token_path import SamplingConvention, Segment, Timing, Trajectory, VersionSpan
from syncline.contract.trajectory_wire import encode
from syncline.contract.version_path import Ack, SyncOrder, VersionId
from syncline.runtime.bus import pack

PROMPT = 256  # tokens
TRACE = "00-" + "1" * 32 + "-" + "2" * 16 + "-01"
VERSION = VersionId(0, 1)


def trajectories(world: World) -> float:
    """Bytes of the trajectories that were trained; expert ids of long ones go to the blob store and are left out."""
    header, token = _size(0), (_size(1000) - _size(0)) / 1000
    return header * world.lags.total() + token * world.tokens


def control(world: World) -> float:
    """Bytes of sync's orders, and of what workers answered."""
    orders = sum(len(pack(_order(order.workers))) for order in world.orders)
    return orders + world.decisions["sync answers"] * len(pack(_ack()))


@cache
def _size(sampled: int) -> int:
    record = Trajectory(
        job="j0123456789",
        trajectory="j0123456789-10000-10",
        group=10000,
        index=10,
        attempt=1,
        prompt=10000,
        tokens=array("i", [7] * (PROMPT + sampled + 1)),
        segments=(
            Segment(kind="prompt", start=0, end=PROMPT),
            Segment(kind="sampled", start=PROMPT, end=PROMPT + sampled + 1),
        ),
        logprobs=array("f", [-0.5] * (sampled + 1)),
        loss_mask=b"\1" * (sampled + 1),
        spans=(VersionSpan(start=0, end=sampled + 1, version=VERSION, digest="d" * 64, worker="w1000"),),
        convention=SamplingConvention(),
        finish="stop",
        contract="c" * 64,
        text="x" * 4 * sampled,
        traceparent=TRACE,
        timing=Timing(started=1e9, queued=0.1, prefill=0.1, decode=10.0),
    )
    return sum(map(len, encode(record).values()))


def _order(workers: tuple[str, ...]) -> SyncOrder:
    return SyncOrder(
        order="stage", version=VERSION, digest="d" * 64, workers=workers, seq=1000, traceparent=TRACE
    )


def _ack() -> Ack:
    return Ack(
        worker="w1000",
        incarnation="0123456789ab",
        kind="verified",
        version=VERSION,
        digest="d" * 64,
        seq=1000,
        loaded_digest="d" * 64,
        canary_gap=1e-6,
        verdict="verified",
    )
