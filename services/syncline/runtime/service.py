"""The frame of every process: settings, bus, tracing, health, heartbeat, signals, and failing fast.

The only place with a catch-all. A process either does its work or is dead: an exception in the main function
or in any thread started through the context ends it with exit code 1, and a launcher starts another.
"""

from __future__ import annotations

import json
import logging
import os
import queue
import secrets
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from syncline.contract.events import Alarm, Event, Failed, Heartbeat
from syncline.contract.streams import EVENTS, HEARTBEAT
from syncline.runtime import tracing
from syncline.runtime.bus import Bus, BusDown, ServerReplaced, UnsafeServer, pack
from syncline.runtime.durable import disk_full
from syncline.runtime.lease import Lease, LeaseLost, LeaseNotGiven
from syncline.runtime.settings import Settings

BEAT = 1.0  # seconds between heartbeats
GONE = 5.0  # seconds after the last beat at which a process counts as gone
OWN_END = (BusDown, LeaseLost, ServerReplaced)
LEAVING = 5.0  # seconds that a process which ends may spend on a Redis that does not answer


class ServiceContext:
    """What a service's main function gets.

    `name` is the worker's name for a rollout worker and the service's name otherwise; `incarnation` is random
    for each process start.
    """

    def __init__(self, service: str, settings: Settings, bus: Bus) -> None:
        self.service = service
        self.settings = settings
        self.bus = bus
        self.name = settings.worker or service
        self.incarnation = secrets.token_hex(6)
        self.stopping = threading.Event()
        self.port: int | None = None
        self.log = logging.getLogger(f"syncline.{service}")
        self._ready, self._why = False, "starting"
        self._started = False
        self._ended = threading.Event()  # main has returned: beats and renewals may stop
        self._leases: list[Lease] = []
        self._threads: list[threading.Thread] = []  # of the frame itself, joined before the bus closes

    @property
    def job(self) -> str:
        """The job that this process works for. Raises `ValueError` if the environment names none."""
        if self.settings.job is None:
            raise ValueError(f"SYNCLINE_JOB is not set: {self.service} works for one job")
        return self.settings.job

    def stop_requested(self) -> bool:
        """Whether the process was told to stop. Finish or hand back what runs, then return from main."""
        return self.stopping.is_set()

    def ready(self, ready: bool, why: str = "") -> None:
        """Say whether this process can do its work; `why` is needed when it cannot.

        The first word of it says, too, that the process has started: it has loaded what it works with.
        """
        if not ready and not why:
            raise ValueError("not ready without a reason")
        self._started = True
        self._ready, self._why = ready, "" if ready else why

    def emit(self, event: Event) -> str:
        """Append to the job's events; returns the entry's id."""
        return self.bus.append(EVENTS.at(self.job), event)

    def require_same_server(self) -> None:
        """Raises `ServerReplaced`: a process that lives by what Redis remembers begins again from it."""
        if self.bus.replaced():
            raise ServerReplaced(
                "another Redis process answers now: this process begins again from what it holds"
            )

    def thread(self, name: str, target: Callable[[], None]) -> threading.Thread:
        """Start a daemon thread whose failure ends the process."""
        thread = threading.Thread(target=self._guarded, args=(name, target), name=name, daemon=True)
        thread.start()
        return thread

    def lease(self, name: str) -> Lease:
        """Become the only writer `name` (such as "trainer"); waits for the last one's lease to run out.

        Losing the lease ends the process at once.
        """
        lock = self.lease_named(name)
        lock.acquire(self.stopping)
        self._leases.append(lock)
        self._threads.append(self.thread(f"lease-{name}", lambda: lock.renew_until(self._ended)))
        return lock

    def lease_named(self, name: str) -> Lease:
        """The lease that `lease` takes under that name: to ask whether it is held, and to write under it."""
        return Lease(self.bus, f"{self.settings.job}/{name}" if self.settings.job else name, self.incarnation)

    def heartbeat(self) -> Heartbeat:
        """This process as others see it."""
        return Heartbeat(
            service=self.service,
            name=self.name,
            incarnation=self.incarnation,
            pid=os.getpid(),
            port=self.port,
            ready=self._ready,
            why=self._why,
            at=time.time(),
            spans=tracing.ended(),
            missing=tracing.losses(),
        )

    @property
    def heartbeat_key(self) -> str:
        """Where this process's heartbeat lies."""
        who = f"{self.service}/{self.name}"
        return HEARTBEAT.at(f"{self.settings.job}/{who}" if self.settings.job else who)

    def _guarded(self, name: str, target: Callable[[], None]) -> None:
        try:
            target()
        except Exception as error:  # noqa: BLE001 - the frame
            if self._ended.is_set():  # main has returned and the bus is closing under the others
                self.log.info("thread %s ended after main: %s", name, _story(error))
                return
            fail(self, f"thread {name}: {_story(error)}", error)
            os._exit(1)  # a dead thread kills its process; the main thread may be anywhere

    def _beat(self) -> None:
        while not self._ended.is_set():
            self.bus.set(self.heartbeat_key, pack(self.heartbeat()), ttl=GONE)
            self._ended.wait(BEAT)
        self.bus.delete(self.heartbeat_key)


def run(service: str, main: Callable[[ServiceContext], None], own_port: bool = False) -> None:
    """Run a service's main function in the frame, then exit: 0 after a return, 1 after any exception.

    own_port   the service itself listens on the settings' port and says so in `context.port`; health then has
               another one
    """
    sys.exit(_run(service, main, own_port))


def _run(service: str, main: Callable[[ServiceContext], None], own_port: bool = False) -> int:
    try:
        settings = Settings.read(os.environ)
        _log_to_stderr(service, settings)
        bus = Bus(settings.redis_url)
        bus.require_safe_server()
        context = ServiceContext(service, settings, bus)
        inherited = 0 if own_port else settings.port or 0
        health = _serve_health(context, inherited if settings.health_port is None else settings.health_port)
    except (ValueError, BusDown, UnsafeServer) as error:
        print(f"{service}: {error}", file=sys.stderr)  # noqa: T201 - there may be no log yet
        return 1
    tracing.setup(service, context.name, settings.traces_written, settings.otlp, settings.traces_sent)
    _listen(context)
    context._threads.append(context.thread("heartbeat", context._beat))
    context.log.info("up: incarnation %s, pid %d, port %s", context.incarnation, os.getpid(), context.port)
    try:
        main(context)
    except LeaseNotGiven as error:
        context.log.info("%s", error)
        return 0
    except Exception as error:  # noqa: BLE001 - the frame
        fail(context, _story(error), error)
        return 1
    else:
        context.log.info("done")
        return 0
    finally:
        _leave(context, health)


def _listen(context: ServiceContext) -> None:
    """SIGTERM and SIGINT set `stopping`, through a queue.

    Setting an event inside a handler can deadlock with a main thread that was interrupted inside that event's
    lock; `SimpleQueue.put` cannot.
    """
    signals: queue.SimpleQueue[int] = queue.SimpleQueue()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, _: signals.put(number))

    def listen() -> None:
        while True:
            number = signals.get()
            context.log.info("told to stop (%s)", signal.Signals(number).name)
            context.stopping.set()

    context.thread("signals", listen)


def fail(context: ServiceContext, reason: str, error: Exception) -> None:
    """Log the failure with its traceback, and tell the job's scheduler if it is the job's failure.

    A lost lease or bus is this process's own end (`OWN_END`): another one goes on where it stood. So is whatever a
    process stumbles over that has lost its lease without knowing: it was frozen, and its successor moved things.
    """
    context.log.error("failed: %s", reason, exc_info=error)
    if context.settings.job is None or isinstance(error, OWN_END):
        return
    context.bus.deadline = LEAVING
    try:
        if not all(lease.held() for lease in context._leases):
            context.log.error("the lease is lost: this failure is not the job's")
        elif disk_full(error):  # there may be room again: another one goes on from what is whole on disk
            context.emit(Alarm(who=context.name, update=0, what=f"the disk is full: {reason}"))
        else:
            context.emit(Failed(who=context.name, reason=reason))
    except Exception as second:  # noqa: BLE001 - the frame
        context.log.error("could not report the failure: %s", second)


def _leave(context: ServiceContext, health: ThreadingHTTPServer) -> None:
    context.stopping.set()
    context._ended.set()
    context.bus.deadline = LEAVING
    try:
        for thread in context._threads:
            thread.join(LEAVING)
        for lock in context._leases:
            lock.release()
        tracing.shutdown()
    except Exception as error:  # noqa: BLE001 - the frame
        context.log.warning("while leaving: %s", error)
    health.shutdown()
    context.bus.close()


def _story(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def _log_to_stderr(service: str, settings: Settings) -> None:
    who = "/".join(part for part in (settings.job, service, settings.worker) if part)
    logging.basicConfig(
        stream=sys.stderr,
        level=logging.INFO,
        format=f"%(asctime)s {who} %(levelname)s %(message)s",
        force=True,
    )
    for noisy in ("httpx", "httpcore", "urllib3"):
        logging.getLogger(noisy).setLevel(logging.WARNING)


def _serve_health(context: ServiceContext, port: int) -> ThreadingHTTPServer:
    """`/health`: 200 while the process lives. `/started`: 200 once it has loaded what it works with. `/ready`: 200
    when it can do its work. Else 503 with why. Answered by threads of their own, whatever the main one does.
    """

    class Health(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            beat = context.heartbeat()
            good = {"/health": True, "/started": context._started, "/ready": beat.ready}.get(self.path)
            if good is None:
                self.send_error(404, "only /health, /started and /ready are here")
                return
            body = json.dumps(
                {"service": beat.service, "name": beat.name, "ready": beat.ready, "why": beat.why}
            ).encode()
            self.send_response(200 if good else 503)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """Probes come each second: they are no news."""

    host = context.settings.health_host
    kind = type("HealthServer", (ThreadingHTTPServer,), {"address_family": family_of(host)})
    try:
        server: ThreadingHTTPServer = kind((host, port), Health)
    except OSError as error:
        raise ValueError(f"port {port} of {host}, for health, cannot be listened on: {error}") from None
    server.daemon_threads = True
    context.port = server.server_address[1]
    threading.Thread(target=server.serve_forever, name="health", daemon=True).start()
    return server


def family_of(host: str) -> socket.AddressFamily:
    """The address family that `host`, an address, is of."""
    return socket.AF_INET6 if ":" in host else socket.AF_INET
