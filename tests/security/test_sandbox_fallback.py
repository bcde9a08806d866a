"""Where the kernel permits no namespaces: what still holds, and that what does not is said."""

from __future__ import annotations

import subprocess
import sys

from syncline.runtime.sandbox_walls import Walls, environment

_SCRIPT = """
import errno, json, os, socket
from pathlib import Path
from syncline.runtime import sandbox_calls as calls, sandbox_walls as walls
from syncline.runtime.sandbox import Limits, call
from syncline.runtime.sandbox_child import LIBC

number = {"x86_64": 272, "aarch64": 97}[os.uname().machine]
line = calls.Line
refusing = [line(0x20, 0), line(0x15, number, yes="no"), line(0x06, 0x7FFF0000), line(0x06, 0x00050001, label="no")]
LIBC.prctl(38, 1, 0, 0, 0)
assert calls.install(LIBC, calls.assembled(refusing))

found = walls.enclose(walls.hidden([]), walls.needed([]), network=False)

def came_of(act):
    try:
        act()
    except OSError as error:
        return errno.errorcode[error.errno]
    return "done"

def attack():
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return {
        "socket": came_of(lambda: socket.socket()),
        "fork": came_of(os.fork),
        "kill": came_of(lambda: os.kill(os.getppid(), 9)),
        "parent": came_of(lambda: open(f"/proc/{os.getppid()}/mem", "rb")),
        "rights": int(status["CapEff"], 16),
        "environment": dict(os.environ),
    }

limits = Limits(seconds=20.0, memory_mb=256)
print(json.dumps([found.network, found.processes, found.files, found.missing(False), call(attack, limits).value]))
"""


def test_what_holds_without_namespaces() -> None:
    answer = subprocess.run(
        [sys.executable, "-c", _SCRIPT], capture_output=True, text=True, timeout=120, check=True
    )
    import json

    network, processes, files, missing, told = json.loads(answer.stdout)
    assert (network, processes, files) == (False, False, False)
    assert "network could not be left" in missing
    assert "processes are in sight" in missing
    assert "files are bounded" in missing
    assert told == {
        "socket": "EPERM",
        "fork": "EAGAIN",
        "kill": "EPERM",
        "parent": "EACCES",
        "rights": 0,
        "environment": {},
    }


def test_what_is_missing_is_said_in_words() -> None:
    whole = Walls(network=True, processes=True, files=True)
    assert whole.missing(False) == ""
    assert Walls(network=False, processes=True, files=True).missing(True) == ""
    assert "network" in Walls(network=False, processes=True, files=True).missing(False)


def test_few_variables_are_inherited() -> None:
    given = {name: "x" for name in ("PATH", "PYTHONPATH", "LC_ALL", "OMP_NUM_THREADS", "SYNCLINE_DATA")}
    secret = {
        name: "x"
        for name in ("SYNCLINE_TOKEN", "SYNCLINE_REDIS_URL", "WANDB_API_KEY", "AWS_PROFILE", "HF_TOKEN")
    }
    assert environment(given | secret) == given
