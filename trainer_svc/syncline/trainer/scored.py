"""Whether updates have anything scored to train on; a scorer that never answers must not end in success.

An update without one scored member trains nothing and is made all the same: the version keeps its weights. A few of
them in a row are an outage of the scorer; more of them are a run that comes to nothing.
"""

from __future__ import annotations

from syncline.runtime.segments import Segment

AT_FIRST = 3  # updates in a row, while nothing was ever scored: the scorer is wrong, not away
LATER = 10  # updates in a row, once something was


class NothingScored(RuntimeError):
    """Update after update had not one scored trajectory. The message repeats the newest reason."""


class Scored:
    """Counts the updates in a row whose members were all without a reward.

    updates   of the job: one that is shorter than `AT_FIRST` fails at its end
    begun     updates made before this trainer started; they count as scored
    """

    def __init__(self, updates: int, begun: int) -> None:
        self._most = min(AT_FIRST, updates) if begun == 0 else LATER
        self._blind = 0

    def note(self, segment: Segment) -> None:
        """Take notice of an update's segment. Raises `NothingScored`."""
        if not segment.members or any(
            row.reward is not None and row.reward.state == "scored" for row in segment.members
        ):
            self._most, self._blind = LATER, 0
            return
        self._blind += 1
        if self._blind >= self._most:
            why = segment.members[0].why
            raise NothingScored(
                f"{self._blind} updates in a row had no scored trajectory, so nothing was trained: {why}"
            )
