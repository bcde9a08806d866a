"""A reward on its way into the ledger, whoever found it: stored once, buried if it failed, told as a hop."""

from __future__ import annotations

import logging
import time

from syncline.contract.streams import DEAD
from syncline.contract.token_path import REWARDED, Reward
from syncline.runtime import tracing
from syncline.runtime.bus import Bus
from syncline.runtime.ledger import Ledger, LedgerEntry

_LOG = logging.getLogger(__name__)
_DEAD_CAP = 10_000


def wanted(entry: LedgerEntry | None, attempt: int) -> bool:
    """False for an errand that came twice, or whose trajectory has moved on."""
    return (
        entry is not None and entry.state == "buffered" and entry.attempt == attempt and entry.reward is None
    )


def give(bus: Bus, job: str, ledger: Ledger, reward: Reward, parent: str | None, began: float) -> bool:
    """Store a reward. False: its attempt is fenced, or it was rewarded before; then nothing is told.

    parent   traceparent of the hop that it follows
    began    wall-clock second at which the scoring began
    """
    if not ledger.reward(reward):
        return False
    if reward.state == "failed":
        _bury(bus, job, reward)
    tracing.record(
        REWARDED,
        parent,
        began,
        time.time(),
        job=job,
        trajectory=reward.trajectory,
        attempt=reward.attempt,
        state=reward.state,
        reward=reward.value,
    )
    return True


def _bury(bus: Bus, job: str, reward: Reward) -> None:
    letter = {"trajectory": reward.trajectory, "attempt": reward.attempt, "reason": reward.reason}
    fields = {name.encode(): str(value).encode() for name, value in letter.items()}
    bus.append(DEAD.at(job), fields, cap=_DEAD_CAP)
    _LOG.error("%s attempt %d: reward failed: %s", reward.trajectory, reward.attempt, reward.reason)
