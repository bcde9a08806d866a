"""The local launcher passes the launcher suite, and keeps secrets, orphans and half-made starts in order."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from conformance.launcher import LauncherSuite, MakeLauncher, gone, process
from waiting import wait_until

from syncline.scheduler.launch.launcher import Launcher, Placement, Process
from syncline.scheduler.launch.local import LocalLauncher, child_environment


@pytest.fixture
def make(tmp_path: Path) -> MakeLauncher:
    return lambda: LocalLauncher(tmp_path / "state" / "processes.json", grace=0.5)


class TestLocalLauncher(LauncherSuite):
    """The conformance suite over real processes."""


def test_children_inherit_no_secret() -> None:
    base = {"PATH": "/bin", "SYNCLINE_RUNS": "r", "OTEL_X": "o", "PYTHONPATH": "p"}
    base |= {"AWS_SECRET": "x", "HF_TOKEN": "y"}
    assert child_environment(base, {"SYNCLINE_JOB": "j1"}) == {
        "PATH": "/bin",
        "SYNCLINE_RUNS": "r",
        "OTEL_X": "o",
        "PYTHONPATH": "p",
        "OMP_NUM_THREADS": "1",
        "SYNCLINE_JOB": "j1",
    }


def test_a_real_child_sees_that_environment_and_no_stdin(tmp_path: Path) -> None:
    code = "import os,sys,json; print(json.dumps([dict(os.environ), sys.stdin.read()]), flush=True)"
    launcher = LocalLauncher(tmp_path / "s.json", environ={**os.environ, "MY_TOKEN": "secret"})
    launcher.apply(Placement(processes=(process("w0", tmp_path, code, SYNCLINE_WORKER="w0"),)))
    log = tmp_path / "w0.log"
    text = wait_until(lambda: log.read_text().strip() if log.exists() else "", 20, "it speaks")
    env, stdin = json.loads(text)
    launcher.stop_all()
    assert stdin == ""
    assert env["SYNCLINE_WORKER"] == "w0"
    assert "MY_TOKEN" not in env
    assert "secret" not in (tmp_path / "s.json").read_text()


def test_what_a_dead_leader_leaves_behind_is_swept(tmp_path: Path) -> None:
    code = (
        "import subprocess,sys,time\n"
        "p = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(99)'])\n"
        "print(p.pid, flush=True)\ntime.sleep(99)"
    )
    launcher = LocalLauncher(tmp_path / "s.json")
    placement = Placement(processes=(process("w0", tmp_path, code),))
    launcher.apply(placement)
    log = tmp_path / "w0.log"
    text = wait_until(lambda: log.read_text().strip() if log.exists() else "", 20, "the grandchild runs")
    orphan = int(text)
    leader = launcher.observe().processes["w0"].pid
    assert leader is not None
    os.kill(leader, signal.SIGKILL)
    wait_until(lambda: launcher.observe().processes["w0"].state == "waiting", 5, "death seen")
    wait_until(lambda: _dead(orphan), 5, "the orphan is swept")
    launcher.stop_all()


OWNER = """
import sys
from pathlib import Path
from syncline.scheduler.launch import local
from syncline.scheduler.launch.launcher import Placement, Process
launcher = local.LocalLauncher(Path(sys.argv[1]) / "s.json")
if sys.argv[2] == "early":
    real = launcher._save
    def die_before_second_save():
        if launcher._records["w0"].pid is not None: import os; os._exit(9)
        real()
    launcher._save = die_before_second_save
launcher.apply(Placement(processes=(Process(name="w0",
    argv=(sys.executable, "-c", "import time; time.sleep(99)"), log=Path(sys.argv[1]) / "w0.log"),)))
import os; os._exit(9)
"""


@pytest.mark.parametrize("moment", ["late", "early"])
def test_an_owner_that_dies_leaves_one_process_for_the_next(tmp_path: Path, moment: str) -> None:
    """`early`: it dies between the start and the writing of the pid."""
    assert subprocess.run([sys.executable, "-c", OWNER, str(tmp_path), moment], check=False).returncode == 9
    launcher = LocalLauncher(tmp_path / "s.json")
    argv = (sys.executable, "-c", "import time; time.sleep(99)")
    launcher.apply(Placement(processes=(Process(name="w0", argv=argv, log=tmp_path / "w0.log"),)))
    view = launcher.observe().processes["w0"]
    assert (view.state, view.starts) == ("running", 1)
    launcher.stop_all()
    assert view.pid is not None
    wait_until(lambda: _dead(view.pid or 0), 5, "gone")


def test_a_recorded_pid_of_a_stranger_is_not_adopted_or_killed(tmp_path: Path) -> None:
    first = LocalLauncher(tmp_path / "s.json")
    placement = Placement(processes=(process("w0", tmp_path),))
    first.apply(placement)
    real = first.observe().processes["w0"].pid
    first.close()
    stranger = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(99)"], start_new_session=True)
    state = json.loads((tmp_path / "s.json").read_text())
    state["processes"]["w0"]["pid"] = stranger.pid
    state["processes"]["w0"]["created"] -= 100
    (tmp_path / "s.json").write_text(json.dumps(state))
    second = LocalLauncher(tmp_path / "s.json")
    assert second.observe().processes["w0"].state == "waiting"
    second.stop_all()
    assert stranger.poll() is None
    stranger.kill()
    stranger.wait()
    wait_until(lambda: gone(real) or _dead(real or 0), 5, "the lost one was found by its token")


def test_a_broken_state_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "s.json").write_text("{")
    with pytest.raises(ValueError, match=r"s\.json"):
        LocalLauncher(tmp_path / "s.json")


def test_a_command_that_does_not_exist_is_named(tmp_path: Path) -> None:
    launcher: Launcher = LocalLauncher(tmp_path / "s.json")
    with pytest.raises(ValueError, match="w9"):
        launcher.apply(Placement(processes=(Process(name="w9", argv=("/nowhere/x",), log=tmp_path / "l"),)))
    launcher.stop_all()


def _dead(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True
