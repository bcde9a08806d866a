"""A reward on its way into the ledger, whoever found it: stored once, buried if it failed, told as a hop."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

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
    return give_many(bus, job, ledger, [(reward, parent)], began)[0]


def give_many(
    bus: Bus, job: str, ledger: Ledger, found: Sequence[tuple[Reward, str | None]], began: float
) -> list[bool]:
    """`give` for several (reward, parent), each of which is stored or refused by itself."""
    stored = ledger.reward_many([reward for reward, _ in found])
    ended = time.time()
    for (reward, parent), done in zip(found, stored, strict=True):
        if done:
            _tell(bus, job, reward, parent, began, ended)
    return stored


def _tell(bus: Bus, job: str, reward: Reward, parent: str | None, began: float, ended: float) -> None:
    if reward.state == "failed":
        _bury(bus, job, reward)
    tracing.record(
        REWARDED,
        parent,
        began,
        ended,
        job=job,
        trajectory=reward.trajectory,
        attempt=reward.attempt,
        state=reward.state,
        reward=reward.value,
    )


def _bury(bus: Bus, job: str, reward: Reward) -> None:
    letter = {"trajectory": reward.trajectory, "attempt": reward.attempt, "reason": reward.reason}
    fields = {name.encode(): str(value).encode() for name, value in letter.items()}
    bus.append(DEAD.at(job), fields, cap=_DEAD_CAP)
    _LOG.error("%s attempt %d: reward failed: %s", reward.trajectory, reward.attempt, reward.reason)
