"""Validations over REST: climbed by a real process, followed, read, stopped; and what is told when there is none."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
from serving import Server, problem
from waiting import wait_until

from syncline.contract.recipes import RECIPES
from syncline.contract.streams import VERSIONS
from syncline.contract.version_path import VersionId, VersionRecord
from syncline.runtime import validations
from syncline.runtime.tracing import new_traceparent

MODELS = Path(__file__).parents[2] / "examples" / "models"


@pytest.fixture
def real(another: Any) -> Server:
    """A gateway over the example models."""
    found: Server = another(models=MODELS)
    return found


def ended(server: Server, job: str, number: int) -> dict[str, Any]:
    """The validation once it is over."""

    def over() -> dict[str, Any] | None:
        view: dict[str, Any] = server.http.get(f"/v1/jobs/{job}/validation/{number}").json()
        return None if view["validation"]["state"] == "running" else view

    return wait_until(over, 120, "the end of a validation")


def without_baseline() -> dict[str, Any]:
    """A contract that is whole but for the gap that it expects."""
    changed = msgspec.structs.replace(
        RECIPES["unified_fp8"],
        name="no_baseline",
        expected=type(RECIPES["bf16"].expected)(),
    )
    told: dict[str, Any] = json.loads(msgspec.json.encode(changed))
    return told


def process_of(job: str, number: int) -> psutil.Process | None:
    """The process that climbs."""
    words = ["syncline.lab.validation", job, str(number)]
    for process in psutil.process_iter(["cmdline"]):
        if [word for word in process.info["cmdline"] or () if word in words] == words:
            return process
    return None


def test_levels_are_climbed_by_a_process_and_what_they_found_is_read_over_rest(
    real: Server, another: Any
) -> None:
    job = real.submit(model={"name": "tiny-dense"})
    path = f"/v1/jobs/{job}/validation"
    trace = new_traceparent()
    version = VersionRecord(
        version=VersionId(0, 3), parent=None, optimizer_step=3, contract="", state="active", traceparent=trace
    )
    real.bus.hset(VERSIONS.at(job), "0.3", msgspec.json.encode(version))
    begun = real.http.post(path, json={"levels": [2, 1, 4]})
    assert begun.status_code == 202, begun.text
    assert begun.headers["location"] == f"{path}/1"
    assert (begun.json()["state"], begun.json()["levels"]) == ("running", [1, 2, 4])
    busy = problem(real.http.post(path), 409)
    assert busy["type"] == "urn:syncline:problem:validation-running"
    problem(real.http.get(f"{path}/1/report"), 404)

    told = ended(real, job, 1)
    view = told["validation"]
    assert view["state"] == "holds", view
    assert [result["level"] for result in view["results"]] == [1, 2, 4]
    checks = [check for result in view["results"] for check in result["checks"]]
    assert all(check["source"] for check in checks)
    assert view["evidence"] == f"{job}/validations/1"
    figures = real.settings.runs / view["evidence"] / view["results"][2]["evidence"]
    assert json.loads(figures.read_text())["result"] == view["results"][2], "the file holds what was answered"
    page = real.http.get(f"{path}/1/report")
    assert page.headers["content-type"].startswith("text/html")
    assert "Every level that was climbed holds" in page.text
    assert [(hop["hop"], hop["attributes"].get("level")) for hop in told["path"]] == [
        ("validation.climbed", None),
        *(("validation.level", level) for level in (1, 2, 4)),
    ]
    assert real.http.get(path).json() == {"items": [view]}
    assert another(models=MODELS).http.get(path).json() == {"items": [view]}, "another gateway knows it too"

    again = real.http.post(path, json={"levels": [4]}).json()
    assert again["number"] == 2
    matched = {check["name"]: check for check in ended(real, job, 2)["validation"]["results"][0]["checks"]}
    before = {check["name"]: check["found"] for check in view["results"][2]["checks"]}
    assert {name: check["baseline"] for name, check in matched.items()} == before, "what it was when it held"


def test_a_failing_level_is_named_with_its_diagnosis(real: Server) -> None:
    job = real.submit(
        model={"name": "tiny-dense"}, precision={"custom": without_baseline()}, validation={"levels": [1, 2]}
    )
    path = f"/v1/jobs/{job}/validation"
    assert real.http.post(path).status_code == 202, "without a body: the levels of the spec"
    view = ended(real, job, 1)["validation"]
    assert (view["state"], view["failed_at"]) == ("fails", 1)
    assert view["boundary"] == "level 1 (precision contract)"
    assert len(view["results"]) == 1, "the climb stops there"
    assert "gap is normal" in view["diagnosis"]["symptom"]
    assert "Level 1 fails" in real.http.get(f"{path}/1/report").text


def test_the_command_follows_the_gateway_and_shows_what_it_shows(real: Server) -> None:
    job = real.submit(model={"name": "tiny-dense"}, precision={"custom": without_baseline()})
    done = syncline("--url", real.url, "validate", job, "--levels", "1-2")
    assert done.returncode == 1, done.stderr
    view = real.http.get(f"/v1/jobs/{job}/validation/1").json()["validation"]
    assert (view["levels"], view["state"]) == ([1, 2], "fails")
    assert done.stderr.splitlines()[0].startswith("1  precision contract"), "levels are told as they end"
    for words in (view["diagnosis"]["cause"], "level 1 fails", "expected.high", view["evidence"]):
        assert words in done.stdout
    for wrong, says in (
        (["--levels", "10"], "there is no level"),
        (["--model", "tiny"], "a job says it itself"),
    ):
        refused = syncline("--url", real.url, "validate", job, *wrong)
        assert refused.returncode == 2
        assert says in " ".join(refused.stderr.replace("│", " ").split())


@pytest.mark.long
def test_the_command_says_as_json_what_the_gateway_says(real: Server) -> None:
    job = real.submit(model={"name": "tiny-dense"})
    told = syncline("--url", real.url, "validate", job, "--levels", "1", "--json")
    assert told.returncode == 0, told.stderr
    answer = real.http.get(f"/v1/jobs/{job}/validation/1").json()
    assert json.loads(told.stdout) == answer["validation"]


def syncline(*words: str) -> subprocess.CompletedProcess[str]:
    command = [str(Path(sys.executable).with_name("syncline")), *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def test_one_that_runs_is_stopped_and_one_that_is_killed_says_so(real: Server) -> None:
    job = real.submit(model={"name": "tiny-moe"})
    path = f"/v1/jobs/{job}/validation"
    assert real.http.post(path, json={"levels": [1, 2, 3, 4, 5, 6, 7, 8]}).status_code == 202
    scratch = validations.folder_of(real.settings.job_dir(job), 1) / validations.SCRATCH
    wait_until(scratch.exists, 60, "the climb to begin")
    stopped = real.http.post(f"{path}/1/cancel")
    assert (stopped.status_code, stopped.json()["state"]) == (202, "cancelled")
    wait_until(lambda: process_of(job, 1) is None, 60, "the process to end")
    assert not scratch.exists(), "it cleans up"
    over = problem(real.http.post(f"{path}/1/cancel"), 409)
    assert over["state"] == "cancelled"

    assert real.http.post(path, json={"levels": [1]}).json()["number"] == 2
    process = wait_until(lambda: process_of(job, 2), 30, "the process")
    os.kill(process.pid, signal.SIGKILL)
    view = ended(real, job, 2)["validation"]
    assert view["state"] == "interrupted"
    assert "logs/validation.log" in view["reason"]


def test_what_is_not_there_or_not_a_level_is_refused_in_one_shape(real: Server) -> None:
    job = real.submit(model={"name": "tiny-dense"})
    path = f"/v1/jobs/{job}/validation"
    assert real.http.get(path).json() == {"items": []}
    shapes = set()
    for number in ("1", "0", "01", "-1", "x", "9" * 12, "1.0", "%31%2f"):
        for rest in ("", "/report"):
            said = problem(real.http.get(f"{path}/{number}{rest}"), 404)
            shapes.add(tuple(said))
    assert len(shapes) == 1
    problem(real.http.post(f"{path}/1/cancel"), 404)
    problem(real.http.post("/v1/jobs/j0000000000/validation"), 404)
    for levels in ([], [0], [10], [1, 1], "1", [1.5]):
        said = problem(real.http.post(path, json={"levels": levels}), 422)
        assert said["type"] == "urn:syncline:problem:body-refused"
    problem(real.http.post(path, json={"level": [1]}), 422)
    real.app.state.gateway.validating.most = 0
    said = problem(real.http.post(path), 429)
    assert said["type"] == "urn:syncline:problem:too-many-validations"
    assert real.http.get(path).json() == {"items": []}, "nothing was begun"
