"""A circuit breaker: a judge that fails is not asked by everybody at once, over and over.

closed   requests go out. `limit` failures in a row open it.
open     none goes out until a pause is over; it begins at `FIRST` and doubles up to `LAST` with each failed trial, or
         up to `AWAY` while there is nobody whom it could burden
trial    one goes out. An answer closes the breaker, a failure opens it for longer. A judge that could not be reached
         counts as back once it has held the trial's connection for `SETTLED`: one that takes minutes to answer would
         otherwise stand idle for minutes after each restart.

Time is handed in (seconds of a monotonic clock), so that nothing here waits.
"""

from __future__ import annotations

import random
from typing import Literal

FIRST, LAST, AWAY = 0.5, 15.0, 1.0  # seconds of an open breaker's first and longest pauses
SETTLED = 0.5  # seconds


def spread(seconds: float) -> float:
    """Between half of it and all of it, at random: what failed together is not repeated together."""
    return seconds * random.uniform(0.5, 1.0)


class Breaker:
    """The state of one judge. `since`: when the present row of failures, or of answers, began."""

    def __init__(self, limit: int, now: float) -> None:
        self._limit = limit
        self.state: Literal["closed", "open", "trial"] = "closed"
        self.since = now
        self.reason = ""
        self._row = 0
        self._pause, self._until = FIRST, now
        self._away = False  # the latest failure was one to reach it at all

    def admits(self, now: float) -> bool:
        """Whether one more request may go out. The one that goes out after a pause is the trial: `begin` tells."""
        return self.state == "closed" or (self.state == "open" and now >= self._until)

    def begin(self) -> bool:
        """A request goes out. True: it is the trial, and what becomes of it must be told with `trial=True`."""
        if self.state == "closed":
            return False
        self.state = "trial"
        return True

    def answered(self, now: float) -> None:
        """The judge answered, whatever it said."""
        if self._row:
            self.since = now
        self._row, self._pause, self.state = 0, FIRST, "closed"

    def failed(self, now: float, reason: str, *, away: bool, trial: bool) -> None:
        """A request failed. `away`: nobody was reached, or the connection broke."""
        if not self._row:
            self.since = now
        self._row += 1
        self.reason, self._away = reason, away
        if trial and self.state == "trial":
            self._pause = min(2 * self._pause, AWAY if away else LAST)
        elif self.state != "closed" or self._row < self._limit:
            return
        self.state, self._until = "open", now + spread(self._pause)

    def unused(self, now: float, trial: bool) -> None:
        """A request was not sent after all."""
        if trial and self.state == "trial":
            self.state, self._until = "open", now

    def held(self) -> None:
        """The trial's connection has held for `SETTLED`."""
        if self.state == "trial" and self._away:
            self._row, self.state = 0, "closed"

    def due(self) -> float | None:
        """When it next admits a request by itself; None: it depends on an answer, or on nothing."""
        return self._until if self.state == "open" else None
