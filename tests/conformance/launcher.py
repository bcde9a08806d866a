"""What every launcher must do. A launcher's own test file subclasses `LauncherSuite` and gives `launcher`."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from itertools import pairwise
from pathlib import Path

import pytest
from waiting import wait_until

from syncline.scheduler.launch.launcher import Launcher, Placement, Process, ProcessView

SLEEPER = "import sys,time; print('up', flush=True)\nwhile True: time.sleep(0.05)"
STUBBORN = "import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + SLEEPER
MakeLauncher = Callable[[], Launcher]


def process(name: str, log: Path, code: str = SLEEPER, *words: str, **env: str) -> Process:
    return Process(name=name, argv=(sys.executable, "-c", code, *words), env=env, log=log / f"{name}.log")


class LauncherSuite:
    """Subclasses give the fixture `make`, which makes a launcher over the same state each time it is called."""

    @pytest.fixture
    def launcher(self, make: MakeLauncher) -> Iterator[Launcher]:
        launcher = make()
        yield launcher
        with suppress(ValueError):  # a test that closed it has taken care of its processes
            launcher.stop_all()

    def settle(self, launcher: Launcher, placement: Placement) -> dict[str, ProcessView]:
        """Apply until exactly the wanted processes run; their views."""

        wanted = {p.name for p in placement.processes}

        def settled() -> bool:
            launcher.apply(placement)
            seen = launcher.observe()
            return seen.running() == wanted == set(seen.processes)

        wait_until(settled, 20, "settled")
        return launcher.observe().processes

    def waiting(self, launcher: Launcher, name: str) -> ProcessView | None:
        """The view of a process that is dead and will be started again."""
        view = launcher.observe().processes[name]
        return view if view.state == "waiting" else None

    def up(self, path: Path, times: int = 1) -> None:
        wait_until(lambda: path.exists() and path.read_text().count("up") >= times, 20, f"{path.name} is up")

    def test_applying_twice_changes_nothing(self, launcher: Launcher, tmp_path: Path) -> None:
        placement = Placement(processes=(process("w0", tmp_path), process("w1", tmp_path)))
        first = self.settle(launcher, placement)
        launcher.apply(placement)
        assert launcher.observe().processes == first
        assert {view.starts for view in first.values()} == {1}
        assert {view.restarts for view in first.values()} == {0}

    def test_a_killed_process_is_started_again_and_its_end_is_shown(
        self, launcher: Launcher, tmp_path: Path
    ) -> None:
        placement = Placement(processes=(process("w0", tmp_path),))
        before = self.settle(launcher, placement)["w0"]
        assert before.pid is not None
        os.kill(before.pid, signal.SIGKILL)
        dead = wait_until(partial(self.waiting, launcher, "w0"), 5, "death seen")
        assert dead is not None
        assert dead.exit == -signal.SIGKILL
        assert dead.pid is None
        after = self.settle(launcher, placement)["w0"]
        assert after.pid not in (None, before.pid)
        assert (after.starts, after.restarts) == (2, 1)

    def test_a_process_that_dies_at_once_is_retried_with_growing_pauses(
        self, launcher: Launcher, tmp_path: Path
    ) -> None:
        placement = Placement(processes=(process("w0", tmp_path, "import sys; sys.exit(7)"),))
        starts: list[float] = []

        def four_starts() -> bool:
            launcher.apply(placement)
            view = launcher.observe().processes["w0"]
            if view.starts > len(starts):
                starts.append(view.since)
            return len(starts) >= 4

        wait_until(four_starts, 20, "four starts")
        pauses = [b - a for a, b in pairwise(starts)]
        assert pauses[0] >= 0.2
        assert pauses[1] >= 0.4
        assert pauses[2] >= 0.8
        seen = wait_until(partial(self.waiting, launcher, "w0"), 10, "it dies again")
        assert seen is not None
        assert (seen.exit, seen.restarts) == (7, 3)

    def test_the_next_owner_adopts_what_runs(self, make: MakeLauncher, tmp_path: Path) -> None:
        placement = Placement(processes=(process("w0", tmp_path), process("w1", tmp_path)))
        first = make()
        before = self.settle(first, placement)
        first.close()
        second = make()
        second.apply(placement)
        assert second.observe().processes == before
        victim = before["w0"].pid
        assert victim is not None
        os.kill(victim, signal.SIGKILL)
        wait_until(lambda: second.observe().processes["w0"].state == "waiting", 5, "an adopted death is seen")
        after = self.settle(second, placement)
        assert after["w0"].pid != before["w0"].pid
        assert after["w1"] == before["w1"]
        second.stop_all()

    def test_there_is_one_owner(self, launcher: Launcher, make: MakeLauncher) -> None:
        launcher.apply(Placement())
        with pytest.raises(RuntimeError):
            make()

    def test_it_scales_down_and_up_and_leaves_the_others_alone(
        self, launcher: Launcher, tmp_path: Path
    ) -> None:
        w0, w1, w2 = (process(name, tmp_path) for name in ("w0", "w1", "w2"))
        before = self.settle(launcher, Placement(processes=(w0, w1)))
        grown = self.settle(launcher, Placement(processes=(w0, w1, w2)))
        assert {n: grown[n] for n in before} == before
        shrunk = self.settle(launcher, Placement(processes=(w1,)))
        assert shrunk == {"w1": before["w1"]}
        assert gone(before["w0"].pid)

    def test_a_changed_environment_or_command_replaces_the_process(
        self, launcher: Launcher, tmp_path: Path
    ) -> None:
        first = self.settle(launcher, Placement(processes=(process("w0", tmp_path, A="1"),)))["w0"]

        def replaced(placement: Placement, starts: int) -> ProcessView:
            wait_until(lambda: self.settle(launcher, placement)["w0"].starts == starts, 20, "replaced")
            return launcher.observe().processes["w0"]

        second = replaced(Placement(processes=(process("w0", tmp_path, A="2"),)), 2)
        third = replaced(Placement(processes=(process("w0", tmp_path, SLEEPER, "x", A="2"),)), 3)
        assert len({first.pid, second.pid, third.pid}) == 3
        assert gone(first.pid)
        assert gone(second.pid)
        assert third.restarts == 0

    @pytest.mark.parametrize("frozen", [False, True])
    def test_a_process_that_does_not_end_is_killed_after_the_grace(
        self, launcher: Launcher, tmp_path: Path, frozen: bool
    ) -> None:
        view = self.settle(launcher, Placement(processes=(process("w0", tmp_path, STUBBORN),)))["w0"]
        self.up(tmp_path / "w0.log")
        assert view.pid is not None
        if frozen:
            os.kill(view.pid, signal.SIGSTOP)
        launcher.apply(Placement())
        assert launcher.observe().processes["w0"].state == "stopping"
        launcher.stop_all()
        assert gone(view.pid)
        assert launcher.observe().processes == {}

    def test_policies_decide_who_comes_back(self, launcher: Launcher, tmp_path: Path) -> None:
        def ends(name: str, code: int, restart: str) -> Process:
            return Process(
                name=name,
                argv=(sys.executable, "-c", f"import sys; sys.exit({code})"),
                log=tmp_path / f"{name}.log",
                restart=restart,  # type: ignore[arg-type]
            )

        placement = Placement(
            processes=(ends("n", 1, "never"), ends("f0", 0, "on_failure"), ends("f1", 1, "on_failure"))
        )

        def came_back() -> bool:
            launcher.apply(placement)
            return launcher.observe().processes["f1"].restarts >= 1

        wait_until(came_back, 20, "the failed one comes back")

        def both_over() -> dict[str, ProcessView] | None:
            seen = launcher.observe().processes
            return seen if seen["n"].state == seen["f0"].state == "exited" else None

        seen = wait_until(both_over, 10, "over")
        assert seen is not None
        assert (seen["n"].exit, seen["n"].starts) == (1, 1)
        assert (seen["f0"].exit, seen["f0"].starts) == (0, 1)

    def test_a_name_twice_is_refused(self, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match="w0"):
            Placement(processes=(process("w0", tmp_path), process("w0", tmp_path)))


def gone(pid: int | None) -> bool:
    assert pid is not None
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False
