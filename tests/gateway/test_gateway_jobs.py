"""Looking at jobs, asking something of them, and names that lead nowhere."""

from __future__ import annotations

import http.client
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from left_behind import metrics
from serving import SPEC, Server, problem

from syncline.contract.events import Phase, Pool, Request, Wait
from syncline.contract.job import JobSpec
from syncline.contract.streams import EVALUATIONS, JOB, METRICS, PHASE, REQUESTS, Key
from syncline.runtime.bus import pack, unpack

ABSENT = "j" + "0" * 10


def verbs(server: Server, job: str) -> list[tuple[str, str | None]]:
    found = [unpack(entry, Request) for entry in server.bus.range(REQUESTS.at())]
    return [(request.verb, request.mode) for request in found if request.job == job]


def test_a_job_shows_where_it_stands(server: Server) -> None:
    job = server.submit()
    phase = Phase(
        seq=3, mode="disjoint", phase="flow", rollout="awake", trainer="awake", gate="open", update=2, at=1.0
    )
    wait = Wait(name="batch", owner="trainer", since=1.0, deadline=601.0, detail="3 of 8 groups")
    server.bus.set(PHASE.at(job), pack(phase))
    server.bus.append(METRICS.at(job), metrics(1))
    server.bus.append(METRICS.at(job), metrics(2, reward=float("nan")))
    server.bus.hset(
        JOB.at(job), {"state": "running", "started": "12.5", "waits": json.dumps([wait_json(wait)])}
    )
    seen = server.http.get(f"/v1/jobs/{job}").json()
    assert (seen["state"], seen["mode"], seen["phase"], seen["update"]) == ("running", "disjoint", "flow", 2)
    assert seen["reward"] is None
    assert seen["started"] == 12.5
    assert seen["waits"] == [wait_json(wait)]
    assert server.http.get(f"/v1/jobs/{job}/waits").json() == {"items": [wait_json(wait)]}


def wait_json(wait: Wait) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(json.dumps({f: getattr(wait, f) for f in wait.__struct_fields__}))
    return found


def test_jobs_are_listed_newest_first_in_pages(server: Server) -> None:
    made = [server.submit(name=f"page-{i}") for i in range(5)]
    seen, after = [], None
    while True:
        page = server.http.get("/v1/jobs", params={"limit": 2, **({"after": after} if after else {})}).json()
        assert len(page["items"]) <= 2
        seen += [job["id"] for job in page["items"]]
        after = page["next"]
        if after is None:
            break
    assert [job for job in seen if job in made] == made[::-1]
    assert len(seen) == len(set(seen))


DAMAGED: list[tuple[str, dict[str, str | bytes], tuple[str, ...], str, str]] = [
    # what is written over, what is taken away, the state shown, and what the reason names
    ("no spec", {}, ("spec",), "queued", "spec: is missing"),
    ("a spec that is no JSON", {"spec": "{no"}, (), "queued", "spec: 1 problems"),
    ("a spec that is no text", {"spec": b"\xff"}, (), "queued", "spec: 1 problems"),
    ("no hash of the spec", {}, ("spec_hash",), "queued", "spec_hash: is missing"),
    ("no state", {}, ("state",), "failed", "state: is missing"),
    ("an unknown state", {"state": "asleep"}, (), "failed", "state: "),
    ("a state with a quote", {"state": 'run"ning'}, (), "failed", "state: "),
    ("a time that is no number", {"state": "running", "started": "noon"}, (), "running", "started: "),
    ("a time without end", {"created": "inf"}, (), "queued", "created: "),
    ("a reason that is no text", {"reason": b"\xff"}, (), "queued", "reason: "),
    ("waits that are no list", {"waits": "{}"}, (), "queued", "waits: "),
]


@pytest.mark.parametrize(
    ("change", "without", "state", "said"), [d[1:] for d in DAMAGED], ids=[d[0] for d in DAMAGED]
)
def test_a_record_that_cannot_be_read_hides_no_other(
    server: Server, change: dict[str, str | bytes], without: tuple[str, ...], state: str, said: str
) -> None:
    older, damaged, newer = (server.submit(name=name) for name in ("older", "damaged", "newer"))
    try:
        if change:
            server.bus.hset(JOB.at(damaged), dict(change))
        if without:
            server.bus.call("HDEL", JOB.at(damaged), *without)
        listed = server.http.get("/v1/jobs", params={"limit": 3})
        assert listed.status_code == 200, listed.text
        items = listed.json()["items"]
        assert [job["id"] for job in items] == [newer, damaged, older]
        assert [job["name"] for job in items] == [
            "newer",
            "" if said.startswith("spec:") else "damaged",
            "older",
        ]
        assert items[1]["state"] == state
        assert items[1]["reason"].startswith(f"its record cannot be read: {JOB.at(damaged)} {said}")
        assert items[0]["reason"] == items[2]["reason"] == ""
        for answer in (
            server.http.get(f"/v1/jobs/{damaged}"),
            server.http.post(f"/v1/jobs/{damaged}/cancel"),
        ):
            body = problem(answer, 500)
            assert body["type"].endswith(":record-unreadable")
            assert f"{JOB.at(damaged)} {said}" in body["detail"]
    finally:
        server.bus.delete(JOB.at(damaged))


@pytest.mark.parametrize("key", [METRICS, PHASE, EVALUATIONS], ids=lambda key: key.name)
def test_progress_that_cannot_be_read_hides_no_other_job(server: Server, key: Key) -> None:
    older, damaged, newer = (server.submit(name=name) for name in ("older", "damaged", "newer"))
    try:
        if key is METRICS:
            server.bus.append(key.at(damaged), {b"m": b"\xc1"})
        elif key is PHASE:
            server.bus.set(key.at(damaged), b"\xc1")
        else:
            server.bus.hset(key.at(damaged), "0.1", b"{no")
        items = server.http.get("/v1/jobs", params={"limit": 3}).json()["items"]
        assert [(job["id"], job["name"]) for job in items] == [
            (newer, "newer"),
            (damaged, "damaged"),
            (older, "older"),
        ]
        assert items[1]["state"] == "queued"
        assert items[1]["reason"].startswith(f"its progress cannot be read: {key.at(damaged)}")
        body = problem(server.http.get(f"/v1/jobs/{damaged}"), 500)
        assert body["detail"].startswith(key.at(damaged))
    finally:
        server.bus.delete(key.at(damaged))


def test_a_folder_that_cannot_be_read_hides_no_other_job(server: Server) -> None:
    older, damaged, newer = (server.submit(name=name) for name in ("older", "damaged", "newer"))
    folder = server.settings.job_dir(damaged)
    folder.mkdir()
    (folder / "spec.json").write_text("{no")
    server.bus.delete(JOB.at(damaged))
    try:
        items = server.http.get("/v1/jobs", params={"limit": 3}).json()["items"]
        assert [job["id"] for job in items] == [newer, damaged, older]
        assert items[1]["reason"].startswith(f"its record cannot be read: spec.json of {damaged}: ")
        assert damaged in problem(server.http.get(f"/v1/jobs/{damaged}"), 500)["detail"]
    finally:
        (folder / "spec.json").unlink()
        folder.rmdir()


def test_a_strange_cursor_is_refused(server: Server) -> None:
    problem(server.http.get("/v1/jobs", params={"after": ABSENT}), 422)


@pytest.mark.parametrize(
    "query", ["limit=0", "limit=501", "limit=x", "limti=5", "limit=5&limit=6"], ids=lambda q: str(q)
)
def test_parameters_are_read_strictly(server: Server, query: str) -> None:
    body = problem(server.http.get(f"/v1/jobs?{query}"), 422)
    assert body["errors"][0]["path"] in ("limit", "limti")


# ---- asking -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("verb", ["cancel", "pause", "resume"])
def test_what_is_asked_reaches_the_scheduler(server: Server, verb: str) -> None:
    job = server.submit()
    answer = server.http.post(f"/v1/jobs/{job}/{verb}")
    assert answer.status_code == 202
    assert answer.json() == {"job": job, "verb": verb, "state": "queued"}
    assert verbs(server, job) == [("submit", None), (verb, None)]


def test_a_switch_of_mode_reaches_the_scheduler(server: Server) -> None:
    job = server.submit()
    assert server.http.post(f"/v1/jobs/{job}/mode", json={"mode": "disjoint"}).status_code == 202
    assert verbs(server, job)[1:] == [("switch", "disjoint")]


@pytest.mark.parametrize(
    "body", [b"", b"{}", b'{"mode": "both"}', b'{"mode": "disjoint", "x": 1}', b'{"mode":1,"mode":2}', b"["]
)
def test_a_switch_to_nothing_is_refused(server: Server, body: bytes) -> None:
    job = server.submit()
    problem(server.http.post(f"/v1/jobs/{job}/mode", content=body), 422)
    assert verbs(server, job) == [("submit", None)]


def test_a_switch_that_cannot_work_is_refused(server: Server) -> None:
    job = server.submit(schedule={"max_lag": 0})
    body = problem(server.http.post(f"/v1/jobs/{job}/mode", json={"mode": "disjoint"}), 422)
    assert body["errors"][0]["path"] == "schedule.max_lag"


POOL = {"rollout": {"workers": 2, "workers_most": 4}, "schedule": {"mode": "disjoint"}}


def test_a_request_for_workers_reaches_the_scheduler(server: Server) -> None:
    job = server.submit(**POOL)
    answer = server.http.post(f"/v1/jobs/{job}/workers", json={"workers": 4})
    assert (answer.status_code, answer.json()["verb"]) == (202, "scale")
    asked = [unpack(entry, Request) for entry in server.bus.range(REQUESTS.at())]
    assert [one.workers for one in asked if one.job == job and one.verb == "scale"] == [4]
    pool = Pool(workers=2, least=2, most=4, coming=("w1",), leaving=("w2",), why="policy")
    server.bus.hset(JOB.at(job), "pool", msgspec.json.encode(pool).decode())
    assert server.http.get(f"/v1/jobs/{job}").json()["pool"] == json.loads(msgspec.json.encode(pool))


@pytest.mark.parametrize(
    "body",
    [b"", b"{}", b'{"workers": 0}', b'{"workers": 2.5}', b'{"workers": "3"}', b'{"workers": 3, "x": 1}'],
)
def test_a_request_for_no_number_of_workers_is_refused(server: Server, body: bytes) -> None:
    job = server.submit(**POOL)
    problem(server.http.post(f"/v1/jobs/{job}/workers", content=body), 422)
    assert verbs(server, job) == [("submit", None)]


@pytest.mark.parametrize("workers", [1, 5])
def test_a_number_beyond_the_bounds_is_refused_with_both(server: Server, workers: int) -> None:
    job = server.submit(**POOL)
    told = problem(server.http.post(f"/v1/jobs/{job}/workers", json={"workers": workers}), 422)
    assert f"{workers} is not between 2 (least) and 4 (most)" in told["detail"]
    assert "rollout.workers_most" in told["errors"][0]["hint"]
    assert verbs(server, job) == [("submit", None)]


def test_a_pool_that_cannot_change_now_says_why(server: Server) -> None:
    job = server.submit(**POOL | {"schedule": {"mode": "colocated"}})
    told = problem(server.http.post(f"/v1/jobs/{job}/workers", json={"workers": 3}), 409)
    assert "colocated" in told["detail"]
    pool = Pool(workers=2, least=2, most=4, fixed="a gang is admitted whole")
    server.bus.hset(JOB.at(job), "pool", msgspec.json.encode(pool).decode())
    told = problem(server.http.post(f"/v1/jobs/{job}/workers", json={"workers": 3}), 409)
    assert "a gang is admitted whole" in told["detail"]
    assert verbs(server, job) == [("submit", None)]


@pytest.mark.parametrize("state", ["succeeded", "failed", "cancelled"])
def test_nothing_is_asked_of_an_ended_job(server: Server, state: str) -> None:
    job = server.submit()
    server.set_state(job, state)
    asked = [("cancel", None), ("pause", None), ("resume", None)]
    for verb, body in [*asked, ("mode", {"mode": "disjoint"}), ("workers", {"workers": 2})]:
        told = problem(server.http.post(f"/v1/jobs/{job}/{verb}", json=body), 409)
        assert told["state"] == state
    assert verbs(server, job) == [("submit", None)]


def test_a_body_where_none_is_meant_is_refused(server: Server) -> None:
    job = server.submit()
    problem(server.http.post(f"/v1/jobs/{job}/cancel", json={"force": True}), 422)


# ---- names that lead nowhere --------------------------------------------------------------------------------
STRANGE = [
    "../x",
    "..%2f..%2fx",
    "%2fetc%2fpasswd",
    "a%2f..%2f..%2fb",
    "..",
    "j" + "0" * 9,
    "j" + "0" * 11,
    "J" + "0" * 10,
    "j" + "A" * 10,
    "j000000000%0a",
    "x" * 200,
    "Run_1",
    "%00",
    "%F0%9F%92%A9",
    "j0123456789%20",
    "jobs",
]


@pytest.mark.parametrize("name", STRANGE)
@pytest.mark.parametrize("under", ["", "/metrics", "/ledger", "/versions", "/trajectories", "/events"])
def test_a_strange_id_is_like_an_unknown_one(server: Server, name: str, under: str) -> None:
    strange = problem(server.http.get(f"/v1/jobs/{name}{under}"), 404)
    unknown = problem(server.http.get(f"/v1/jobs/{ABSENT}{under}"), 404)
    assert strange.keys() == unknown.keys()
    assert (strange["type"], strange["title"]) == (unknown["type"], unknown["title"])


@pytest.mark.parametrize(
    "path", ["/v1/jobs/../../etc/passwd", "/v1/jobs/./", "//v1/jobs", "/v1/jobs/", "/v1/../.."]
)
def test_a_path_is_taken_as_it_is(server: Server, path: str) -> None:
    """What a browser would tidy up comes raw here."""
    host, port = server.url.removeprefix("http://").split(":")
    connection = http.client.HTTPConnection(host, int(port), timeout=10)
    connection.putrequest("GET", path, skip_host=True)
    connection.putheader("host", host)
    connection.endheaders()
    answer = connection.getresponse()
    assert answer.status == 404
    assert answer.headers["content-type"] == "application/problem+json"
    connection.close()


def test_a_secret_beside_the_run_root_stays_there(server: Server) -> None:
    runs = server.settings.runs
    (runs.parent / "spec.json").write_text(JobSpec.model_validate(SPEC).canonical())
    for name in ("..", "%2e%2e", "..%2f"):
        problem(server.http.get(f"/v1/jobs/{name}"), 404)


# ---- after Redis --------------------------------------------------------------------------------------------
def on_disk(runs: Path, job: str, summary: dict[str, Any] | None) -> None:
    (runs / job).mkdir()
    (runs / job / "spec.json").write_text(JobSpec.model_validate({**SPEC, "name": "old"}).canonical())
    if summary is not None:
        (runs / job / "summary.json").write_text(json.dumps(summary))


def test_a_job_is_found_on_disk_when_redis_forgot_it(server: Server, job: str) -> None:
    on_disk(server.settings.runs, job, {"state": "succeeded", "updates": 50, "lag": {"max": 1}})
    seen = server.http.get(f"/v1/jobs/{job}").json()
    assert (seen["state"], seen["name"], seen["update"], seen["recorded"]) == ("succeeded", "old", 50, False)
    assert job in [one["id"] for one in server.http.get("/v1/jobs", params={"limit": 500}).json()["items"]]
    for under in ("metrics", "ledger", "phases", "workers"):
        problem(server.http.get(f"/v1/jobs/{job}/{under}"), 410)
    told = problem(server.http.post(f"/v1/jobs/{job}/cancel"), 409)
    assert told["state"] == "succeeded"


def test_a_job_without_an_end_is_unrecorded(server: Server, job: str) -> None:
    on_disk(server.settings.runs, job, None)
    seen = server.http.get(f"/v1/jobs/{job}").json()
    assert seen["state"] == "unrecorded"
    assert "summary.json" in seen["reason"]
