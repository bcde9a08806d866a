"""Hostile code in a real scorer: each limit is tried, each wall is climbed, and the next call works.

Where the kernel permits no namespaces the walls do not stand, and what that leaves open is shown too.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from waiting import wait_until

from syncline.contract.job import JobSpec
from syncline.errands.forker import Forker
from syncline.runtime.sandbox import Outcome

CANARY = "canary-of-the-operator"
Asks = Callable[..., Outcome]


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """A run root with a manifest key, a Redis's socket beside it, both of which a scorer hides."""
    (tmp_path / "runs" / "j0123456789").mkdir(parents=True)
    (tmp_path / "runs" / "j0123456789" / "key").write_text(CANARY)
    return tmp_path / "runs"


@pytest.fixture
def scored(runs: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], Forker]]:
    """Makes scorers of a function of `hostile.py`, with secrets around them."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))
    for name in ("SYNCLINE_TOKEN", "WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY", "SYNCLINE_REDIS_URL"):
        monkeypatch.setenv(name, CANARY)
    with contextlib.ExitStack() as stack:

        def make(function: str, **reward: object) -> Forker:
            given = {"source": "python", "function": f"hostile:{function}", "timeout": 10.0, "memory_mb": 256}
            spec = {"name": "hostile", "model": {"name": "tiny-dense"}, "reward": {**given, **reward}}
            made = Forker(JobSpec.model_validate(spec), (runs, runs.parent / "redis.sock"))
            stack.callback(made.close)
            return made

        yield make


def walls_stand(forker: Forker) -> bool:
    """Whether this kernel permits namespaces; what is missing is told by the scorer itself."""
    return forker.missing == ""


def strangers() -> set[int]:
    """Living processes below this one; where a suite has made it the reaper of orphans, those end as zombies here."""
    found = set()
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if process.status() != psutil.STATUS_ZOMBIE:
                found.add(process.pid)
    return found


def test_a_fork_bomb_is_refused(scored: Callable[[str], Forker]) -> None:
    before, forker = strangers(), scored("forks")
    for _ in range(2):
        told = forker.run("t", 0, "").value
        assert isinstance(told, list)
        assert (
            {"BlockingIOError"} <= set(told) <= {"BlockingIOError", "FileNotFoundError"}
        )  # a pty has no device
        assert len(strangers() - before) <= 2  # the scorer, and who waits for it outside of its walls


def test_threads_end_with_memory_or_limit(scored: Callable[..., Forker]) -> None:
    made = scored("threads").run("t", 0, "")
    assert made.kind == "value"
    assert isinstance(made.value, int)
    assert made.value < 200


def test_memory_is_bounded_by_every_way_to_it(scored: Callable[..., Forker]) -> None:
    told = scored("memory").run("t", 0, "").value
    assert isinstance(told, dict)
    assert told["heap"] == "MemoryError"
    assert told["mmap"] == "OSError"
    assert told["memfd"] == "PermissionError"
    assert told["shm"] == -1
    assert told["stack"] in ("RuntimeError", "MemoryError")


def test_endless_output_goes_nowhere_and_ends_in_time(scored: Callable[..., Forker], capfd: Any) -> None:
    forker = scored("endless", timeout=1.0)
    outcome = forker.run("t", 0, "")
    assert outcome.kind == "timeout"
    assert "xxxx" not in "".join(capfd.readouterr())


def test_a_disk_cannot_be_filled(scored: Callable[..., Forker]) -> None:
    forker = scored("fills", timeout=30.0)
    for _ in range(2):  # the second finds nothing of the first
        told = forker.run("t", 0, "").value
        if not walls_stand(forker):
            pytest.skip(f"this kernel has no namespaces: {forker.missing}")
        assert isinstance(told, list)
        before, total, files, reason = told
        assert before == []
        assert total <= 64 << 20
        assert files <= 1024
        assert reason == "No space left on device"


def test_nothing_but_the_scratch_folder_can_be_written(scored: Callable[..., Forker], runs: Path) -> None:
    forker = scored("writes")
    written = forker.run("t", 0, f"{runs}:{runs.parent}:{runs / 'j0123456789'}").value
    if walls_stand(forker):
        assert written == ["/var/tmp"]
    assert not list(runs.rglob("mark"))


def test_no_secret_can_be_read(scored: Callable[..., Forker], runs: Path) -> None:
    forker = scored("reads")
    found = forker.run("t", 0, f"{CANARY}:{runs}").value
    if walls_stand(forker):
        assert found == []
    assert isinstance(found, list)
    assert not [place for place in found if "environ" in place or place.endswith("/mem")]


@pytest.mark.parametrize("network", [False, True])
def test_the_network_is_for_who_was_given_it(
    scored: Callable[..., Forker], runs: Path, network: bool
) -> None:
    """A socket in a file is not of the network, so it is hidden besides."""
    path = runs.parent / "redis.sock"
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket(socket.AF_UNIX) as redis:
        redis.bind(str(path))
        redis.listen()
        forker = scored("connects", network=network)
        told = forker.run("t", 0, f"{server.getsockname()[1]}:{path}").value
    assert isinstance(told, dict)
    if network:
        assert told["tcp"] == "done"
        assert told["unix"] != "done" or not walls_stand(forker)
        assert told["raw"] == "PermissionError"
    else:
        assert set(told.values()) == {"PermissionError"}


def test_nobody_can_be_signalled(scored: Callable[..., Forker]) -> None:
    victim = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        forker = scored("signals")
        told = forker.run("t", 0, str(victim.pid)).value
        assert isinstance(told, dict)
        assert set(told.values()) == {"PermissionError"}
        assert victim.poll() is None
        assert forker.run("t", 0, str(victim.pid)).kind == "value"  # by the same scorer, which lives
    finally:
        victim.kill()
        victim.communicate()


def test_there_is_no_way_out(scored: Callable[..., Forker]) -> None:
    told = scored("leaves").run("t", 0, "").value
    assert isinstance(told, dict)
    assert told.pop("privileges") == 0
    assert told.pop("setuid") in ("PermissionError", "root without rights")
    calls = ("mount", "unshare", "ptrace")
    assert {told.pop(name) for name in calls} == {-1}
    assert told.pop("limit") in ("PermissionError", "ValueError")
    assert set(told.values()) <= {"PermissionError", "OSError"}  # the latter: read-only


def test_another_program_gives_no_reward(scored: Callable[..., Forker]) -> None:
    assert scored("becomes").run("t", 0, "").kind == "lost"


def test_an_answer_of_its_own_making_is_worth_what_a_returned_one_is(scored: Callable[..., Forker]) -> None:
    """A function may return any number; a forged answer can say no more, and concerns its own response alone."""
    assert scored("forges").run("t", 0, "").value == 1.0


@pytest.mark.parametrize("whom", ["outside", "inside"])
def test_all_of_it_ends_with_the_scorer(scored: Callable[..., Forker], whom: str) -> None:
    """Whether the process outside of the walls is killed, or the first one inside."""
    before = strangers()
    forker = scored("endless", timeout=60.0)
    assert forker.run("t", 0, "quiet").value == 0.0
    chain = sorted(strangers() - before)
    thread = threading.Thread(target=forker.run, args=("t", 0, ""))
    thread.start()
    wait_until(lambda: len(strangers() - before) > len(chain), 30, "a sandbox at work")
    os.kill(chain[0] if whom == "outside" else chain[-1], signal.SIGKILL)
    thread.join(30)
    assert not thread.is_alive()
    forker.close()
    wait_until(lambda: not (strangers() - before), 10, "the end of everything that it started")
