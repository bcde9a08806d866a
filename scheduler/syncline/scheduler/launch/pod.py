"""`python -m syncline.scheduler.launch.pod SECONDS PROCESSES`: the first process of a container that several share.

consumes      the processes, as JSON; the settings' health host and port
produces      the processes, each answering on a port of its own; `/started`, `/health`, `/ready` for all of them
              together, and `/processes`, what runs, for the launcher outside
waits for     SIGTERM; then its processes, at most SECONDS
unblocked by  a kubelet

Colocated engines share the devices of one container; phases say who is awake, and this keeps both there: the local
launcher, with its records in the pod's cache, which outlives the container. A process that has not answered `/health`
for as long as a kubelet would wait is killed, alone. The others need not be loaded again for it.
"""

from __future__ import annotations

import contextlib
import http.client
import os
import queue
import signal
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import msgspec

from syncline.runtime.service import family_of
from syncline.runtime.settings import Settings
from syncline.scheduler.launch.launcher import Observed, Placement, Process
from syncline.scheduler.launch.local import LocalLauncher

TICK = 0.5  # seconds between looks at the processes
STUCK = 60.0  # seconds without an answer after which a process that has started is killed
ASK = 2.0  # seconds for an answer
OUTPUT = Path("/dev/stdout")


class Played(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A process of the pod. `start`: seconds that it may take to load."""

    name: str
    argv: tuple[str, ...]
    env: dict[str, str]
    start: float


class Pod:
    """The processes of this container, and what is known of each."""

    def __init__(self, played: list[Played], settings: Settings, grace: float) -> None:
        first = settings.health_port or 0
        self._ports = {one.name: first + 1 + index for index, one in enumerate(played)}
        self._placement = Placement(processes=tuple(self._process(one) for one in played))
        assert settings.cache is not None
        self._launcher = LocalLauncher(settings.cache / f"pod-{first}" / "processes.json", grace=grace)
        self._answers: dict[str, frozenset[str]] = {}  # process -> what it answered 200 to
        self._heard: dict[
            str, tuple[int, float]
        ] = {}  # process -> its pid, monotonic second of its last answer
        self.observed = Observed(processes={})
        self.signals: queue.SimpleQueue[int] = (
            queue.SimpleQueue()
        )  # an event could deadlock with who waits for it
        self.ticked = time.monotonic()

    def run(self) -> None:
        """Keep the processes until told to stop; then end them."""
        told: int | None = None
        while told is None:
            self._launcher.apply(self._placement)
            self.observed = self._launcher.observe()
            self.ticked = time.monotonic()
            for name in self._ports:
                self._ask(name)
            with contextlib.suppress(queue.Empty):
                told = self.signals.get(timeout=TICK)
        self._launcher.stop_all()
        self._launcher.close()

    def all(self, path: str) -> bool:
        """Whether every process has answered 200 to `path` when it was last asked; of `/health`, whether this lives."""
        if path == "/health":
            return time.monotonic() - self.ticked < STUCK
        return all(path in self._answers.get(name, frozenset()) for name in self._ports)

    def _ask(self, name: str) -> None:
        view = self.observed.processes.get(name)
        if view is None or view.pid is None or view.state != "running":
            self._answers[name] = frozenset()
            return
        answers = {path for path in ("/health", "/started", "/ready") if self._answers_to(name, path)}
        self._answers[name] = frozenset(answers)
        pid, heard = self._heard.get(name, (0, 0.0))
        if pid != view.pid or answers:
            self._heard[name] = (view.pid, time.monotonic())
        elif heard + STUCK < time.monotonic():
            print(f"{name} has not answered for {STUCK:.0f} s: killed", file=sys.stderr)  # noqa: T201 - a container's log
            with contextlib.suppress(ProcessLookupError):
                os.killpg(view.pid, signal.SIGKILL)

    def _answers_to(self, name: str, path: str) -> bool:
        connection = http.client.HTTPConnection("127.0.0.1", self._ports[name], timeout=ASK)
        try:
            connection.request("GET", path)
            answer = connection.getresponse()
            answer.read()
            return answer.status == 200
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()

    def _process(self, one: Played) -> Process:
        ports = {"SYNCLINE_HEALTH_HOST": "127.0.0.1", "SYNCLINE_HEALTH_PORT": str(self._ports[one.name])}
        return Process(name=one.name, argv=one.argv, env={**one.env, **ports}, log=OUTPUT, start=one.start)


def serve(pod: Pod, host: str, port: int) -> ThreadingHTTPServer:
    """Answer for the pod on `host:port`, from threads."""

    class Answers(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.path == "/processes":
                self._say(200, msgspec.json.encode(pod.observed))
            elif self.path in ("/started", "/health", "/ready"):
                good = pod.all(self.path)
                self._say(200 if good else 503, msgspec.json.encode({"ready": good}))
            else:
                self.send_error(404, "only /started, /health, /ready and /processes are here")

        def _say(self, status: int, body: bytes) -> None:
            self.send_response(status)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """Probes come each second: they are no news."""

    kind = type("PodServer", (ThreadingHTTPServer,), {"address_family": family_of(host)})
    server: ThreadingHTTPServer = kind((host, port), Answers)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, name="health", daemon=True).start()
    return server


def main(grace: float, told: str) -> None:
    """The container's processes, until SIGTERM."""
    settings = Settings.read(os.environ)
    if settings.cache is None or not settings.health_port:
        sys.exit("pod: SYNCLINE_CACHE and SYNCLINE_HEALTH_PORT are needed")
    pod = Pod(msgspec.json.decode(told, type=list[Played]), settings, grace)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, _: pod.signals.put(number))
    server = serve(pod, settings.health_host, settings.health_port)
    pod.run()
    server.shutdown()


if __name__ == "__main__":
    main(float(sys.argv[1]), sys.argv[2])
