"""Whether a job's work comes to nothing: trajectories that fail one after another while not one is published.

A group that fails is replaced at once, so a cause that does not pass (a context longer than the model, a prompt that
cannot be made) would go round for ever, and fast. Counts are compared with those of the last moment at which
something was published, so a few failures along the way, or the loss of a worker, end nothing.
"""

from __future__ import annotations

from collections.abc import Mapping

from syncline.contract.job import JobSpec

BATCHES = 2  # whole batches that may fail in a row
FEWEST = 16  # trajectories; a tiny batch is no evidence


class Barren:
    """Remembers, for one job, the failures at the last success. A scheduler that restarts begins to count anew."""

    def __init__(self, spec: JobSpec) -> None:
        self._most = max(FEWEST, BATCHES * spec.batch.groups * spec.batch.group_size)
        self._published, self._failed = -1, 0

    def failed_in_a_row(self, counts: Mapping[str, int]) -> int:
        """How many trajectories have failed since one was published, if that is too many; else 0.

        counts   the ledger's sums, in trajectories
        """
        published = counts["buffered"] + counts["trained"] + counts["filtered"]
        if published != self._published:
            self._published, self._failed = published, counts["failed"]
        since = counts["failed"] - self._failed
        return since if since >= self._most else 0
