"""Asking for an evaluation: what becomes a job, and what is refused by name before anything runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from serving import Server, problem

from syncline.contract.evaluation_spec import HELD_OUT
from syncline.contract.streams import PINS
from syncline.contract.version_path import VersionId, VersionManifest, sign
from syncline.runtime.store import BlobStore


def trained(server: Server, versions: int = 3, **changes: Any) -> str:
    """A job whose store holds so many versions."""
    job = server.submit(**changes)
    store = BlobStore(server.settings.job_dir(job) / "store")
    for number in range(versions):
        manifest = VersionManifest(
            job=job,
            version=VersionId(0, number),
            parent=None,
            optimizer_step=number,
            contract="c" * 64,
            representation="bf16",
            model="",
            tensors=(),
        )
        store.write_manifest(sign(manifest, b"key"))
    return job


def paths(body: dict[str, Any]) -> list[str]:
    return [fault["path"] for fault in body["errors"]]


def test_an_evaluation_is_a_job_of_its_own_that_pins_its_version(server: Server) -> None:
    job = trained(server, sampling={"temperature": 0.5})
    answer = server.http.post(f"/v1/jobs/{job}/evaluations", json={"version": "1", "k": [1, 2], "samples": 2})
    assert answer.status_code == 201, answer.text
    made = answer.json()
    assert (made["of"], made["version"]) == (job, "0.1")
    view = server.http.get(f"/v1/jobs/{made['id']}").json()
    assert (view["kind"], view["state"], view["evaluated"], view["evaluations"]) == (
        "evaluate",
        "queued",
        None,
        [],
    )
    assert (
        view["spec"]["evaluation"] | {"job": job, "version": "0.1", "first": HELD_OUT}
        == view["spec"]["evaluation"]
    )
    assert view["spec"]["sampling"]["temperature"] == 0.5
    assert server.bus.hgetall(PINS.at(job)) == {made["id"].encode(): b"0.1"}
    again = server.http.post("/v1/jobs", json=view["spec"])
    assert again.status_code == 201, "what the gateway made is a spec like any other"
    latest = server.http.post(f"/v1/jobs/{job}/evaluations", json={})
    assert latest.json()["version"] == "0.2"
    assert server.http.get(f"/v1/jobs/{job}/evaluations").json() == {"items": []}


@pytest.mark.parametrize(
    ("body", "where"),
    [
        ({"first": 5}, ["evaluation.first"]),
        ({"samples": 2, "k": [1, 3]}, ["evaluation.k"]),
        ({"prompts": 0}, ["prompts"]),
        ({"options": {"no_such": 1}}, ["task.options.no_such"]),
        ({"versoin": "1"}, [""]),
    ],
)
def test_what_cannot_be_asked_is_refused_by_name(
    server: Server, body: dict[str, Any], where: list[str]
) -> None:
    answer = server.http.post(f"/v1/jobs/{trained(server)}/evaluations", json=body)
    assert paths(problem(answer, 422)) == where


def test_a_version_that_is_gone_is_refused_with_those_that_are_there(server: Server) -> None:
    job = trained(server)
    body = problem(server.http.post(f"/v1/jobs/{job}/evaluations", json={"version": "7"}), 409)
    assert "can be evaluated: 0.0, 0.1, 0.2" in body["detail"]
    empty = server.submit()
    body = problem(server.http.post(f"/v1/jobs/{empty}/evaluations", json={}), 409)
    assert "can be evaluated: none" in body["detail"]


def test_another_policy_and_another_job_are_refused(server: Server) -> None:
    job = trained(server)
    made = server.http.post(f"/v1/jobs/{job}/evaluations", json={}).json()["id"]
    spec = server.http.get(f"/v1/jobs/{made}").json()["spec"]
    colder = {**spec, "sampling": {**spec["sampling"], "temperature": 0.1}}
    assert paths(problem(server.http.post("/v1/jobs", json=colder), 422)) == ["sampling"]
    nobody = {**spec, "evaluation": {**spec["evaluation"], "job": "j0000000000"}}
    assert paths(problem(server.http.post("/v1/jobs", json=nobody), 422)) == ["evaluation.job"]
    body = problem(server.http.post(f"/v1/jobs/{made}/evaluations", json={}), 409)
    assert "can be evaluated: none" in body["detail"], "an evaluation makes no version"


def test_files_with_a_prompt_in_common_are_refused(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SYNCLINE_DATA", str(tmp_path))

    def write(name: str, prompts: range) -> None:
        lines = [json.dumps({"prompt": f"{i}+1=", "answer": str(i + 1)}) for i in prompts]
        (tmp_path / name).write_text("\n".join(lines) + "\n")

    write("train.jsonl", range(20))
    write("mixed.jsonl", range(15, 35))
    write("held.jsonl", range(20, 40))
    task = {"environment": "jsonl", "options": {"file": "train.jsonl"}}
    job = trained(server, task=task)

    def ask(**body: Any) -> Any:
        return server.http.post(f"/v1/jobs/{job}/evaluations", json={"prompts": 10, **body})

    assert paths(problem(ask(), 422)) == ["evaluation.first"]
    body = problem(ask(options={"file": "mixed.jsonl"}), 422)
    assert body["errors"][0]["message"] == "prompt 0 is in the training job's data too"
    assert ask(options={"file": "mixed.jsonl"}, first=5).status_code == 201
    assert ask(options={"file": "held.jsonl"}).status_code == 201
    assert paths(problem(ask(options={"file": "held.jsonl"}, prompts=21), 422)) == ["evaluation.prompts"]
    assert paths(problem(ask(options={"file": "none.jsonl"}), 422)) == ["task.options"]
    half = trained(server, task=task, prompts={"first": 10})
    assert (
        server.http.post(f"/v1/jobs/{half}/evaluations", json={"prompts": 10, "first": 0}).status_code == 201
    )
    beyond = server.http.post(f"/v1/jobs/{half}/evaluations", json={"prompts": 10, "first": 5})
    assert paths(problem(beyond, 422)) == ["evaluation.first"]


def test_a_training_job_may_evaluate_itself_on_held_out_prompts_alone(server: Server) -> None:
    server.submit(evaluation={"every": 2})
    answer = server.http.post(
        "/v1/jobs",
        json={"name": "t", "model": {"name": "tiny"}, "evaluation": {"every": 2, "first": 1}},
    )
    assert paths(problem(answer, 422)) == ["evaluation.first"]
