"""Parts of the chart that run without a cluster: Redis' configuration on a real server, the script of `helm test`."""

from __future__ import annotations

import base64
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from certificates import certificate
from chart_tools import CHART, ROOT, ran
from rendered import named, render
from waiting import wait_until

from syncline.runtime.bus import Bus, BusDown
from syncline.runtime.tokens import TokenStore
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
TOKEN, SCRAPE = "chart-test-token", "chart-scrape-token"


def environment(runs: Path, **more: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("SYNCLINE_")}
    return {**kept, "SYNCLINE_RUNS": str(runs), "SYNCLINE_MODELS": str(ROOT / "examples" / "models"), **more}


def played(container: dict[str, Any], files: dict[str, Path], **secrets: str) -> dict[str, str]:
    """The container's variables as its kubelet would set them; `files`: what lies where something is mounted."""
    found = {
        one["name"]: one.get("value", secrets.get(one["name"], f"what-is-held-as-{one['name']}"))
        for one in container["env"]
    }
    for name, value in found.items():
        if name.endswith("_PORT"):
            found[name] = "0"
        for mounted, here in files.items():
            if value == mounted or value.startswith(f"{mounted}/"):
                found[name] = value.replace(mounted, str(here), 1)
    return found


@contextmanager
def the_charts_gateway(redis_url: str, folder: Path, *sets: str) -> Iterator[dict[str, str]]:
    """A gateway with the variables that the chart gives it and files where it mounts them; those of `helm test`."""
    release, port = render(sets=sets), free_port()
    pod = named(release, "Deployment", "-gateway")["spec"]["template"]["spec"]
    secrets = folder / "secrets"
    secrets.mkdir()
    cert, key = certificate(secrets, "rl.example.org")
    cert.rename(secrets / "tls.crt")
    key.rename(secrets / "tls.key")
    TokenStore(secrets / "tokens.json").add("acme", "member")
    places = {
        "/runs": folder / "runs",
        "/cache": folder / "cache",
        "/models": ROOT / "examples" / "models",
        "/etc/syncline-tls": secrets,
        "/etc/syncline-tokens": secrets,
    }
    given = played(
        pod["containers"][0],
        places,
        SYNCLINE_REDIS_URL=redis_url,
        SYNCLINE_TOKEN=TOKEN,
        SYNCLINE_METRICS_TOKEN=SCRAPE,
        SYNCLINE_HEALTH_HOST="127.0.0.1",
    )
    kept = {name: value for name, value in os.environ.items() if not name.startswith("SYNCLINE_")}
    given = kept | given | {"SYNCLINE_PORT": str(port)}
    (test,) = named(release, "Pod", "-test")["spec"]["containers"]
    asks = played(test, {}, SYNCLINE_TOKEN=TOKEN, SYNCLINE_METRICS_TOKEN=SCRAPE)
    url = asks["SYNCLINE_URL"]
    asks |= {
        "SYNCLINE_URL": f"{url.partition('://')[0]}://127.0.0.1:{port}",
        "SYNCLINE_JOB_FILE": str(folder / "job.toml"),
    }
    (folder / "job.toml").write_text("")
    with (folder / "gateway.log").open("wb") as log:
        gateway = subprocess.Popen(
            [sys.executable, *pod["containers"][0]["command"][1:]], env=given, stdout=log, stderr=log
        )
    try:
        wait_until((folder / "runs" / "gateway.json").exists, 60, "the gateway listens")
        yield kept | asks
    finally:
        gateway.terminate()
        gateway.wait(30)


@pytest.mark.parametrize(
    ("sets", "scheme"),
    [
        ((), "http"),
        (("gateway.tls.secretName=own-tls", "gateway.tokens.existingSecret=tenants"), "https"),
    ],
)
def test_the_script_of_helm_test_asks_the_charts_gateway(
    redis_url: str, tmp_path: Path, sets: tuple[str, ...], scheme: str
) -> None:
    with the_charts_gateway(redis_url, tmp_path, *sets) as asks:
        assert asks["SYNCLINE_URL"].startswith(f"{scheme}://")
        code, said = ran(sys.executable, SCRIPT, env=asks)
        assert (code, said.count("ok  ")) == (0, 6), said
        code, said = ran(sys.executable, SCRIPT, env={**asks, "SYNCLINE_TOKEN": "another"})
        assert code == 1
        assert "FAILED  the release's token opens: 401" in said
        code, said = ran(sys.executable, SCRIPT, env={**asks, "SYNCLINE_METRICS_TOKEN": TOKEN})
        assert code == 1
        assert "FAILED  and nothing else: 200" in said


def test_a_test_that_is_stopped_cancels_its_job(redis_url: str, tmp_path: Path) -> None:
    """Else the job would hold its devices after the pod's deadline. The gateway knows a patience of its own, too."""
    own = f"{redis_url}?db=11"  # where no scheduler of another test finds the job
    with the_charts_gateway(own, tmp_path, "jobs.workerStart=2700") as asks:
        (tmp_path / "job.toml").write_text('name = "stopped"\nmodel.name = "tiny-moe"\n')
        script = subprocess.Popen(
            [sys.executable, SCRIPT], env=asks, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        assert script.stdout is not None
        lines = iter(script.stdout.readline, "")
        taken = next(line for line in lines if "queued" in line)
        job = taken.split()[0]
        script.terminate()
        assert script.wait(30) == 1
        assert f"told to stop; job {job} cancelled: 202" in script.stdout.read()
        script.stdout.close()
        headers = {"authorization": f"Bearer {TOKEN}"}
        answer = httpx.get(f"{asks['SYNCLINE_URL']}/v1/jobs/{job}", headers=headers)
        assert answer.json()["spec"]["limits"]["worker_start"] == 2700.0


@pytest.mark.long
def test_the_script_of_helm_test_runs_a_job(tmp_path: Path) -> None:
    """The quickstart of values-cpu.yaml, shortened, to its end; and one that cannot be taken."""
    job = yaml.safe_load((CHART / "values-cpu.yaml").read_text())["tests"]["job"]
    short = job.replace("updates = 60", "updates = 4").replace("at_update = 20", "at_update = 1")
    short = short.replace("at_update = 40", "at_update = 2")
    assert short.count("at_update = ") == 2
    given = environment(
        tmp_path / "runs", SYNCLINE_TOKEN=TOKEN, SYNCLINE_METRICS_TOKEN=SCRAPE, OMP_NUM_THREADS="1"
    )
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
