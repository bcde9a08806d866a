"""Quotas and rates of a tenant: held across gateways, told with when to come back, and nobody else's trouble."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from security_world import Installation
from serving import SPEC, Server, problem
from waiting import wait_until

from syncline.contract.streams import JOB, JOBS, RATE
from syncline.runtime.bus import Bus


@pytest.fixture
def second(apart: Installation) -> Iterator[Server]:
    """Another gateway of the same installation."""
    bus = Bus(apart.settings.redis_url, deadline=5)
    found = Server(apart.settings, bus)
    yield found
    found.stop()
    bus.close()


@pytest.fixture(autouse=True)
def _own_bucket(apart: Installation) -> None:
    """Tenants of this name were busy in other tests."""
    for tenant in ("alpha", "beta"):
        apart.bus.delete(RATE.at(tenant))


def test_a_bucket_is_shared_by_gateways_and_fills_again(apart: Installation, second: Server) -> None:
    apart.store.limit("alpha", rate=2.0, burst=5)
    headers = {"authorization": f"Bearer {apart.texts['alpha']}"}
    answers = [
        http.get("/v1/models", headers=headers) for _ in range(6) for http in (apart.server.http, second.http)
    ]
    passed = [answer for answer in answers if answer.status_code == 200]
    turned = [answer for answer in answers if answer.status_code == 429]
    assert 5 <= len(passed) <= 9  # what had come back meanwhile
    assert len(passed) + len(turned) == 12
    told = problem(turned[-1], 429)
    assert "2 requests per second" in told["detail"]
    assert int(turned[-1].headers["retry-after"]) == 1
    wait_until(
        lambda: apart.ask("alpha", "GET", "/v1/models").status_code == 200, 10, "a token in the bucket"
    )


def test_one_tenants_flood_is_not_anothers(apart: Installation) -> None:
    apart.store.limit("alpha", rate=0.01, burst=1)
    assert apart.ask("alpha", "GET", "/v1/models").status_code == 200
    turned = apart.ask("alpha", "GET", "/v1/models")
    assert 90 <= int(turned.headers["retry-after"]) <= 100
    assert problem(turned, 429)
    for who in ("beta", "admin", "operator"):
        assert apart.ask(who, "GET", "/v1/models").status_code == 200
    assert apart.ask("alpha", "GET", "/healthz").status_code == 200


def test_only_so_many_jobs_at_once(apart: Installation) -> None:
    running = len([0 for item in _jobs(apart, "alpha") if item["state"] == "queued"])
    apart.store.limit("alpha", running=running + 2)
    made = [apart.submit("alpha") for _ in range(2)]
    refused = apart.ask("alpha", "POST", "/v1/jobs", json=SPEC)
    assert problem(refused, 429)["type"].endswith("quota-running")
    assert int(refused.headers["retry-after"]) > 0
    assert sorted(path.name for path in apart.settings.runs.glob("j*")) == sorted(
        made
    )  # nothing is left of it
    apart.submit("beta")
    apart.submit("operator")
    apart.server.set_state(made[0], "succeeded")
    apart.submit("alpha")
    problem(apart.ask("alpha", "POST", "/v1/jobs", json=SPEC), 429)


def test_a_repeated_submission_takes_no_room(apart: Installation) -> None:
    running = len([0 for item in _jobs(apart, "alpha") if item["state"] == "queued"])
    apart.store.limit("alpha", running=running + 1)
    key = {"idempotency-key": "once"}
    first = apart.ask("alpha", "POST", "/v1/jobs", json=SPEC, headers=key)
    again = apart.ask("alpha", "POST", "/v1/jobs", json=SPEC, headers=key)
    assert (again.status_code, again.json()["id"]) == (200, first.json()["id"])


def test_only_so_many_jobs_in_history_until_the_operator_makes_room(apart: Installation) -> None:
    first = apart.submit("beta")
    stored = len(list(_jobs(apart, "beta")))
    apart.store.limit("beta", stored=stored)
    refused = apart.ask("beta", "POST", "/v1/jobs", json=SPEC)
    assert problem(refused, 429)["type"].endswith("quota-stored")
    apart.bus.delete(JOB.at(first))  # what retention and the operator do
    apart.bus.call("ZREM", JOBS.at(), first)
    problem(apart.ask("beta", "POST", "/v1/jobs", json=SPEC), 429)  # its folder is still there
    shutil.rmtree(apart.settings.job_dir(first))
    apart.submit("beta")


def test_only_so_many_event_streams(apart: Installation) -> None:
    apart.store.limit("alpha", streams=1)
    job = apart.submit("alpha")
    headers = {"authorization": f"Bearer {apart.texts['alpha']}"}
    path = f"/v1/jobs/{job}/events"
    with apart.server.http.stream("GET", path, headers=headers) as first:
        lines = first.iter_lines()  # an iterator that nobody holds closes the stream
        assert next(lines)
        refused = apart.ask("alpha", "GET", path)
        assert problem(refused, 503)["type"].endswith("too-many-streams")
        with apart.server.http.stream(
            "GET", path, headers={"authorization": f"Bearer {apart.texts['admin']}"}
        ) as two:
            assert two.status_code == 200


def test_without_redis_a_tenant_is_told_so(apart: Installation) -> None:
    """The bucket cannot be asked, so the request does not pass, and the reason is the true one."""
    settings = msgspec.structs.replace(apart.settings, redis_url="redis://127.0.0.1:1/0")
    lost = Server(settings, Bus(settings.redis_url, deadline=0.2))
    try:
        headers = {"authorization": f"Bearer {apart.texts['alpha']}"}
        answer = lost.http.get("/v1/models", headers=headers)
        assert problem(answer, 503)["type"].endswith("redis-unreachable")
    finally:
        lost.stop()
        lost.bus.close()


def _jobs(apart: Installation, who: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = apart.ask(who, "GET", "/v1/jobs", params={"limit": 500}).json()["items"]
    return found
