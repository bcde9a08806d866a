"""No route of the application tells one tenant of another's jobs, whoever adds it. All routes are walked.

A route about a job answers another tenant byte for byte what it answers for a job that is not there. A route without a
job in its path must be listed here with the reason why all tenants may ask it.
"""

from __future__ import annotations

import re
import secrets
import statistics
import time
from collections.abc import Iterator, Sequence

import httpx
import pytest
from fastapi.routing import APIRoute
from security_world import TENANTS, Installation, whole_job
from serving import SPEC, problem
from starlette.routing import BaseRoute, Mount, Route

from syncline.contract.streams import JOB, JOBS, OWNED
from syncline.gateway.access import own_jobs_alone
from syncline.gateway.app import create_app
from syncline.runtime.bus import Bus
from syncline.runtime.settings import Settings

SHARED = {
    "/": "leads to the page",
    "/ui": "the page, which holds nothing of a job",
    "/ui/{digest}/{name}": "its files",
    "/healthz": "says that the process answers",
    "/readyz": "says whether Redis answers",
    "/metrics": "numbers of the installation: for admins alone",
    "/openapi.json": "what there is to ask",
    "/tempo/api/echo": "says that the store can be asked",
    "/tempo/api/metrics/query": "is refused to all",
    "/tempo/api/metrics/query_range": "is refused to all",
    "/tempo/api/search": "finds traces of the tenant's own jobs",
    "/tempo/api/search/tag/{tag}/values": "finds values in spans of the tenant's own jobs",
    "/tempo/api/search/tags": "names of attributes, which are the same for all",
    "/tempo/api/status/buildinfo": "syncline's version",
    "/tempo/api/traces/{trace}": "shows a trace of the tenant's own jobs",
    "/tempo/api/v2/search/tag/{tag}/values": "finds values in spans of the tenant's own jobs",
    "/tempo/api/v2/search/tags": "names of attributes, which are the same for all",
    "/tempo/api/v2/traces/{trace}": "shows a trace of the tenant's own jobs",
    "/v1/jobs": "lists, and makes, the tenant's own jobs",
    "/v1/models": "what a spec may name",
    "/v1/recipes": "what a spec may name",
    "/v1/schema": "the shape of a spec",
}
_UNLIKE = {"date", "content-length"}


def routes() -> list[Route]:
    """Every route of the application, also of routers that are included where `app.py` does not list them."""
    app = create_app(Settings.read({"SYNCLINE_TOKEN": "x"}), Bus("redis://127.0.0.1:1/0"))
    return list(_flat(app.routes))


def _flat(found: Sequence[BaseRoute]) -> Iterator[Route]:
    for route in found:
        assert not isinstance(route, Mount), "a mounted application has none of our dependencies"
        if isinstance(route, Route):
            yield route
        else:
            yield from _flat(vars(route)["original_router"].routes)


ABOUT_JOBS = [(method, r) for r in routes() if "{job}" in r.path for method in sorted(r.methods or ())]
OTHERS = [(method, r) for r in routes() if "{job}" not in r.path for method in sorted(r.methods or ())]


@pytest.fixture(scope="module")
def theirs(house: Installation) -> dict[str, str]:
    """What `alpha` has."""
    return whole_job(house, "alpha")


def filled(path: str, ids: dict[str, str]) -> str:
    return re.sub(r"\{(\w+)(:path)?\}", lambda found: ids.get(found[1], "x"), path)


def told(answer: httpx.Response) -> tuple[int, bytes, dict[str, str]]:
    """All that an answer says."""
    return answer.status_code, answer.content, {k: v for k, v in answer.headers.items() if k not in _UNLIKE}


@pytest.mark.parametrize(("method", "route"), ABOUT_JOBS, ids=lambda v: v if isinstance(v, str) else v.path)
def test_anothers_job_is_one_that_is_not_there(
    house: Installation, theirs: dict[str, str], method: str, route: Route
) -> None:
    path = filled(route.path, theirs)
    unknown = path.replace(theirs["job"], "j" + secrets.token_hex(5))
    foreign = house.ask("beta", method, path)
    assert told(foreign) == told(house.ask("beta", method, unknown))
    assert foreign.status_code == 404
    if method in ("GET", "POST", "DELETE"):
        problem(foreign, 404)
    if method == "GET":  # the route does answer its owner
        own = house.ask("alpha", method, path)
        assert own.status_code < 500
        assert "there is no such job" not in own.text


@pytest.mark.parametrize(("method", "route"), OTHERS, ids=lambda v: v if isinstance(v, str) else v.path)
def test_what_is_shared_tells_of_no_tenant(
    house: Installation, theirs: dict[str, str], method: str, route: Route
) -> None:
    assert route.path in SHARED, "a route without a job: list it here with its reason, or put it under a job"
    answer = house.ask("beta", method, filled(route.path, {"digest": "x", "name": "x"}))
    for secret in (theirs["job"], theirs["name"]):
        assert secret not in answer.text


@pytest.mark.parametrize(
    ("route", "name"),
    [
        (r, field.alias)
        for r in routes()
        if isinstance(r, APIRoute) and "GET" in (r.methods or ())
        for field in r.dependant.query_params
    ],
    ids=lambda v: v if isinstance(v, str) else v.path,
)
def test_no_parameter_names_anothers_job(
    house: Installation, theirs: dict[str, str], route: APIRoute, name: str
) -> None:
    ours = whole_job(house, "beta")
    path = filled(route.path, ours)
    for value in (theirs["job"], theirs["trajectory"]):
        answer = house.ask("beta", "GET", path, params={name: value})
        assert problem(answer, 404)["detail"] == "there is no such job"


def test_every_route_is_behind_the_wall() -> None:
    app = create_app(Settings.read({"SYNCLINE_TOKEN": "x"}), Bus("redis://127.0.0.1:1/0"))
    assert own_jobs_alone in [one.dependency for one in app.router.dependencies]
    assert {"/v1/jobs/{job}/events", "/v1/jobs/{job}/report"} <= {route.path for _, route in ABOUT_JOBS}
    plain = {route.path for route in routes() if not isinstance(route, APIRoute)}
    assert plain <= {"/openapi.json"}, "a plain route has no dependencies"


@pytest.mark.parametrize("tenant", TENANTS)
def test_a_listing_has_own_jobs_alone(house: Installation, theirs: dict[str, str], tenant: str) -> None:
    own = {house.submit(tenant) for _ in range(3)}
    found = [item["id"] for item in _listed(house, tenant)]
    assert own <= set(found)
    assert (theirs["job"] in found) == (tenant == "alpha")
    operators = house.submit("operator")
    assert operators not in {item["id"] for item in _listed(house, tenant)}
    everything = {item["id"] for item in _listed(house, "admin")}
    assert {*found, operators, theirs["job"]} <= everything


def test_a_job_that_only_its_folder_knows_keeps_its_tenant(house: Installation) -> None:
    ours, operators = whole_job(house, "alpha")["job"], house.submit("operator")
    for job in (ours, operators):
        folder = house.settings.job_dir(job)
        folder.mkdir(exist_ok=True)
        (folder / "spec.json").write_bytes(house.bus.hget(JOB.at(job), "spec") or b"")
        house.bus.delete(JOB.at(job))
        house.bus.call("ZREM", JOBS.at(), job)
        house.bus.call("ZREM", OWNED.at("alpha"), job)
    assert house.ask("alpha", "GET", f"/v1/jobs/{ours}").json()["state"] == "unrecorded"
    assert ours in {item["id"] for item in _listed(house, "alpha")}
    for who, job in (("beta", ours), ("alpha", operators)):
        problem(house.ask(who, "GET", f"/v1/jobs/{job}"), 404)
        assert job not in {item["id"] for item in _listed(house, who)}
    assert {ours, operators} <= {item["id"] for item in _listed(house, "admin")}


def test_a_job_without_a_tenant_is_the_operators(house: Installation) -> None:
    job = house.submit("alpha")
    house.bus.call("HDEL", JOB.at(job), "tenant")
    assert house.ask("alpha", "GET", f"/v1/jobs/{job}").status_code == 200  # its folder says so
    (house.settings.job_dir(job) / "tenant").unlink()
    problem(house.ask("alpha", "GET", f"/v1/jobs/{job}"), 404)
    assert house.ask("operator", "GET", f"/v1/jobs/{job}").status_code == 200


def test_anothers_job_cannot_be_evaluated(house: Installation, theirs: dict[str, str]) -> None:
    """The id is in a body, where no dependency finds it."""
    spec = {
        **SPEC,
        "kind": "evaluate",
        "batch": {"groups": 1, "group_size": 1},
        "schedule": {"mode": "colocated", "updates": 1},
        "evaluation": {
            "job": theirs["job"],
            "version": "0.7",
            "prompts": 1,
            "samples": 1,
            "k": [1],
            "first": 10**9,
        },
    }
    foreign = house.ask("beta", "POST", "/v1/jobs", json=spec)
    nowhere = "j" + secrets.token_hex(5)
    spec["evaluation"] = {**spec["evaluation"], "job": nowhere}
    unknown = house.ask("beta", "POST", "/v1/jobs", json=spec)
    assert problem(foreign, 422)["errors"][0]["path"] == "evaluation.job"
    assert foreign.text.replace(theirs["job"], nowhere) == unknown.text


def test_an_idempotency_key_is_the_tenants_own(house: Installation) -> None:
    key = {"idempotency-key": secrets.token_hex(4)}
    made = [
        house.ask(who, "POST", "/v1/jobs", json=SPEC, headers=key) for who in (*TENANTS, "operator", "alpha")
    ]
    assert [answer.status_code for answer in made] == [201, 201, 201, 200]
    assert made[0].json()["id"] == made[3].json()["id"]
    assert len({answer.json()["id"] for answer in made}) == 3


def test_time_does_not_tell_whether_a_job_is_there(house: Installation, theirs: dict[str, str]) -> None:
    """Medians of many requests in turn; both look in the same two places and read no spec."""
    paths = [f"/v1/jobs/{job}" for job in (theirs["job"], "j" + secrets.token_hex(5))]
    seconds: list[list[float]] = [[], []]
    for _ in range(200):
        for which, path in enumerate(paths):
            began = time.perf_counter()
            house.ask("beta", "GET", path)
            seconds[which].append(time.perf_counter() - began)
    foreign, unknown = map(statistics.median, seconds)
    assert 0.75 < foreign / unknown < 1.33


def test_ids_cannot_be_guessed(house: Installation) -> None:
    """40 random bits: at the default rate one hit among ten thousand jobs takes weeks, and tells nothing."""
    made = {house.submit("alpha") for _ in range(50)}
    bits = [bin(int(job[1:], 16)).count("1") for job in made]
    assert len(made) == 50
    assert 16 < statistics.mean(bits) < 24


def _listed(house: Installation, who: str) -> Iterator[dict[str, str]]:
    after: dict[str, str] = {}
    while True:
        page = house.ask(who, "GET", "/v1/jobs", params={"limit": 500, **after}).json()
        yield from page["items"]
        if page["next"] is None:
            return
        after = {"after": page["next"]}
