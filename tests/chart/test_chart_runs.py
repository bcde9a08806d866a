"""Parts of the chart that run without a cluster: Redis' configuration on a real server, the script of `helm test`."""

from __future__ import annotations

import base64
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from chart_tools import CHART, ROOT, ran
from rendered import named, render
from waiting import wait_until

from syncline.runtime.bus import Bus, BusDown
from syncline.scheduler.stack import valkey_binary


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture
def redis_of_the_chart(tmp_path: Path) -> Iterator[str]:
    """A server with the chart's own redis.conf and auth.conf; only paths and port differ. Yields its URL."""
    release = render(sets=("redis.maxmemory=256mb",))
    secret = {
        key: base64.b64decode(value).decode()
        for key, value in named(release, "Secret", "-redis")["data"].items()
    }
    (tmp_path / "auth.conf").write_text(secret["auth.conf"])
    port = free_port()
    text = named(release, "ConfigMap", "-redis")["data"]["redis.conf"]
    for old, new in (
        ("/etc/syncline-redis/auth.conf", str(tmp_path / "auth.conf")),
        ("port 6379", f"port {port}"),
        ("dir /data", f"dir {tmp_path}"),
        ("bind * -::*", "bind 127.0.0.1"),
    ):
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    (tmp_path / "redis.conf").write_text(text)
    with (tmp_path / "redis.log").open("wb") as log:
        server = subprocess.Popen([valkey_binary(), tmp_path / "redis.conf"], stdout=log, stderr=log)
    yield (
        secret["url"]
        .replace(named(release, "Service", "-redis")["metadata"]["name"], "127.0.0.1")
        .replace(":6379", f":{port}")
    )
    server.send_signal(signal.SIGTERM)
    server.wait(20)


def test_redis_takes_its_configuration(redis_of_the_chart: str, tmp_path: Path) -> None:
    """The services' own check passes on it, the password is asked for, and it writes its log."""

    def answers() -> bool:
        bus = Bus(redis_of_the_chart, deadline=0.5)
        try:
            bus.ping()
            bus.require_safe_server()
        except BusDown:
            return False
        finally:
            bus.close()
        return True

    wait_until(answers, 20, "the server answers")
    stranger = Bus(redis_of_the_chart.replace(redis_of_the_chart.split("@")[0], "redis://"), deadline=0.5)
    with pytest.raises(Exception, match=r"(?i)auth"):
        stranger.ping()
    stranger.close()
    assert list((tmp_path / "appendonlydir").glob("*.aof")), (tmp_path / "redis.log").read_text()


SCRIPT = CHART / "files" / "test.py"
TOKEN = "chart-test-token"


def environment(runs: Path, **more: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("SYNCLINE_")}
    return {**kept, "SYNCLINE_RUNS": str(runs), "SYNCLINE_MODELS": str(ROOT / "examples" / "models"), **more}


def test_the_script_of_helm_test_asks_a_real_gateway(redis_url: str, tmp_path: Path) -> None:
    port = free_port()
    given = environment(tmp_path, SYNCLINE_REDIS_URL=redis_url, SYNCLINE_TOKEN=TOKEN, SYNCLINE_PORT=str(port))
    with (tmp_path / "gateway.log").open("wb") as log:
        gateway = subprocess.Popen(
            [sys.executable, "-m", "syncline.gateway"], env=given, stdout=log, stderr=log
        )
    try:
        wait_until((tmp_path / "gateway.json").exists, 60, "the gateway listens")
        (tmp_path / "job.toml").write_text("")
        asks = environment(
            tmp_path,
            SYNCLINE_URL=f"http://127.0.0.1:{port}",
            SYNCLINE_TOKEN=TOKEN,
            SYNCLINE_JOB_FILE=str(tmp_path / "job.toml"),
        )
        code, said = ran(sys.executable, SCRIPT, env=asks)
        assert (code, said.count("ok  ")) == (0, 4), said
        code, said = ran(sys.executable, SCRIPT, env={**asks, "SYNCLINE_TOKEN": "another"})
        assert code == 1
        assert "FAILED  the release's token opens: 401" in said
    finally:
        gateway.terminate()
        gateway.wait(30)


@pytest.mark.long
def test_the_script_of_helm_test_runs_a_job(tmp_path: Path) -> None:
    """The quickstart of values-cpu.yaml, shortened, to its end; and one that cannot be taken."""
    job = yaml.safe_load((CHART / "values-cpu.yaml").read_text())["tests"]["job"]
    short = job.replace("updates = 60", "updates = 4").replace("at_update = 20", "at_update = 1")
    short = short.replace("at_update = 40", "at_update = 2")
    assert short.count("at_update = ") == 2
    given = environment(tmp_path / "runs", SYNCLINE_TOKEN=TOKEN, OMP_NUM_THREADS="1")
    syncline = Path(sys.executable).with_name("syncline")
    port = free_port()
    code, said = ran(syncline, "up", "--port", str(port), env=given)
    assert code == 0, said
    try:
        for text, wanted, word in ((short, 0, "ends: succeeded"), ("name = 1", 1, "FAILED  a job is taken")):
            (tmp_path / "job.toml").write_text(text)
            asks = {
                **given,
                "SYNCLINE_URL": f"http://127.0.0.1:{port}",
                "SYNCLINE_JOB_FILE": str(tmp_path / "job.toml"),
            }
            code, said = ran(sys.executable, SCRIPT, env=asks)
            assert code == wanted, said
            assert word in said
    finally:
        ran(syncline, "down", env=given)
