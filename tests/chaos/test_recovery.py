"""The whole comes back: the machine starts anew, Redis has forgotten all, a backup is restored."""

from __future__ import annotations

import json
import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from guarantees import check, trained
from specs import spec
from stack import Stack
from waiting import lives, wait_until

from syncline.runtime.bus import Bus

UPDATES = 16
SLOW = {"schedule": {"mode": "disjoint", "updates": UPDATES}, "limits": {"worker_idle": 3.0}}


@pytest.fixture
def stack() -> Iterator[Stack]:
    runs = Path(tempfile.mkdtemp(prefix="sl-"))
    started = Stack(runs)
    try:
        yield started.up()
    finally:
        started.down()
        shutil.rmtree(runs, ignore_errors=True)


def everything(runs: Path) -> list[psutil.Process]:
    """Every live process of the installation in `runs`, the supervisor too."""
    pids = [int(json.loads((runs / "up.json").read_text())["supervisor"])]
    for state in ("stack.json", "jobs.json"):
        path = runs / "launch" / state
        records = json.loads(path.read_text())["processes"] if path.exists() else {}
        pids += [int(known["pid"]) for known in records.values() if known["pid"] and not known["dead"]]
    found = []
    for pid in pids:
        try:
            process = psutil.Process(pid)
            found += [process, *process.children(recursive=True)]
        except psutil.NoSuchProcess:
            continue
    return found


def blackout(runs: Path) -> None:
    """`kill -9` of all at once."""
    there = everything(runs)
    assert len(there) >= 6, there
    for process in there:
        try:
            process.send_signal(signal.SIGKILL)
        except psutil.NoSuchProcess:
            continue
    wait_until(lambda: not any(lives(process) for process in there), 20, "everybody's death")


def reboot(runs: Path) -> None:
    """What a machine that starts anew has lost: all processes, the folder of the socket, the pids."""
    url = str(json.loads((runs / "up.json").read_text())["redis_url"])
    blackout(runs)
    shutil.rmtree(Path(url.removeprefix("unix://")).parent)


@pytest.mark.long
@pytest.mark.timeout(300)
def test_a_machine_that_starts_anew_continues_all_jobs(stack: Stack) -> None:
    """Two jobs: the one that ran goes on, the one that waited runs after it."""
    first = stack.submit(spec(**SLOW))
    second = stack.submit(spec(schedule={"mode": "disjoint", "updates": 2}))
    stack.wait_update(first, 5, 120)
    reboot(stack.runs)
    stack.up()
    for job, updates in ((first, UPDATES), (second, 2)):
        stack.wait(job, 200)
        check(stack.runs / job, stack.summary(job), updates, max_lag=1)


def empty(stack: Stack) -> None:
    """Kill Redis and let it come back with no data; the supervisor must not be quicker than the deletion."""
    pid = wait_until(lambda: stack.pid("redis"), 20, "Redis")
    os.kill(pid, signal.SIGSTOP)
    shutil.rmtree(stack.runs / "redis" / "appendonlydir")
    os.kill(pid, signal.SIGKILL)


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.parametrize("how", ["flushed", "restarted empty"])
def test_jobs_go_on_from_their_folders_when_redis_has_forgotten_all(stack: Stack, how: str) -> None:
    job = stack.submit(spec(**SLOW))
    waiting = stack.submit(spec(schedule={"mode": "disjoint", "updates": 2}))
    stack.wait_update(job, 5, 120)
    before = trained(stack.runs / job)
    if how == "flushed":
        bus = Bus(stack.redis_url)
        bus.call("FLUSHALL")
        bus.close()
    else:
        empty(stack)
    stack.wait(job, 200)
    check(stack.runs / job, stack.summary(job), UPDATES, max_lag=1)
    assert before.keys() <= trained(stack.runs / job).keys()
    stack.wait(waiting, 100)
    check(stack.runs / waiting, stack.summary(waiting), 2, max_lag=1)


@pytest.mark.long
@pytest.mark.timeout(300)
def test_a_copy_of_the_run_root_goes_on_elsewhere(stack: Stack) -> None:
    """Taken while the job runs, Redis first; nothing of the first installation is needed."""
    job = stack.submit(spec(**SLOW))
    stack.wait_update(job, 5, 120)
    copy = Path(tempfile.mkdtemp(prefix="sl-"))
    shutil.copytree(stack.runs / "redis", copy / "redis")
    backup(stack.runs / job, copy / job)
    stack.cli("down")
    other = Stack(copy)
    try:
        other.up()
        other.wait(job, 200)
        check(copy / job, other.summary(job), UPDATES, max_lag=1)
    finally:
        other.down()
        shutil.rmtree(copy, ignore_errors=True)
        stack.up()


def backup(source: Path, target: Path) -> None:
    """As `cp -r` of a folder that is written to meanwhile: what vanishes while it is copied is not in the copy."""
    for path in sorted(source.rglob("*")):
        place = target / path.relative_to(source)
        try:
            if path.is_dir():
                place.mkdir(parents=True, exist_ok=True)
            else:
                place.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(path, place)
        except FileNotFoundError:
            continue
