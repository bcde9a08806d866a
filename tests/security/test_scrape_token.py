"""The token of a scraper: it reads /metrics and nothing else, and only the gateway is told it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from security_world import OPERATOR, Installation
from serving import problem
from starlette.routing import Route
from test_tenant_walls import filled, routes

from syncline.gateway.admission import OPEN_PATHS
from syncline.gateway.app import create_app
from syncline.gateway.ui import OPEN_PREFIX
from syncline.runtime.bus import Bus
from syncline.runtime.settings import OWN_SECRETS, Settings
from syncline.scheduler.stack import service_process

SCRAPE = "scrapers-own-token"


@pytest.fixture(scope="module")
def scraped(base: Settings, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Installation]:
    """An installation whose numbers have a token of their own."""
    runs = tmp_path_factory.mktemp("scraped")
    made = Installation(msgspec.structs.replace(base, runs=runs, metrics_token=SCRAPE))
    made.texts["scraper"] = SCRAPE
    yield made
    made.stop()


def test_it_reads_the_numbers(scraped: Installation) -> None:
    answer = scraped.ask("scraper", "GET", "/metrics")
    assert answer.status_code == 200
    assert "syncline_redis_up 1" in answer.text
    scraped.texts["almost"] = SCRAPE[:-1]
    for who in ("", "almost"):
        problem(scraped.ask(who, "GET", "/metrics"), 401)
    problem(scraped.ask("alpha", "GET", "/metrics"), 403)
    assert scraped.ask("operator", "GET", "/metrics").status_code == 200


GUARDED = [
    (method, route)
    for route in routes()
    for method in sorted(route.methods or ())
    if route.path != "/metrics" and route.path not in OPEN_PATHS and not route.path.startswith(OPEN_PREFIX)
]


@pytest.mark.parametrize(
    ("method", "route"), GUARDED, ids=lambda value: value if isinstance(value, str) else value.path
)
def test_it_opens_no_other_route(scraped: Installation, method: str, route: Route) -> None:
    """Not one of all there are, whatever is added; the refusal says nothing but that."""
    ids = {"job": scraped.submit("operator")} if "{job}" in route.path else {}
    answer = scraped.ask("scraper", method, filled(route.path, ids))
    assert answer.status_code == 403
    if method != "HEAD":
        assert problem(answer, 403)["detail"] == "this token reads /metrics and nothing else"


@pytest.mark.parametrize(
    "path", ["/metrics/", "/metrics//", "/metrics;x", "/metrics%20", "/Metrics", "/nowhere"]
)
def test_no_other_spelling_opens_anything(scraped: Installation, path: str) -> None:
    assert scraped.ask("scraper", "GET", path).status_code in (403, 404)
    assert "syncline_redis_up" not in scraped.ask("scraper", "GET", path).text


def test_who_was_turned_away_is_written_down(scraped: Installation) -> None:
    problem(scraped.ask("scraper", "GET", "/v1/jobs"), 403)
    (log,) = (scraped.settings.runs / "audit").glob("*.jsonl")
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    mine = [line for line in lines if line["token"] == "SYNCLINE_METRICS_TOKEN"]
    assert mine
    assert {line["status"] for line in mine} == {403}
    assert SCRAPE not in log.read_text()


def test_two_rights_have_two_tokens(base: Settings) -> None:
    bus = Bus(base.redis_url)
    for token, word in ((OPERATOR, "another"), ("", "empty")):
        with pytest.raises(ValueError, match=f"SYNCLINE_METRICS_TOKEN.*{word}"):
            create_app(msgspec.structs.replace(base, metrics_token=token), bus)
    bus.close()
    with pytest.raises(ValueError, match="SYNCLINE_METRICS_TOKEN is empty"):
        Settings.read({"SYNCLINE_METRICS_TOKEN": ""})


def test_it_opens_no_gateway_to_other_machines(base: Settings, tmp_path: Path) -> None:
    """A gateway that others reach still needs a token for jobs."""
    bus = Bus(base.redis_url)
    alone = msgspec.structs.replace(base, token=None, metrics_token=SCRAPE, runs=tmp_path, host="0.0.0.0")
    with pytest.raises(ValueError, match="SYNCLINE_HOST"):
        create_app(alone, bus)
    bus.close()


def test_only_the_gateway_is_told_it(base: Settings) -> None:
    settings = Settings.read({"SYNCLINE_TOKEN": "one", "SYNCLINE_METRICS_TOKEN": "two"})
    assert settings.metrics_token == "two"
    assert not {"one", "two"} & set(settings.environ().values())
    assert not set(OWN_SECRETS) & set(settings.inherited({"SYNCLINE_METRICS_TOKEN": "two", "PATH": "/bin"}))
    gateway = service_process("gateway", settings, base.redis_url, 0)
    assert {name: gateway.env[name] for name in OWN_SECRETS} == {
        "SYNCLINE_TOKEN": "one",
        "SYNCLINE_METRICS_TOKEN": "two",
    }
    for name in ("scheduler", "errands"):
        assert not set(OWN_SECRETS) & set(service_process(name, settings, base.redis_url, 0).env)
