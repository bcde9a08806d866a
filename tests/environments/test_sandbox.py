"""The sandbox against functions that misbehave: each ends in time, says how, and leaves no process."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from syncline.runtime.sandbox import Kind, Limits, Outcome, call

LIMITS = Limits(seconds=1.0, memory_mb=128)
SLACK = 5.0  # seconds beyond the deadline on a busy machine


def run(function: Callable[[], object], limits: Limits = LIMITS) -> Outcome:
    """Call it, and hold it to its deadline and to leaving nothing behind."""
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    begun = time.monotonic()
    outcome = call(function, limits)
    assert time.monotonic() - begun < limits.seconds + SLACK
    assert {child.pid for child in psutil.Process().children(recursive=True)} == before
    return outcome


def loop() -> None:
    while True:
        pass


def recurse() -> object:
    return recurse()


def flood() -> None:
    while True:
        os.write(3, b"x" * 4096)


def bomb() -> float:
    """Children and grandchildren, half of them in sessions of their own."""
    for number in range(12):
        if os.fork() == 0:
            if number % 2:
                os.setsid()
            os.fork()
            signal.pause()
    return 1.0


def chatter() -> float:
    print("x" * 100_000)  # noqa: T201
    os.write(2, b"x" * 100_000)
    return 0.5


def big_file() -> float:
    with open("/tmp/syncline-sandbox-test", "wb") as file:
        os.unlink(file.name)
        file.write(bytes(1 << 25))
    return 1.0


def deaf() -> None:
    for number in (signal.SIGTERM, signal.SIGXCPU, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    loop()


@pytest.mark.parametrize("value", [0.5, 1, 0, -3.5, None, True, "text", [1, {"a": None}]])
def test_value_comes_back(value: object) -> None:
    outcome = run(lambda: value)
    assert (outcome.kind, outcome.value) == ("value", value)
    assert type(outcome.value) is type(value)


@pytest.mark.parametrize(
    ("function", "kind", "reason"),
    [
        (loop, "timeout", "killed after 1 s"),
        (deaf, "timeout", "killed after 1 s"),
        (lambda: time.sleep(60), "timeout", "killed after 1 s"),
        (lambda: os._exit(3), "lost", "exit code 3"),
        (lambda: os._exit(0), "lost", "exit code 0"),
        (lambda: os.kill(os.getpid(), signal.SIGKILL), "lost", "SIGKILL"),
        (lambda: os.abort(), "lost", "SIGABRT"),
        (lambda: len(bytearray(1 << 30)), "memory", "MemoryError"),
        (lambda: object(), "unreadable", "no JSON"),
        (lambda: "x" * 1_000_000, "unreadable", "1000002 bytes"),
        (flood, "unreadable", "over 65536 bytes"),
        (lambda: os.write(3, b"garbage"), "unreadable", "malformed"),
        (recurse, "raised", "RecursionError"),
        (lambda: 1 / 0, "raised", "ZeroDivisionError: division by zero"),
        (lambda: exit(4), "raised", "SystemExit"),
        (big_file, "raised", "File too large"),
    ],
)
def test_misbehaviour_has_a_name(function: Callable[[], object], kind: Kind, reason: str) -> None:
    outcome = run(function)
    assert outcome.kind == kind
    assert reason in outcome.reason


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_non_finite_number_is_no_number(value: float) -> None:
    outcome = run(lambda: value)
    assert (outcome.kind, outcome.value) == ("value", str(value))


def test_fork_bomb_is_refused_or_swept() -> None:
    outcome = run(bomb)  # a user other than root may not fork at all
    assert outcome.value == 1.0 or "BlockingIOError" in outcome.reason


def test_output_goes_nowhere(capfd: pytest.CaptureFixture[str]) -> None:
    assert run(chatter).value == 0.5
    assert capfd.readouterr() == ("", "")


def test_no_environment_is_inherited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SYNCLINE_SECRET", "s3cret")

    def look() -> object:
        return [dict(os.environ), Path("/proc/self/environ").read_bytes().strip(b"\0").decode()]

    assert run(look).value == [{}, ""]


def test_no_file_is_inherited(tmp_path: Path) -> None:
    with (tmp_path / "open").open("w") as file:
        os.set_inheritable(file.fileno(), True)
        outcome = run(lambda: sorted(int(fd) for fd in os.listdir("/proc/self/fd")))
    assert isinstance(outcome.value, list)
    assert outcome.value[:4] == [0, 1, 2, 3]  # and the listing's own
    assert len(outcome.value) == 5


def test_passing_trouble_is_told_from_a_fault() -> None:
    def unreachable() -> None:
        raise ConnectionError("x" * 5000)

    outcome = run(unreachable)
    assert outcome.passing
    assert len(outcome.reason) <= 500
    assert not run(lambda: 1 / 0).passing


def test_network_is_there_if_it_was_given() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = server.getsockname()

        def connect() -> str:
            socket.create_connection(address, timeout=1).close()
            return "connected"

        assert run(connect, Limits(seconds=1.0, memory_mb=128, network=True)).value == "connected"
        refused = run(connect)
    assert refused.error == "PermissionError"


def test_parent_is_untouched() -> None:
    environment, descriptors = dict(os.environ), set(os.listdir("/proc/self/fd"))
    run(lambda: os.environ.clear())
    run(loop)
    assert dict(os.environ) == environment
    assert set(os.listdir("/proc/self/fd")) == descriptors
