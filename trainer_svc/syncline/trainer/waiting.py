"""Waits with a name and a deadline."""

from __future__ import annotations

import time

from syncline.runtime.ledger import Ledger


class BatchOverdue(RuntimeError):
    """No batch could be claimed within `limits.batch_wait`. The message says what is missing."""


class Waiting:
    """A stopwatch that starts when it is first asked."""

    def __init__(self) -> None:
        self._since: float | None = None

    def go(self) -> float:
        """Seconds since the wait began; begins it if need be."""
        now = time.monotonic()
        if self._since is None:
            self._since = now
        return now - self._since

    def stop(self) -> float:
        """End the wait and say how long it was; 0.0 if there was none."""
        waited = 0.0 if self._since is None else time.monotonic() - self._since
        self._since = None
        return waited


def what_is_missing(ledger: Ledger, version: int) -> str:
    """Why no batch can be claimed at `version`, for people."""
    groups = ledger.groups()
    ready = [name for name, group in groups.items() if group.phase == "ready"]
    late = [name for name, group in groups.items() if group.phase == "open"]
    if len(ready) >= ledger.batch_groups:
        return (
            f"{len(ready)} groups are ready, but claiming {ledger.batch_groups} at version {version} would "
            f"leave older ones over the lag bound; groups {_some(late)} must come first"
        )
    if not groups:
        return f"no group is open, {ledger.batch_groups} are needed: nothing is being submitted"
    return f"{len(ready)} of {ledger.batch_groups} groups are ready; groups {_some(late)} are not"


def _some(names: list[int]) -> str:
    shown = ", ".join(str(name) for name in names[:8])
    return shown + (f" and {len(names) - 8} more" if len(names) > 8 else "")
