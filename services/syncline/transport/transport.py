"""The two sides of every kind, what passes between them, and how a pull fails."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Protocol

from syncline.contract.pulled import Pulled
from syncline.contract.version_path import SignedManifest, SyncOrder, VersionId
from syncline.runtime.store import BlobStore


class PullFailed(ValueError):
    """A version did not come whole; the message names worker and blob. What serves is untouched, and the next order
    to stage begins anew, with what has come so far.
    """


class Unreachable(PullFailed):
    """Nobody answered, or the connection broke again and again, until the deadline."""


class Late(PullFailed):
    """The deadline of the pull has passed, though bytes came."""


class NotOffered(PullFailed):
    """The source answers and does not have it: retired meanwhile, or never published."""


class Damaged(PullFailed):
    """Bytes whose digest is not their name, or a manifest that is not the ordered one."""


class WrongLength(PullFailed):
    """The source says that a blob has another length than the manifest says."""


class NoRoom(PullFailed):
    """The worker's disk took no more."""


class Superseded(PullFailed):
    """Given up because a newer order came, or because the worker ends or sleeps."""


class NotOfferable(ValueError):
    """Sync's side cannot make a version's bytes available; the message says what failed."""


class Moved:
    """What of a manifest has moved so far: filled by the puller, told in the ack."""

    def __init__(self) -> None:
        self.full = self.deltas = self.held = self.resumed = 0
        self.fallbacks: dict[str, int] = {}

    def told(self, kind: str, seconds: float) -> Pulled:
        """As the ack carries it."""
        return Pulled(
            kind=kind,
            seconds=seconds,
            full=self.full,
            deltas=self.deltas,
            held=self.held,
            resumed=self.resumed,
            fallbacks=dict(self.fallbacks),
        )


class Deadline:
    """When a pull must be over, and whether somebody ended it before.

    seconds      from now
    superseded   asked each time; true ends the pull
    """

    def __init__(self, seconds: float, superseded: Callable[[], bool]) -> None:
        self._until = time.monotonic() + seconds
        self._superseded = superseded
        self._wake = threading.Event()
        self._seconds = seconds

    @property
    def superseded(self) -> bool:
        """Whether the pull is to end."""
        return self._superseded()

    def left(self) -> float:
        """Seconds left, above 0. Raises `Superseded`, `Late`."""
        if self._superseded():
            raise Superseded("a newer order has come, or the worker ends")
        left = self._until - time.monotonic()
        if left <= 0:
            raise Late(f"not within {self._seconds:g} s")
        return left

    def rest(self, seconds: float) -> None:
        """Wait before trying again, but not beyond the deadline. `wake` ends it."""
        self._wake.wait(max(0.0, min(seconds, self._until - time.monotonic())))

    def wake(self) -> None:
        """Look at once whether the pull is superseded."""
        self._wake.set()


class Into(Protocol):
    """Where a blob's bytes go, in order. `held` of `nbytes` are there."""

    digest: str
    nbytes: int
    held: int

    def write(self, data: memoryview) -> None:
        """Append. Raises `WrongLength` beyond `nbytes`, `NoRoom`."""
        ...


class Fetch(Protocol):
    """One kind's way to the bytes, by name. Errors of connections are `OSError`: the puller tries again until its
    deadline; `NotOffered` and `WrongLength` are final.
    """

    kind: str

    def seek(self, source: str) -> None:
        """From now on ask `source`, as `SyncOrder.source` says. Closes connections to another one."""
        ...

    def manifest(self, version: VersionId, until: Deadline) -> SignedManifest:
        """The signed manifest; unchecked."""
        ...

    def extra(self, name: str, until: Deadline) -> bytes:
        """The file `name` beside the manifests; unchecked. Raises `NotOffered`."""
        ...

    def blob(self, into: Into, until: Deadline) -> None:
        """Append to `into` from where it stands; returns when all bytes are there. Unhashed."""
        ...

    def done(self) -> None:
        """The pull is over, well or not: let the other side know, if it waits."""
        ...

    def interrupt(self) -> None:
        """From another thread: let what waits for the source fail now, where the kind can."""
        ...

    def close(self) -> None: ...


class Pulling(Protocol):
    """A worker's side. Driven from the staging thread, but for `supersede`, `doubt` and `close`."""

    store: BlobStore

    def pull(self, order: SyncOrder, serving: VersionId | None) -> tuple[SignedManifest, Pulled]:
        """Bring the order's version into `store`, and keep what `serving` names.

        Raises `PullFailed`, `BadManifest`; `MissingManifest` or `OSError` where the store itself is at fault.
        """
        ...

    def supersede(self, seq: int) -> None:
        """End a pull for an order below `seq`, now and later."""
        ...

    def doubt(self) -> None:
        """An engine could not use what was pulled."""
        ...

    def close(self) -> None: ...


class Offering(Protocol):
    """Sync's side. Driven from sync's loop."""

    def offer(self, version: VersionId) -> None:
        """Make the version's bytes available. Safe to repeat; uploads what is missing. Raises `NotOfferable`."""
        ...

    def source(self, version: VersionId, workers: tuple[str, ...], seq: int) -> str:
        """What the order `seq` to stage tells these workers. Never waits, never fails."""
        ...

    def retire(self) -> None:
        """The store may have dropped versions: drop them elsewhere. What cannot be dropped now is tried again."""
        ...

    def close(self) -> None: ...
