"""Metrics, ledger, phases, workers: pages, and numbers that are none."""

from __future__ import annotations

import json

import msgspec
import pytest
from left_behind import metrics, phase
from serving import Server, problem

from syncline.contract.drawn import PromptAccount
from syncline.contract.events import Heartbeat, Phase, WorkerStatus
from syncline.contract.streams import COUNTS, DEAD, HEARTBEAT, JOB, KEYS, METRICS, PHASES, VERSIONS, WORKERS
from syncline.contract.version_path import VersionId, VersionRecord
from syncline.gateway import examples, reporter
from syncline.gateway.records import find
from syncline.runtime.bus import pack


def test_numbers_that_are_none_are_null(server: Server) -> None:
    job = server.submit()
    server.bus.append(
        METRICS.at(job),
        metrics(1, reward=None, loss=float("nan"), grad_norm=float("inf"), gap_max=float("-inf")),
    )
    answer = server.http.get(f"/v1/jobs/{job}/metrics")
    assert b"NaN" not in answer.content
    assert b"Infinity" not in answer.content
    only = json.loads(answer.content)["items"][0]
    assert (only["reward"], only["loss"], only["grad_norm"], only["gap_max"]) == (None, None, None, None)
    assert (only["update"], only["lag_counts"]) == (1, {"0": 32, "1": 32})


def test_metrics_come_in_pages(server: Server) -> None:
    job = server.submit()
    for update in range(1, 8):
        server.bus.append(METRICS.at(job), metrics(update))
    seen, after = [], None
    while True:
        params = {"limit": 3} | ({"after": after} if after else {})
        page = server.http.get(f"/v1/jobs/{job}/metrics", params=params).json()
        seen.append([entry["update"] for entry in page["items"]])
        after = page["next"]
        if after is None:
            break
    assert seen == [[1, 2, 3], [4, 5, 6], [7]]


@pytest.mark.parametrize("after", ["x", "1", "-", "+", "$", "1-1-1", "99999999999999999999-0", "(1-1"])
def test_strange_cursors_are_refused(server: Server, after: str) -> None:
    job = server.submit()
    answer = server.http.get(f"/v1/jobs/{job}/metrics", params={"after": after})
    problem(answer, 422)


def test_the_ledger_adds_up_or_says_so(server: Server) -> None:
    job = server.submit()
    counts = {"submitted": 10, "running": 4, "buffered": 3, "trained": 2, "filtered": 1, "oldest:3": 2}
    server.bus.hset(COUNTS.at(job), counts)
    server.bus.append(DEAD.at(job), {b"why": b"unreadable"})
    seen = server.http.get(f"/v1/jobs/{job}/ledger").json()
    assert seen == {
        "submitted": 10,
        "running": 4,
        "buffered": 3,
        "trained": 2,
        "filtered": 1,
        "failed": 0,
        "expired": 0,
        "holds": True,
        "dead": 1,
    }
    server.bus.hset(COUNTS.at(job), "running", 5)
    assert server.http.get(f"/v1/jobs/{job}/ledger").json()["holds"] is False


def test_phases_come_in_order(server: Server) -> None:
    job = server.submit()
    for seq in (1, 2):
        phase = Phase(
            seq=seq,
            mode="colocated",
            phase="sample",
            rollout="awake",
            trainer="asleep",
            gate="open",
            update=0,
            at=1.0,
        )
        server.bus.append(PHASES.at(job), phase)
    assert [p["seq"] for p in server.http.get(f"/v1/jobs/{job}/phases").json()["items"]] == [1, 2]


def test_workers_show_their_version_and_their_processes(server: Server) -> None:
    job = server.submit()
    status = WorkerStatus(
        worker="w1",
        incarnation="a1",
        state="serving",
        version=VersionId(0, 12),
        digest="9f",
        staged=None,
        running=3,
        waiting=0,
        tokens=100,
        tokens_per_second=50.0,
        device="cpu0",
        resident=1 << 20,
        why="",
        at=1.0,
    )
    beat = Heartbeat(
        service="rollout", name="w1", incarnation="a1", pid=7, port=None, ready=True, why="", at=1.0
    )
    server.bus.hset(WORKERS.at(job), "w1", pack(status))
    server.bus.set(HEARTBEAT.at(f"{job}/rollout/w1"), pack(beat), ttl=30)
    seen = server.http.get(f"/v1/jobs/{job}/workers").json()
    assert seen["items"][0]["version"] == "0.12"
    assert [process["name"] for process in seen["processes"]] == ["w1"]


def test_an_unreadable_record_is_a_problem_that_names_it(server: Server) -> None:
    job = server.submit()
    server.bus.append(METRICS.at(job), {b"m": b"\xc1"})
    body = problem(server.http.get(f"/v1/jobs/{job}/metrics"), 500)
    assert METRICS.at(job) in body["detail"]


def test_a_forgotten_job_tells_the_same_from_its_folder(server: Server) -> None:
    job = server.submit()
    for update in range(1, 6):
        server.bus.append(METRICS.at(job), metrics(update))
        server.bus.append(PHASES.at(job), phase(update))
    version = VersionRecord(
        version=VersionId(0, 5), parent=None, optimizer_step=5, contract="c", state="active", minted=1.0
    )
    server.bus.hset(VERSIONS.at(job), "0.5", msgspec.json.encode(version))
    server.bus.hset(COUNTS.at(job), {"submitted": 3, "trained": 3})
    server.set_state(job, "succeeded")
    account = msgspec.json.encode(examples.PROMPTS)
    server.bus.hset(JOB.at(job), {"prompts": account})
    paths = ("metrics", "phases", "ledger", "ledger/samples", "versions", "prompts")
    before = {path: server.http.get(f"/v1/jobs/{job}/{path}").json() for path in paths}
    record = find(server.bus, server.settings, job)
    assert record is not None
    (record.folder).mkdir()
    (record.folder / "spec.json").write_text(record.spec.canonical())
    reporter.write(record.folder, reporter.gather(server.bus, record))
    server.bus.delete(*(key.at(job) for key in KEYS if key.scope == "job"))
    assert server.http.get(f"/v1/jobs/{job}").json()["recorded"] is False
    after = {path: server.http.get(f"/v1/jobs/{job}/{path}").json() for path in paths}
    assert msgspec.convert(after["prompts"], PromptAccount) == examples.PROMPTS
    before["ledger"]["dead"] = None
    before["versions"]["latest"] = None  # nothing was published
    assert after == before
    first = server.http.get(f"/v1/jobs/{job}/metrics", params={"limit": 2}).json()
    second = server.http.get(f"/v1/jobs/{job}/metrics", params={"limit": 3, "after": first["next"]}).json()
    assert [m["update"] for m in first["items"] + second["items"]] == [1, 2, 3, 4, 5]
    assert second["next"] is None
    problem(server.http.get(f"/v1/jobs/{job}/metrics", params={"after": "x"}), 422)
    problem(server.http.get(f"/v1/jobs/{job}/workers"), 410)
