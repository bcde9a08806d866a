"""docker-compose.yml, judged by the real compose binary without an engine: nothing here starts a container."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import yaml
from chart_tools import ROOT, compose, ran
from rendered import redis_options

from syncline.gateway.tempo import router as tempo_routes
from syncline.runtime.settings import Settings

FILE = ROOT / "docker-compose.yml"
GIVEN = {
    "SYNCLINE_TOKEN": "t" * 20,
    "SYNCLINE_METRICS_TOKEN": "m" * 20,
    "SYNCLINE_REDIS_PASSWORD": "p" * 20,
}


def config(
    file: Path, given: dict[str, str] = GIVEN, *more: str, also: Path | None = None
) -> tuple[int, str]:
    env = {"PATH": os.environ["PATH"], "HOME": str(file.parent), **given}
    nothing = ["--env-file", os.devnull]  # a developer's own .env is not what is tested
    files = [part for path in (file, also) if path is not None for part in ("-f", path)]
    return ran(compose(), *nothing, "--project-directory", ROOT, *files, "config", *more, env=env)


@pytest.fixture(scope="module")
def resolved() -> dict[str, Any]:
    code, said = config(FILE, GIVEN, "--format", "json")
    assert code == 0, said
    found: dict[str, Any] = json.loads(said)
    return found


def test_compose_takes_it() -> None:
    assert config(FILE, GIVEN, "-q") == (0, "")


def test_compose_takes_it_with_gpus() -> None:
    code, said = config(FILE, GIVEN, "--format", "json", also=ROOT / "compose" / "gpu.yaml")
    assert code == 0, said
    found = json.loads(said)["services"]
    device = {"capabilities": ["gpu"], "driver": "nvidia", "count": -1}
    assert found["scheduler"]["deploy"]["resources"]["reservations"]["devices"] == [device]
    assert "deploy" not in found["gateway"]


@pytest.mark.parametrize("missing", GIVEN)
def test_without_secrets_it_says_how_to_make_them(missing: str) -> None:
    code, said = config(FILE, {name: value for name, value in GIVEN.items() if name != missing}, "-q")
    assert code != 0
    assert missing in said
    assert "make .env first" in said


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("    stop_grace_period: 60s", "    stop_graceful: 60s"),
        ("depends_on: [tempo]", "depends_on: [tempos]"),
        ('"redis:/data"', '"redes:/data"'),
        ("networks: [inside]\n    depends_on: [tempo]", "networks: [nowhere]\n    depends_on: [tempo]"),
        ("}:3000", "}:30o0"),
    ],
)
def test_a_broken_file_is_refused(tmp_path: Path, old: str, new: str) -> None:
    text = FILE.read_text()
    assert text.count(old) == 1, old
    (tmp_path / "compose.yml").write_text(text.replace(old, new))
    code, said = config(tmp_path / "compose.yml", GIVEN, "-q")
    assert code != 0, said


def test_the_services_are_there(resolved: dict[str, Any]) -> None:
    ours = {"gateway", "scheduler", "errands"}
    assert set(resolved["services"]) == {*ours, "redis", "otel", "tempo", "prometheus", "grafana"}
    for name in ours:
        service = resolved["services"][name]
        assert service["command"] == ["python", "-m", f"syncline.{name}"]
        settings = Settings.read(service["environment"])
        assert settings.redis_url == f"redis://:{GIVEN['SYNCLINE_REDIS_PASSWORD']}@redis:6379/0"
        assert settings.otlp == "http://otel:4318"
        assert (settings.token is not None) == (settings.metrics_token is not None) == (name == "gateway")


def test_prometheus_has_the_scrape_token_and_no_other(resolved: dict[str, Any]) -> None:
    prometheus, (source,) = resolved["services"]["prometheus"], resolved["services"]["prometheus"]["secrets"]
    assert resolved["secrets"][source["source"]]["environment"] == "SYNCLINE_METRICS_TOKEN"
    (scraped,) = part("prometheus.yaml")["scrape_configs"]
    assert scraped["authorization"]["credentials_file"] == f"/run/secrets/{source['source']}"
    assert GIVEN["SYNCLINE_TOKEN"] not in json.dumps(prometheus)
    gateway = Settings.read(resolved["services"]["gateway"]["environment"])
    assert gateway.metrics_token == GIVEN["SYNCLINE_METRICS_TOKEN"] != gateway.token


def test_nothing_listens_beyond_the_machine(resolved: dict[str, Any]) -> None:
    published = {
        name: port["host_ip"]
        for name, service in resolved["services"].items()
        for port in service.get("ports", ())
    }
    assert published == {"gateway": "127.0.0.1", "grafana": "127.0.0.1"}
    assert resolved["networks"]["inside"]["internal"] is True


def test_containers_have_few_rights(resolved: dict[str, Any]) -> None:
    for name, service in resolved["services"].items():
        assert service["cap_drop"] == ["ALL"], name
        assert service["security_opt"] == ["no-new-privileges:true"], name
        assert service.get("read_only", False) or name == "prometheus", name
        assert service["image"].rpartition(":")[2] not in ("", "latest"), name


def test_redis_never_evicts_and_keeps_a_log(resolved: dict[str, Any]) -> None:
    command = " ".join(resolved["services"]["redis"]["command"])
    assert "--appendonly yes" in command
    for option, value in redis_options().items():
        assert f"--{option} {value}" in command


def test_what_is_mounted_is_there(resolved: dict[str, Any]) -> None:
    mounts = [
        volume
        for service in resolved["services"].values()
        for volume in service.get("volumes", ())
        if volume["type"] == "bind"
    ]
    assert len(mounts) >= 7
    for mount in mounts:
        assert Path(mount["source"]).exists(), mount["source"]
        assert mount["read_only"] is True


def part(name: str) -> Any:
    return yaml.safe_load((ROOT / "compose" / name).read_text())


def test_spans_have_a_way_to_grafana() -> None:
    """Process -> collector -> Tempo -> data source: each names the next by host and port."""
    otel, tempo = part("otel.yaml"), part("tempo.yaml")
    sources = {source["uid"]: source for source in part("grafana/datasources.yaml")["datasources"]}
    assert otel["receivers"]["otlp"]["protocols"]["http"]["endpoint"].endswith(":4318")
    assert otel["exporters"]["otlphttp"]["endpoint"] == "http://tempo:4318"
    assert tempo["distributor"]["receivers"]["otlp"]["protocols"]["http"]["endpoint"].endswith(":4318")
    assert sources["tempo"]["url"] == f"http://tempo:{tempo['server']['http_listen_port']}"
    assert sources["syncline"]["url"] == "http://gateway:8080/tempo"
    assert tempo_routes.prefix == "/tempo/api"
    pipeline = otel["service"]["pipelines"]["traces"]
    for kind in ("receivers", "processors", "exporters"):
        assert set(pipeline[kind]) <= set(otel[kind])


def test_dashboards_are_the_charts(resolved: dict[str, Any]) -> None:
    """Grafana reads the same files that the chart ships, and has the data sources that they name."""
    mounts = {volume["target"]: volume["source"] for volume in resolved["services"]["grafana"]["volumes"]}
    folder = part("grafana/dashboards.yaml")["providers"][0]["options"]["path"]
    assert Path(mounts[folder]) == ROOT / "helm" / "syncline" / "dashboards"
    uids = {source["uid"] for source in part("grafana/datasources.yaml")["datasources"]}
    for board in (ROOT / "helm" / "syncline" / "dashboards").glob("*.json"):
        for asked in datasources(json.loads(board.read_text())):
            assert asked in uids or asked.startswith(("$", "-- ", "grafana")), f"{board.name}: {asked}"


def datasources(node: Any) -> list[str]:
    """Every data source that a dashboard names."""
    if isinstance(node, list):
        return [uid for part in node for uid in datasources(part)]
    if not isinstance(node, dict):
        return []
    own = node.get("datasource")
    found = [own["uid"]] if isinstance(own, dict) and isinstance(own.get("uid"), str) else []
    return found + [uid for part in node.values() for uid in datasources(part)]
