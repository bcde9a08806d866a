"""The entry of a container that several processes share, and how a scheduler comes to its launcher."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
from waiting import lives, wait_until

from syncline.runtime.settings import Settings
from syncline.scheduler.launch.launcher import Observed
from syncline.scheduler.launch.pod import Played
from syncline.scheduler.placement import COMMANDS, POD_COMMANDS

SERVES = """
import http.server, os, signal
signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
class H(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        ready = self.path != "/ready" or os.path.exists(os.environ["SYNCLINE_WORKER"])
        self.send_response(200 if ready else 503); self.send_header("content-length", "0"); self.end_headers()
    def log_message(self, *_): pass
address = os.environ["SYNCLINE_HEALTH_HOST"], int(os.environ["SYNCLINE_HEALTH_PORT"])
print("up", os.getpid(), flush=True)
http.server.ThreadingHTTPServer(address, H).serve_forever()
"""


class Entry:
    """`launch/pod.py` with two processes that serve; each is ready once its file is there."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.port = folder, _free_ports(3)
        played = [
            Played(
                name=f"j1/{name}",
                argv=(sys.executable, "-c", SERVES),
                env={"SYNCLINE_WORKER": str(folder / name)},
                start=5,
            )
            for name in ("w0", "trainer")
        ]
        env = {**os.environ, "SYNCLINE_CACHE": str(folder), "SYNCLINE_HEALTH_PORT": str(self.port)}
        words = [
            sys.executable,
            "-m",
            "syncline.scheduler.launch.pod",
            "5",
            msgspec.json.encode(played).decode(),
        ]
        self.process = subprocess.Popen(words, env=env, stdout=subprocess.PIPE)

    def ask(self, path: str) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=5)
        try:
            connection.request("GET", path)
            answer = connection.getresponse()
            return answer.status, answer.read()
        except OSError:
            return 0, b""
        finally:
            connection.close()

    def processes(self) -> Observed:
        return msgspec.json.decode(self.ask("/processes")[1], type=Observed)


def _free_ports(count: int) -> int:
    """The first of so many neighbouring ports that are free now."""
    while True:
        with socket.create_server(("127.0.0.1", 0)) as first:
            port = int(first.getsockname()[1])
            try:
                for more in range(1, count):
                    socket.create_server(("127.0.0.1", port + more)).close()
            except (OSError, OverflowError):
                continue
            return port


@pytest.fixture
def entry(tmp_path: Path) -> Iterator[Entry]:
    started = Entry(tmp_path)
    try:
        yield started
    finally:
        started.process.kill()
        started.process.communicate()


def test_an_entry_keeps_its_processes_answers_for_them_and_takes_them_with_it(
    entry: Entry, tmp_path: Path
) -> None:
    wait_until(lambda: entry.ask("/started")[0] == 200, 30, "started")
    assert entry.ask("/health")[0] == 200
    assert entry.ask("/ready")[0] == 503
    (tmp_path / "w0").touch()
    (tmp_path / "trainer").touch()
    wait_until(lambda: entry.ask("/ready")[0] == 200, 30, "all are ready")
    assert entry.ask("/else")[0] == 404
    views = entry.processes().processes
    assert {name: (view.state, view.starts) for name, view in views.items()} == {
        "j1/w0": ("running", 1),
        "j1/trainer": ("running", 1),
    }
    pids = {name: view.pid for name, view in views.items()}
    os.kill(pids["j1/trainer"] or 0, signal.SIGKILL)
    wait_until(
        lambda: entry.processes().processes["j1/trainer"].starts == 2, 30, "the trainer is there again"
    )
    wait_until(lambda: entry.ask("/ready")[0] == 200, 30, "all are ready again")
    after = {name: view.pid for name, view in entry.processes().processes.items()}
    assert after["j1/w0"] == pids["j1/w0"]  # the other was left alone
    children = [psutil.Process(pid) for pid in after.values()]
    entry.process.terminate()
    out, _ = entry.process.communicate(timeout=30)
    assert entry.process.returncode == 0
    assert not any(lives(child) for child in children)
    assert out.count(b"up") == 3  # what they say goes to the container's own output


@pytest.mark.parametrize(
    ("environ", "story"),
    [
        ({"SYNCLINE_LAUNCHER": "docker"}, "SYNCLINE_LAUNCHER 'docker'"),
        ({"SYNCLINE_LAUNCHER": "kubernetes"}, "SYNCLINE_LAUNCHER_FILE is not set"),
        ({"SYNCLINE_REPLICA": "rollout-x"}, "SYNCLINE_REPLICA 'rollout-x'"),
        ({"SYNCLINE_HEALTH_PORT": "-1"}, "SYNCLINE_HEALTH_PORT"),
        ({"SYNCLINE_DRAIN": "soon"}, "SYNCLINE_DRAIN 'soon'"),
    ],
)
def test_settings_that_cannot_be_are_refused_by_name(environ: dict[str, str], story: str) -> None:
    with pytest.raises(ValueError, match=story):
        Settings.read(environ)


def test_a_replica_is_the_worker_of_its_ordinal_and_children_read_the_same(tmp_path: Path) -> None:
    given = {"SYNCLINE_REPLICA": "j1-rollout-12", "SYNCLINE_LAUNCHER": "kubernetes", "SYNCLINE_DRAIN": "20"}
    given |= {
        "SYNCLINE_LAUNCHER_FILE": str(tmp_path / "l"),
        "SYNCLINE_TRACES": str(tmp_path / "t"),
        "SYNCLINE_HEALTH_HOST": "::1",
    }
    settings = Settings.read(given)
    assert settings.worker == "w12"
    assert settings.traces == tmp_path / "t"
    assert Settings.read(settings.environ()) == settings
    assert Settings.read(given | {"SYNCLINE_WORKER": "w3"}).worker == "w3"


def test_pods_run_the_same_modules_with_their_images_python() -> None:
    assert POD_COMMANDS.keys() == COMMANDS.keys()
    assert {words[0] for words in POD_COMMANDS.values()} == {"python"}
    assert [words[1:] for words in POD_COMMANDS.values()] == [words[1:] for words in COMMANDS.values()]


def test_a_scheduler_that_cannot_read_its_file_says_so_and_ends(redis_url: str, tmp_path: Path) -> None:
    file = tmp_path / "launcher.yaml"
    file.write_text(json.dumps({"release": "r", "leese": "l"}))
    env: dict[str, Any] = {
        **os.environ,
        "SYNCLINE_REDIS_URL": redis_url,
        "SYNCLINE_RUNS": str(tmp_path),
        "SYNCLINE_PORT": "0",
    }
    env |= {"SYNCLINE_LAUNCHER": "kubernetes", "SYNCLINE_LAUNCHER_FILE": str(file)}
    words = [sys.executable, "-m", "syncline.scheduler"]
    done = subprocess.run(words, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    assert "leese" in done.stderr
