"""Sync's orders: stage, verify, commit, abort, and the acks that tell how far this worker got.

Staging (`staging.py`) runs in a thread of its own while the engine serves. A version is acked `verified` after its
bytes were read back and the canaries were scored on the staged buffer; the flip happens in `advance`, between decode
steps.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Literal

from syncline.contract.streams import ACKS
from syncline.contract.version_path import ACTIVE, VERIFIED, Ack, SyncOrder, VersionId
from syncline.rollout.engine import CommitPolicy, Committed, OldVersion, RolloutEngine
from syncline.rollout.staging import Brought, Verified, bring, check
from syncline.runtime.bus import Bus
from syncline.runtime.store import MissingManifest
from syncline.runtime.tracing import record
from syncline.transport.transport import Pulling, Superseded

_LOG = logging.getLogger("syncline.rollout")
_CONTEXTS = 16  # versions whose trace context is kept

AckKind = Literal["staged", "verified", "active", "aborted", "failed", "refused"]

REJOIN = 5.0  # seconds without a version and without an order after which a worker asks again


class Orders:
    """One worker's side of the version path.

    name, incarnation   who acks
    policy              what a commit does to running requests
    before_commit       what must still be asked of the version that serves
    """

    def __init__(
        self,
        bus: Bus,
        engine: RolloutEngine,
        pulling: Pulling,
        job: str,
        name: str,
        incarnation: str,
        policy: CommitPolicy,
        before_commit: Callable[[], None],
    ) -> None:
        self._bus, self._engine, self._pulling = bus, engine, pulling
        self._job, self._name, self._incarnation = job, name, incarnation
        self._policy, self._before_commit = policy, before_commit
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="stage")
        self._staging: tuple[SyncOrder, Future[Verified]] | None = None
        self._next: SyncOrder | None = (
            None  # a stage order that waits: for the thread, or for the engine to wake
        )
        self._commit: SyncOrder | None = None
        self._verified: dict[VersionId, str] = {}  # traceparent of the verified hop
        self.contexts: dict[VersionId, str] = {}  # traceparent of the active hop, to link tokens to
        self._asked = float("-inf")
        self.trouble = ""  # why the last version was not taken; "" after one was

    # ---- what the loop asks
    @property
    def busy(self) -> bool:
        """Whether something is under way that `advance` should look at soon."""
        return self._staging is not None or self._commit is not None

    @property
    def committing(self) -> bool:
        """A commit waits for running requests."""
        return self._commit is not None

    def take(self, order: SyncOrder) -> None:
        """Note an order that is addressed to this worker. Others are not."""
        if order.workers and self._name not in order.workers:
            return
        match order.order:
            case "stage":
                self._take_stage(order)
            case "commit":
                self._take_commit(order)
            case "abort":
                self._take_abort(order)

    def advance(self, awake: bool) -> None:
        """Start, finish and commit what is due. Call between decode steps."""
        if self._staging is not None and self._staging[1].done():
            order, future = self._staging
            self._staging = None
            self._finish_staging(order, future)
        if self._next is not None and self._staging is None and awake:
            order, self._next = self._next, None
            if not self._engine.describe().double_buffer:
                self._before_commit()  # what serves now is gone once staging has begun
            self._staging = (order, self._thread.submit(self._stage, order))
        if self._commit is not None and awake:
            self._before_commit()
            committed = self._engine.commit(self._policy)
            if committed is not None:
                order, self._commit = self._commit, None
                self._active(order, committed)

    def join(self, awake: bool) -> None:
        """Ask for the current version if none serves and none is coming.

        One that is staged may wait for a barrier, or for an order that never comes as its sync has died: sync, who
        knows the difference, is asked in both cases.
        """
        idle = self._engine.serving is None and not self.busy and self._next is None
        if awake and idle and time.monotonic() >= self._asked + REJOIN:
            self._asked = time.monotonic()
            self._say(Ack(worker=self._name, incarnation=self._incarnation, kind="joined", version=None))

    def forget(self) -> None:
        """The engine goes to sleep: what was staged and not committed is gone. A staging thread is waited
        for.
        """
        if self._staging is not None:
            order, future = self._staging
            self._staging = None
            self._pulling.supersede(order.seq + 1)
            self._finish_staging(order, future)
        self._commit = None
        self._asked = float("-inf")

    def close(self) -> None:
        """End the staging thread, and what it pulls."""
        if self._staging is not None:
            self._pulling.supersede(self._staging[0].seq + 1)
        self._thread.shutdown(wait=True, cancel_futures=True)
        self._pulling.close()

    # ---- orders
    def _take_stage(self, order: SyncOrder) -> None:
        if self._commit is not None:  # a newer version replaces one that still waits for requests
            self._commit = None
            self._engine.abort_stage()
        self._pulling.supersede(order.seq)  # sync orders anew when it no longer waits for what comes now
        self._next = order

    def _take_commit(self, order: SyncOrder) -> None:
        serving = self._engine.serving
        if serving == (order.version, order.digest):
            self._say(self._ack(order, "active", in_flight=self._engine.running))
        elif self._engine.staged == order.version:
            self._commit = order
        else:
            reason = f"version {order.version} is not staged here"
            self._say(self._ack(order, "failed", reason=reason))

    def _take_abort(self, order: SyncOrder) -> None:
        if self._next is not None and self._next.version == order.version:
            self._next = None
        if self._staging is not None and self._staging[0].version == order.version:
            self._pulling.supersede(order.seq)
            self._staging[1].exception()  # waits: a load cannot be stopped half-way
            self._staging = None
        if self._engine.staged == order.version:
            self._commit = None
            self._engine.abort_stage()
        self._say(self._ack(order, "aborted"))

    # ---- staging
    def _stage(self, order: SyncOrder) -> Verified:
        """In the thread."""
        brought = bring(self._engine, self._pulling, order, self._job, self._name)
        self._say(self._told(order, "staged", brought))
        return check(self._engine, order, brought)

    def _told(self, order: SyncOrder, kind: AckKind, brought: Brought, **more: Any) -> Ack:
        staged = brought.staged
        more |= {"nbytes": staged.nbytes, "seconds": staged.seconds, "pulled": brought.pulled}
        return self._ack(order, kind, **more)

    # ---- back in the loop
    def _finish_staging(self, order: SyncOrder, future: Future[Verified]) -> None:
        try:
            found = future.result()
        except Superseded as error:
            _LOG.info("version %s: %s", order.version, error)  # nobody waits for an answer
            return
        except OldVersion as error:
            self._refuse(order, "refused", str(error))
            return
        except (ValueError, MissingManifest, OSError) as error:
            self._pulling.doubt()
            self._refuse(order, "failed", str(error))
            return
        # NaN is no agreement
        good = found.gap is None or found.gap <= order.tolerance
        staged = found.brought.staged
        verdict = staged.verdict if good else "failed"
        self._verified[order.version] = record(
            VERIFIED,
            found.brought.traceparent,
            found.began,
            time.time(),
            job=self._job,
            version=order.version,
            digest=staged.digest,
            worker=self._name,
            loaded_digest=staged.loaded_digest,
            canary_gap=found.gap,
            verdict=verdict,
        )
        if not good:
            if self._engine.staged == order.version:
                self._engine.abort_stage()
            reason = f"canary gap {found.gap} exceeds the tolerance {order.tolerance:g}"
            self._refuse(order, "failed", reason, gap=found.gap)
            return
        self.trouble = ""
        self._say(
            self._told(
                order,
                "verified",
                found.brought,
                loaded_digest=staged.loaded_digest,
                canary_gap=found.gap,
                verdict=verdict,
                trace=found.trace,
            )
        )

    def _active(self, order: SyncOrder, committed: Committed) -> None:
        pause = committed.pause * 1000
        ended = time.time()
        self.contexts[order.version] = record(
            ACTIVE,
            self._verified.pop(order.version, order.traceparent) or None,
            ended - committed.pause,
            ended,
            job=self._job,
            version=committed.version,
            digest=committed.digest,
            worker=self._name,
            pause_ms=pause,
            policy=self._policy.kind,
            in_flight=committed.in_flight,
        )
        for old in sorted(self.contexts)[:-_CONTEXTS]:
            del self.contexts[old]
        self._say(self._ack(order, "active", pause_ms=pause, in_flight=committed.in_flight))

    def _refuse(
        self, order: SyncOrder, kind: Literal["failed", "refused"], reason: str, gap: float | None = None
    ) -> None:
        self.trouble = f"version {order.version}: {reason}"
        _LOG.warning("%s %s", kind, self.trouble)
        self._say(self._ack(order, kind, reason=reason, canary_gap=gap))

    def _ack(self, order: SyncOrder, kind: AckKind, **more: Any) -> Ack:
        return Ack(
            worker=self._name,
            incarnation=self._incarnation,
            kind=kind,
            version=order.version,
            digest=order.digest,
            seq=order.seq,
            **more,
        )

    def _say(self, ack: Ack) -> None:
        self._bus.append(ACKS.at(self._job), ack)
