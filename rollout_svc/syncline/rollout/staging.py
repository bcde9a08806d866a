"""From an order to a verified version in the second buffer: pull, stage, read back, score the canaries.

Runs in the staging thread while the engine serves.
"""

from __future__ import annotations

import time
from typing import Literal

import msgspec

from syncline.contract.precision_trace import ComponentTrace
from syncline.contract.pulled import Pulled
from syncline.contract.version_path import STAGED, Canary, SyncOrder
from syncline.rollout.engine import RolloutEngine, Staged
from syncline.runtime.tracing import record
from syncline.transport.transport import Pulling


class Brought(msgspec.Struct, frozen=True):
    """A version that lies in the second buffer, read back."""

    staged: Staged
    pulled: Pulled
    traceparent: str  # of the staged hop


class Verified(msgspec.Struct, frozen=True):
    """What the staging thread found."""

    order: SyncOrder
    brought: Brought
    gap: float | None  # largest |trainer - rollout| log-prob over the canaries; None: there were none
    trace: ComponentTrace  # what scored the canaries
    began: float  # wall clock: of the canary check


def bring(engine: RolloutEngine, pulling: Pulling, order: SyncOrder, job: str, worker: str) -> Brought:
    """Pull and stage the order's version. Raises what `Pulling.pull` and `RolloutEngine.stage` do."""
    began = time.time()
    serving = engine.serving
    signed, pulled = pulling.pull(order, serving[0] if serving else None)
    staged = engine.stage(signed, pulling.store)
    if staged.digest != order.digest:
        raise ValueError(f"the store's manifest of {order.version} has digest {staged.digest}")
    context = record(
        STAGED,
        order.traceparent or None,
        began,
        time.time(),
        job=job,
        version=order.version,
        digest=staged.digest,
        worker=worker,
        bytes=staged.nbytes,
        transfer=pulled.kind,
        pulled_bytes=pulled.nbytes,
        pull_seconds=pulled.seconds,
    )
    return Brought(staged, pulled, context)


def check(engine: RolloutEngine, order: SyncOrder, brought: Brought) -> Verified:
    """Score the order's canaries on the buffer that holds the version."""
    began = time.time()
    serves = engine.serving == (brought.staged.version, brought.staged.digest)
    buffer: Literal["active", "staged"] = "active" if serves else "staged"
    gap = _canary_gap(engine, order.canaries, buffer)
    return Verified(order, brought, gap, engine.trace(buffer), began)


def _canary_gap(
    engine: RolloutEngine, canaries: tuple[Canary, ...], buffer: Literal["active", "staged"]
) -> float | None:
    """Largest |trainer - rollout| over all canary tokens; None: there is no canary.

    They test weights, so the context is wide whatever the contract stores.
    """
    gap = None
    for canary in canaries:
        ours = engine.score(canary.tokens, canary.prompt, buffer=buffer, kv="wide").logprobs
        worst = max(abs(a - b) for a, b in zip(ours, canary.logprobs, strict=True))
        gap = worst if gap is None or not worst <= gap else gap  # keeps NaN
    return gap
