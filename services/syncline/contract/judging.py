"""What errands say of a job's HTTP judge: to one another, and to whoever looks at the job."""

from __future__ import annotations

from typing import Literal

import msgspec


class Judgeable(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A trajectory for the job's judge. Stamped by the worker that took its score errand."""

    trajectory: str
    attempt: int
    traceparent: str = ""  # hop that the errand follows; empty: the record's own context


class JudgeStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The judge of one job as the process that asks it sees it. Stamped by that process about each second.

    state     answers: it is asked as far as `reward.parallel` permits. silent: it failed `reward.breaker` times in a
              row and is asked nothing now. trying: one request finds out whether it is back
    """

    state: Literal["answers", "silent", "trying"]
    since: float  # wall-clock second of the first failure of the row, or since when it answers
    reason: str  # of the latest failure; "" before the first
    waiting: int  # responses that it has not been asked, or must be asked again
    asked: int  # responses in requests that are in flight
    oldest: float  # seconds since the publication of the oldest of both; 0.0: there are none
    at: float
    scored: int = 0  # since the process began, as is the next
    unscored: int = 0
    versions: tuple[str, ...] = ()  # that it gave as its own, in order of appearance
