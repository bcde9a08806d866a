"""Submission: what is taken, what is refused, and the same submission twice.

Times are of the CPU, the serving thread's included, so that a busy machine changes no verdict.
"""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from serving import SPEC, Server, problem

from syncline.contract.events import Request
from syncline.contract.job import JobSpec, LimitSpec
from syncline.contract.streams import JOB, JOBS, REQUESTS
from syncline.gateway.submission import read_spec
from syncline.runtime.bus import unpack
from syncline.runtime.settings import Settings

MODELS = Path(__file__).resolve().parents[2] / "examples" / "models"


def requests_of(server: Server, job: str) -> list[Request]:
    found = [unpack(entry, Request) for entry in server.bus.range(REQUESTS.at())]
    return [request for request in found if request.job == job]


def test_a_job_is_taken_with_its_resolved_spec(server: Server) -> None:
    began = time.process_time()
    answer = server.http.post("/v1/jobs", json=SPEC)
    assert time.process_time() - began < 1
    assert answer.status_code == 201
    job = answer.json()
    assert answer.headers["location"] == f"/v1/jobs/{job['id']}"
    resolved = JobSpec.model_validate_json('{"name":"run","model":{"name":"tiny","weights":"random"}}')
    assert job["spec"] == resolved.model_dump(mode="json")
    assert job["spec_hash"] == resolved.hash()
    assert (job["state"], job["update"], job["recorded"]) == ("queued", 0, True)
    assert server.http.get(f"/v1/jobs/{job['id']}").json() == job
    assert [r.verb for r in requests_of(server, job["id"])] == ["submit"]
    assert job["id"].encode() in server.bus.zrange(JOBS.at())
    assert server.bus.hget(JOB.at(job["id"]), "spec") == resolved.canonical().encode()


def test_toml_says_the_same_as_json(server: Server) -> None:
    text = 'name = "run"\nmodel.name = "tiny"\nmodel.weights = "random"\n'
    answer = server.http.post(
        "/v1/jobs", content=text, headers={"content-type": "application/toml; charset=utf-8"}
    )
    assert answer.status_code == 201, answer.text
    assert answer.json()["spec_hash"] == JobSpec.model_validate(SPEC).hash()


REFUSED: list[tuple[str, dict[str, Any], str, str]] = [
    ("unknown key", {"btach": {}}, "btach", "batch"),
    ("unknown inner key", {"batch": {"group_sise": 4}}, "batch.group_sise", "batch.group_size"),
    ("ill-typed", {"batch": {"groups": "8"}}, "batch.groups", ""),
    ("one sample per group", {"batch": {"group_size": 1}}, "batch.group_size", "at least 2"),
    (
        "top-p under 1 with correction and no mask",
        {"sampling": {"top_p": 0.9}, "loss": {"correction": {"kind": "truncate"}}},
        "sampling.top_p",
        "top_p = 1",
    ),
    (
        "lag 0 in disjoint mode",
        {"schedule": {"mode": "disjoint", "max_lag": 0}},
        "schedule.max_lag",
        "at least 1",
    ),
    ("unknown model", {"model": {"name": "tinny", "weights": "random"}}, "model.name", "tiny, tiny-moe"),
    ("model outside", {"model": {"name": "way-out", "weights": "random"}}, "model.name", "tiny, tiny-moe"),
    (
        "model without config",
        {"model": {"name": "empty", "weights": "random"}},
        "model.name",
        "tiny, tiny-moe",
    ),
    (
        "longer than the model",
        {"model": {"name": "tiny-moe", "weights": "random"}, "sampling": {"max_tokens": 1024}},
        "sampling.max_tokens",
        "share them",
    ),
    ("no weights", {"model": {"name": "tiny", "weights": "pretrained"}}, "model.weights", "random"),
    ("unknown option", {"task": {"options": {"no_such_option": 1}}}, "task.options.no_such_option", ""),
    ("upper case", {"name": "Run_1"}, "name", ""),
    ("long name", {"name": "a" * 64}, "name", ""),
    ("empty name", {"name": ""}, "name", ""),
    ("climbing model", {"model": {"name": "../tiny", "weights": "random"}}, "model.name", ""),
    ("absolute model", {"model": {"name": "/etc", "weights": "random"}}, "model.name", ""),
]


@pytest.mark.parametrize(("changes", "path", "hint"), [r[1:] for r in REFUSED], ids=[r[0] for r in REFUSED])
def test_what_cannot_run_is_refused_at_once(
    server: Server, changes: dict[str, Any], path: str, hint: str
) -> None:
    before = server.bus.zcard(JOBS.at())
    began = time.process_time()
    body = problem(server.http.post("/v1/jobs", json={**SPEC, **changes}), 422)
    assert time.process_time() - began < 1
    errors = {error["path"]: error for error in body["errors"]}
    assert path in errors
    assert hint in errors[path].get("hint", "")
    assert server.bus.zcard(JOBS.at()) == before


def test_all_problems_are_told_at_once(server: Server) -> None:
    body = problem(server.http.post("/v1/jobs", json={"nme": "x", "batch": {"groups": 0}}), 422)
    assert {e["path"] for e in body["errors"]} == {"nme", "name", "model", "batch.groups"}


def test_a_repeated_key_is_refused_with_its_path(server: Server) -> None:
    text = '{"name": "a", "model": {"name": "tiny", "name": "tiny-moe", "weights": "random"}}'
    answer = server.http.post("/v1/jobs", content=text, headers={"content-type": "application/json"})
    assert [e["path"] for e in problem(answer, 422)["errors"]] == ["model.name"]


@pytest.mark.parametrize("kind", ["text/plain", "application/x-yaml", "multipart/form-data; boundary=x", ""])
def test_other_media_types_are_refused(server: Server, kind: str) -> None:
    headers = {"content-type": kind} if kind else {}
    body = problem(server.http.post("/v1/jobs", content=b"{}", headers=headers), 415)
    assert "application/toml" in body["detail"]


# ---- hostile bodies (each in under a second and without eating memory) --------------------------------------
HOSTILE: list[tuple[str, bytes, int]] = [
    ("ten megabytes", b"[" + b"1," * (5 << 20) + b"1]", 413),
    ("a long list", b"[" + b"1," * 500_000 + b"1]", 422),
    ("nested lists", b"[" * 1000 + b"]" * 1000, 422),
    ("nested tables", b'{"a":' * 1000 + b"1" + b"}" * 1000, 422),
    ("not utf-8", b'{"name": "\xff"}', 422),
    ("not json", b"{'name': 1}", 422),
    ("empty", b"", 422),
    ("a number", b"1", 422),
    ("NaN", b'{"name": "a", "optimizer": {"lr": NaN}}', 422),
    ("infinity", b'{"name": "a", "optimizer": {"lr": 1e999}}', 422),
    ("a huge number", b'{"a":' + b"9" * 100_000 + b"}", 422),
    ("many unknown keys", b"{" + b",".join(b'"k%d":1' % i for i in range(60_000)) + b"}", 422),
]


@pytest.mark.parametrize(("body", "status"), [h[1:] for h in HOSTILE], ids=[h[0] for h in HOSTILE])
def test_hostile_bodies_cost_nothing(server: Server, body: bytes, status: int) -> None:
    resident = psutil.Process().memory_info().rss
    began = time.process_time()
    answer = server.http.post("/v1/jobs", content=body, headers={"content-type": "application/json"})
    took = time.process_time() - began
    told = problem(answer, status)
    assert took < 1, f"{took:.2f} s"
    assert len(answer.content) < 64 << 10
    assert psutil.Process().memory_info().rss - resident < 50 << 20
    assert "Traceback" not in told["detail"]


def test_a_body_of_unknown_length_is_limited_too(server: Server) -> None:
    answer = server.http.post(
        "/v1/jobs", content=(b" " * 65536 for _ in range(64)), headers={"content-type": "application/json"}
    )
    problem(answer, 413)


# ---- the same submission twice ------------------------------------------------------------------------------
def test_one_key_one_job(server: Server) -> None:
    key = {"idempotency-key": "first-try"}
    first = server.http.post("/v1/jobs", json=SPEC, headers=key)
    again = server.http.post(
        "/v1/jobs", json={**SPEC, "kind": "train"}, headers=key
    )  # the same when resolved
    assert (first.status_code, again.status_code) == (201, 200)
    assert again.json()["id"] == first.json()["id"]
    assert len(requests_of(server, first.json()["id"])) == 1


def test_a_key_never_changes_its_spec(server: Server) -> None:
    key = {"idempotency-key": "second-try"}
    first = server.http.post("/v1/jobs", json=SPEC, headers=key).json()["id"]
    body = problem(server.http.post("/v1/jobs", json={**SPEC, "name": "other"}, headers=key), 409)
    assert first in body["detail"]


def test_without_a_key_each_submission_is_a_job(server: Server) -> None:
    assert server.submit() != server.submit()


def test_twenty_at_once_are_one_job(server: Server) -> None:
    found: list[httpx.Response] = []

    def post() -> None:
        with httpx.Client(base_url=server.url, timeout=30) as http:
            found.append(http.post("/v1/jobs", json=SPEC, headers={"idempotency-key": "racing"}))

    threads = [threading.Thread(target=post) for _ in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({answer.json()["id"] for answer in found}) == 1
    assert sorted(answer.status_code for answer in found) == [200] * 19 + [201]


@pytest.mark.parametrize("key", ["", "a b", "x" * 256, "é"])
def test_strange_keys_are_refused(server: Server, key: str) -> None:
    answer = server.http.post("/v1/jobs", json=SPEC, headers={b"idempotency-key": key.encode()})
    problem(answer, 400)


@pytest.mark.parametrize(("given", "start"), [(None, 180.0), (900.0, 900.0)])
def test_the_installation_says_how_long_a_start_takes_where_the_spec_does_not(
    tmp_path: Path, given: float | None, start: float
) -> None:
    settings = Settings(runs=tmp_path, models=MODELS, worker_start=given)

    def read(**limits: float) -> LimitSpec:
        body = json.dumps({"name": "n", "model": {"name": "tiny-moe"}, "limits": limits})
        return read_spec(body.encode(), "application/json", settings).limits

    assert read().worker_start == start
    assert read(batch_wait=50.0) == LimitSpec(batch_wait=50.0, worker_start=start)
    assert read(worker_start=7.0).worker_start == 7.0
    assert read(worker_start=180.0).worker_start == 180.0  # the default, said
