"""The sandbox that is kept: many calls in one process, and all that bounds a call still bounds each of them."""

from __future__ import annotations

import os
import resource
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from waiting import wait_until

from syncline.runtime import sandbox_kept
from syncline.runtime.sandbox import Limits, Outcome
from syncline.runtime.sandbox_kept import Kept, runner

LIMITS = Limits(seconds=1.0, memory_mb=128)
HELD: list[bytes] = []


def spin() -> None:
    while True:
        pass


def leave_a_child() -> None:
    if os.fork() == 0:
        os.setsid()
        signal.pause()
    threading.Event().wait()


def one_and_later_another() -> None:
    """A line too many, which is read as this call's answer; its own would come when another call waits for one."""
    os.write(3, b'{"kind":"value","value":1}\n')
    threading.Event().wait()


def hold(request: bytes) -> list[bytes]:
    HELD.append(request)
    return HELD


def serve(request: bytes) -> object:
    """What the request's first word says."""
    what, _, rest = request.strip().decode().partition(" ")
    acts: dict[str, Callable[[], object]] = {
        "pid": os.getpid,
        "say": lambda: rest,
        "spin": spin,
        "die": lambda: os._exit(3),
        "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
        "hoard": lambda: len(bytearray(1 << 30)),
        "raise": lambda: 1 / 0,
        "object": object,
        "flood": lambda: os.write(3, b"x" * 70_000),
        "two": lambda: os.write(3, b'{"kind":"value","value":1}\n'),
        "late": one_and_later_another,
        "fork": leave_a_child,
        "burn": lambda: burn(float(rest)),
        "limit": lambda: resource.getrlimit(resource.RLIMIT_CPU)[0],
        "files": lambda: sorted(int(fd) for fd in os.listdir("/proc/self/fd")),
        "environ": lambda: [dict(os.environ), Path("/proc/self/environ").read_bytes().strip(b"\0").decode()],
        "hold": lambda: len(hold(request)),
    }
    return acts[what]()


@pytest.fixture
def kept() -> Iterator[Kept]:
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    kept = Kept(serve, LIMITS)
    yield kept
    kept.close()
    assert {child.pid for child in psutil.Process().children(recursive=True)} == before


def value(outcome: Outcome) -> object:
    assert outcome.kind == "value", outcome
    return outcome.value


def test_many_calls_are_answered_by_one_process_apart_from_this_one(kept: Kept) -> None:
    pids = {value(kept.run(b"pid")) for _ in range(20)}
    assert len(pids) == 1
    assert os.getpid() not in pids
    assert value(kept.run(b"say " + b"x" * 20_000)) == "x" * 20_000
    assert HELD == []


@pytest.mark.parametrize(
    ("request_", "kind", "reason"),
    [
        (b"spin", "timeout", "killed after 1 s"),
        (b"die", "lost", "exit code 3"),
        (b"kill", "lost", "SIGKILL"),
        (b"hoard", "memory", "MemoryError"),
        (b"raise", "raised", "ZeroDivisionError"),
        (b"object", "unreadable", "no JSON"),
        (b"flood", "unreadable", "over 65536 bytes"),
        (b"two", "unreadable", "result: "),  # read one by one or both at once
        (b"late", "unreadable", "answers call 0, and call 1 was asked"),
        (b"fork", "raised", "BlockingIOError"),
    ],
)
def test_what_ends_badly_ends_its_process_and_the_next_call_has_another(
    kept: Kept, request_: bytes, kind: str, reason: str
) -> None:
    before = value(kept.run(b"pid"))
    outcome = kept.run(request_)
    assert outcome.kind == kind
    assert reason in outcome.reason
    assert outcome.seconds < LIMITS.seconds + 5
    after = value(kept.run(b"pid"))
    assert before != after
    assert isinstance(before, int)
    assert not psutil.pid_exists(before)


def test_processor_time_is_bounded_for_each_call_and_not_for_all_together() -> None:
    kept = Kept(serve, Limits(seconds=20.0, memory_mb=128))
    before = value(kept.run(b"limit"))
    assert value(kept.run(b"burn 1.1")) is None
    after = value(kept.run(b"limit"))
    assert isinstance(before, int)
    assert before in (21, 22)
    assert after in (before + 1, before + 2)
    kept.close()


def burn(seconds: float) -> None:
    begun = time.process_time()
    while time.process_time() < begun + seconds:
        pass


def test_a_process_that_died_idle_is_one_lost_call(kept: Kept) -> None:
    pid = value(kept.run(b"pid"))
    assert isinstance(pid, int)
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: psutil.Process(pid).status() == psutil.STATUS_ZOMBIE, 10, "its end")
    assert kept.run(b"pid").kind == "lost"
    assert value(kept.run(b"pid")) != pid


def test_it_is_replaced_after_so_many_calls(kept: Kept, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox_kept, "CALLS", 3)
    pids = [value(kept.run(b"pid")) for _ in range(7)]
    assert pids[0] == pids[2] != pids[3] == pids[5] != pids[6]


def test_it_inherits_no_file_and_no_environment(kept: Kept, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SYNCLINE_SECRET", "s3cret")
    assert value(kept.run(b"environ")) == [{}, ""]
    files = value(kept.run(b"files"))
    assert isinstance(files, list)
    assert files[:4] == [0, 1, 2, 3]
    assert len(files) == 6, "the reader of its wire, and the listing's own"


def test_foreign_code_has_a_process_for_each_call() -> None:
    run = runner(serve, LIMITS, kept=False)
    assert value(run(b"pid")) != value(run(b"pid"))
    assert value(run(b"hold x")) == value(run(b"hold x")) == 1
    kept = runner(serve, LIMITS, kept=True)
    assert [value(kept(b"hold x")) for _ in range(2)] == [1, 2]
