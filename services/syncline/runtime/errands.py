"""Errands: work that may be retried, sent through Celery on the same Redis. The only importer of celery.

Trajectories never go through here; an errand names one and the worker reads it from its stream. What is set below
is set on purpose, because the defaults lose or repeat work for tasks of this length, and `assert_settings` holds
the running app to it.
"""

from __future__ import annotations

import functools
import os
import signal
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any
from urllib.parse import parse_qs, quote, urlsplit

import msgspec
from celery import Celery, Task, signals
from celery.exceptions import SecurityWarning
from celery.worker import state

from syncline.contract.streams import CELERY
from syncline.runtime.bus import Bus
from syncline.runtime.settings import Settings

QUEUE = "errands"
KEY_PREFIX = CELERY.at(QUEUE).removesuffix(QUEUE)
SCORE = "syncline.score"
BATCH = 16  # score errands in one message
QUICK_BATCH = 64  # of a job whose scorer is asked about many responses at once
LONGEST = 3600.0 + 600.0  # seconds one message may keep a worker: see `errands.loop`
VISIBILITY = 2 * 3600  # seconds after which an unacknowledged message counts as lost and is given to another
DELIVERIES = 5  # times that one errand may kill its worker


class ScoreErrand(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Score one trajectory. Stamped by whoever sends it."""

    trajectory: str
    attempt: int
    tries: int = 0  # how often the scorer has failed on it for a passing reason
    traceparent: str = ""  # hop that this errand follows; empty: the record's own context


class WrongCelery(Exception):
    """The Celery app is not set as this system needs it. The message names the setting."""


def broker_url(redis_url: str) -> str:
    """Celery's form of a Redis URL: it spells a unix socket `redis+socket://` and its database `virtual_host`."""
    parts = urlsplit(redis_url)
    if parts.scheme != "unix":
        return redis_url
    query = parse_qs(parts.query)
    password = query.get("password", [parts.password or ""])[0]
    user = f"{quote(parts.username or '')}:{quote(password)}@" if password else ""
    return f"redis+socket://{user}{parts.path}?virtual_host={query.get('db', ['0'])[0]}"


@functools.lru_cache(maxsize=8)
def _app(redis_url: str) -> Celery:
    app = Celery("syncline", set_as_current=False)
    app.conf.update(
        broker_url=broker_url(redis_url),
        broker_connection_retry_on_startup=True,
        broker_connection_max_retries=None,
        broker_transport_options={
            "visibility_timeout": VISIBILITY,
            "global_keyprefix": KEY_PREFIX,
            "socket_timeout": 30.0,
            "socket_connect_timeout": 5.0,
            "health_check_interval": 10,
            "unacked_restore_interval": 10,
            "unacked_restore_throttle": 1,
            "max_retries": 5,
            "interval_max": 2.0,
        },
        result_backend=None,
        task_ignore_result=True,
        task_serializer="json",
        accept_content=["json"],
        task_default_queue=QUEUE,
        task_acks_late=True,
        task_acks_on_failure_or_timeout=True,
        task_reject_on_worker_lost=True,  # without an own cap this repeats for ever: see DELIVERIES
        task_publish_retry_policy={
            "max_retries": 10,
            "interval_start": 0.1,
            "interval_step": 0.5,
            "interval_max": 5.0,
        },
        task_time_limit=LONGEST + 600.0,
        worker_prefetch_multiplier=1,
        worker_enable_remote_control=False,
        worker_send_task_events=False,
        worker_hijack_root_logger=False,
        worker_redirect_stdouts=False,
        worker_cancel_long_running_tasks_on_connection_loss=False,  # a repeated score is harmless, a lost one waits
    )
    assert_settings(app)
    return app


def assert_settings(app: Celery) -> None:
    """Raises `WrongCelery` for an app that could lose, repeat without end, or unpickle a message."""
    options = app.conf.broker_transport_options
    wanted: dict[str, bool] = {
        "broker_transport_options.visibility_timeout": options["visibility_timeout"] > LONGEST,
        "broker_transport_options.global_keyprefix": options["global_keyprefix"] == KEY_PREFIX,
        "task_serializer": app.conf.task_serializer == "json",
        "accept_content": list(app.conf.accept_content) == ["json"],
        "task_acks_late": bool(app.conf.task_acks_late),
        "task_reject_on_worker_lost": bool(app.conf.task_reject_on_worker_lost),
        "worker_prefetch_multiplier": app.conf.worker_prefetch_multiplier == 1,
        "task_ignore_result": bool(app.conf.task_ignore_result),
        "result_backend": app.conf.result_backend is None,
    }
    wrong = [name for name, right in wanted.items() if not right]
    if wrong:
        raise WrongCelery(f"Celery is set differently from what errands need: {', '.join(wrong)}")


class Errands:
    """The sending side; safe to share between threads. Connects when it first sends."""

    def __init__(self, redis_url: str) -> None:
        self._app = _app(redis_url)

    def send_score(self, job: str, trajectory: str, attempt: int, traceparent: str = "") -> None:
        """Ask for one trajectory's reward."""
        self.send_scores(job, [ScoreErrand(trajectory, attempt, 0, traceparent)])

    def send_scores(
        self, job: str, errands: Sequence[ScoreErrand], delay: float = 0.0, batch: int = BATCH
    ) -> None:
        """Ask for many: one message per `batch`. `delay`: seconds before they may run.

        Raises `kombu.exceptions.OperationalError` if Redis stays away; the scheduler sends again what was lost.
        """
        for start in range(0, len(errands), batch):
            part = errands[start : start + batch]
            self._app.send_task(
                SCORE,
                args=[job, [[e.trajectory, e.attempt, e.tries] for e in part]],
                headers={"traceparents": [e.traceparent for e in part]},
                queue=QUEUE,
                countdown=delay or None,
                argsrepr=f"{len(part)} of {job}",  # to be told in logs: Celery's own takes as long as the sending
                kwargsrepr="",
            )

    def close(self) -> None:
        """Drop the connections."""
        self._app.close()


@functools.cache
def _own() -> Errands:
    return Errands(Settings.read(os.environ).redis_url)


def send_score(job: str, trajectory: str, attempt: int, traceparent: str = "") -> None:
    """`Errands.send_score` on this process's own Redis."""
    _own().send_score(job, trajectory, attempt, traceparent)


def send_scores(job: str, errands: Sequence[ScoreErrand], batch: int = BATCH) -> None:
    """`Errands.send_scores` on this process's own Redis; for many at once it costs far less than one by one."""
    _own().send_scores(job, errands, batch=batch)


class WorkerStuck(Exception):
    """Messages wait and this worker, though connected, fetches none: it must start anew."""


class WorkerWatch:
    """Judges the worker of this process by what it fetches, for an open connection proves nothing.

    patience   seconds for which messages may wait while nothing is fetched and nothing runs
    """

    def __init__(self, bus: Bus, patience: float = 10.0) -> None:
        self._bus, self._patience = bus, patience
        self._fetched = 0
        signals.task_received.connect(self._count, weak=False)

    def until(self, stopping: threading.Event) -> None:
        """Watch until `stopping`. Raises `WorkerStuck`."""
        since, seen = time.monotonic(), -1
        while not stopping.wait(self._patience / 10):
            waiting = int(self._bus.many([("LLEN", CELERY.at(QUEUE))])[0])
            if not waiting or self._fetched != seen or state.reserved_requests:
                since, seen = time.monotonic(), self._fetched
            elif time.monotonic() - since > self._patience:
                raise WorkerStuck(f"{waiting} messages wait, and none was fetched for {self._patience:g} s")

    def _count(self, **_: object) -> None:
        self._fetched += 1


def serve(
    redis_url: str,
    score: Callable[[str, Sequence[ScoreErrand]], None],
    *,
    concurrency: int,
    prepare: Callable[[], None],
    leave: Callable[[], None],
    stopping: threading.Event,
) -> None:
    """Work on errands in `concurrency` child processes until SIGTERM, then finish what runs and return.

    score     called in a child with a job and errands of it; what it raises is logged, and the message is over
    prepare   called in each child when it starts; `leave` when it ends
    stopping  set by a SIGTERM that came before Celery took the signal over, which Celery knows nothing of
    """
    app = _app(redis_url)
    # it warns root of messages that run code when read; ours are JSON, and containers often have root alone
    warnings.filterwarnings("ignore", category=SecurityWarning)

    @app.task(name=SCORE, bind=True)  # type: ignore[untyped-decorator]
    def run(task: Task, job: str, errands: list[list[Any]]) -> None:
        traceparents = task.request.headers["traceparents"]
        rows = [[*row, parent] for row, parent in zip(errands, traceparents, strict=True)]
        score(job, msgspec.convert(rows, list[ScoreErrand]))

    signals.worker_process_init.connect(lambda **_: prepare(), weak=False)
    signals.worker_process_shutdown.connect(lambda **_: leave(), weak=False)
    signals.worker_ready.connect(lambda **_: _stop_if(stopping), weak=False)
    worker = app.Worker(
        concurrency=concurrency,
        pool="prefork",
        queues=[QUEUE],
        without_gossip=True,
        without_mingle=True,
        without_heartbeat=True,
        quiet=True,
        loglevel="WARNING",
    )
    worker.start()
    if worker.exitcode:
        raise WrongCelery(f"the Celery worker ended with exit code {worker.exitcode}")


def _stop_if(stopping: threading.Event) -> None:
    if stopping.is_set():
        os.kill(os.getpid(), signal.SIGTERM)
