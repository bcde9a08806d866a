"""Versions of a job in pages: what a page holds and reads, and that who reads all of them misses none."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
from left_behind import CONTRACT
from serving import SPEC, Server, problem

from syncline.contract import version_path as vp
from syncline.contract.events import WorkerStatus
from syncline.contract.job import JobSpec
from syncline.contract.streams import VERSIONS, WORKERS
from syncline.gateway import reporter
from syncline.gateway.records import find
from syncline.runtime import tracing
from syncline.runtime.bus import pack
from syncline.scheduler.client import Client, Refused
from syncline.scheduler.watch import _Watcher

NAMES = [vp.VersionId(0, number) for number in range(12)] + [vp.VersionId(1, number) for number in (9, 10)]
"""Oldest first; as text, 0.10 comes before 0.2, and 1.9 before 0.11 by its number."""


def version(of: vp.VersionId, **workers: float) -> vp.VersionRecord:
    """A published version, and the moment at which each worker served it."""
    return vp.VersionRecord(
        version=of,
        parent=None,
        optimizer_step=of.number,
        contract=CONTRACT,
        state="active",
        minted=1.0,
        published=2.0,
        workers={name: vp.WorkerPath(active=at) for name, at in workers.items()},
    )


def record(server: Server, job: str, *versions: vp.VersionRecord) -> None:
    """As sync writes them."""
    fields = {str(one.version): msgspec.json.encode(one) for one in versions}
    server.bus.hset(VERSIONS.at(job), {**fields, "latest": str(versions[-1].version).encode()})


@pytest.fixture
def running(server: Server) -> str:
    """A job with `NAMES`."""
    job = server.submit()
    record(server, job, *map(version, NAMES))
    return job


def pages(server: Server, job: str, limit: int) -> list[list[str]]:
    """The names on every page; `latest` is the same on all."""
    found, after = [], None
    while True:
        params: dict[str, str | int] = {"limit": limit}
        if after:
            params["after"] = after
        page = server.http.get(f"/v1/jobs/{job}/versions", params=params).json()
        assert page["latest"] == "1.10"
        found.append([one["version"] for one in page["items"]])
        after = page["next"]
        if after is None:
            return found


def as_pages(limit: int) -> list[list[str]]:
    return [[str(name) for name in NAMES[i : i + limit]] for i in range(0, len(NAMES), limit)]


@pytest.mark.parametrize("limit", [1, 4, 7, 14, 500])
def test_pages_hold_every_version_once_in_order(server: Server, running: str, limit: int) -> None:
    assert pages(server, running, limit) == as_pages(limit)


def test_a_page_reads_no_other_version(server: Server, running: str) -> None:
    server.bus.hset(VERSIONS.at(running), "0.3", b"no record")
    path = f"/v1/jobs/{running}/versions"
    for params in ({"limit": 3}, {"after": "0.3"}):
        assert server.http.get(path, params=params).status_code == 200
    told = problem(server.http.get(path, params={"after": "0.2", "limit": 1}), 500)
    assert "0.3" in told["detail"]


def test_a_page_begins_after_any_name(server: Server, running: str) -> None:
    path = f"/v1/jobs/{running}/versions"
    for after, first in (("0.4", "0.5"), ("0.99", "1.9"), ("1.0", "1.9")):
        assert server.http.get(path, params={"after": after}).json()["items"][0]["version"] == first
    for after in ("1.10", "7.0"):
        assert server.http.get(path, params={"after": after}).json() == {
            "items": [],
            "next": None,
            "latest": "1.10",
        }


def test_a_job_without_versions_has_an_empty_page(server: Server) -> None:
    path = f"/v1/jobs/{server.submit()}/versions"
    assert server.http.get(path).json() == {"items": [], "next": None, "latest": None}


@pytest.mark.parametrize(
    "after", ["", "x", "4", "0.", ".4", "0.4.1", "-1.0", "0.04", "0.4\n", "٠.٤", "latest"]
)
def test_what_is_no_version_is_refused(server: Server, running: str, after: str) -> None:
    told = problem(server.http.get(f"/v1/jobs/{running}/versions", params={"after": after}), 422)
    assert told["errors"][0]["path"] == "after"


# ---- jobs that Redis has forgotten ----------------------------------------------------------------------------
@pytest.fixture
def forgotten(server: Server, job: str) -> Path:
    """The folder of a job that Redis does not know."""
    folder: Path = server.settings.job_dir(job)
    folder.mkdir()
    (folder / "spec.json").write_text(JobSpec.model_validate(SPEC).canonical())
    return folder


def test_pages_of_what_a_folder_kept(server: Server, job: str, forgotten: Path, running: str) -> None:
    known = find(server.bus, server.settings, running)
    assert known is not None
    evidence = msgspec.structs.replace(reporter.gather(server.bus, known), job=job)
    (forgotten / reporter.EVIDENCE).write_bytes(msgspec.msgpack.encode(evidence))
    assert pages(server, job, 4) == as_pages(4)


def test_pages_of_what_spans_tell(server: Server, job: str, forgotten: Path) -> None:
    tracing.setup("test", "test", server.settings.traces, None)
    for name in reversed(NAMES):
        told: dict[str, Any] = {"job": job, "version": name}
        tracing.record(
            vp.MINTED, None, 0.1, 0.2, **told, parent=None, optimizer_step=name.number, trajectories=4
        )
        tracing.record(vp.PUBLISHED, None, 0.2, 0.3, **told, digest="9f" * 32)
    tracing.setup("unnamed", "unnamed", None, None)
    assert pages(server, job, 4) == as_pages(4)


# ---- who reads all of them ------------------------------------------------------------------------------------
def test_the_command_shows_more_versions_than_a_page_holds(server: Server) -> None:
    job = server.submit()
    record(server, job, *(version(vp.VersionId(0, number)) for number in range(501)))
    command = [str(Path(sys.executable).with_name("syncline")), "--url", server.url, "versions", job]
    as_json = subprocess.run([*command, "--json"], capture_output=True, check=True).stdout
    assert [one["version"] for one in json.loads(as_json)] == [f"0.{number}" for number in range(501)]
    heading, *rows = subprocess.run(command, capture_output=True, check=True, text=True).stdout.splitlines()
    assert heading.startswith("version")
    assert [row.split()[0] for row in rows] == [f"0.{number}" for number in range(501)]


def serve(server: Server, job: str, **versions: vp.VersionId | None) -> None:
    """What each worker says of itself; None: it sleeps."""
    for name, of in versions.items():
        status = WorkerStatus(
            worker=name,
            incarnation="abc",
            state="asleep" if of is None else "serving",
            version=of,
            digest="",
            staged=None,
            running=0,
            waiting=0,
            tokens=0,
            tokens_per_second=0.0,
            device="cpu",
            resident=0,
            why="",
            at=0.0,
        )
        server.bus.hset(WORKERS.at(job), name, pack(status))


def test_who_watches_sees_what_sleepers_served_and_reads_no_version_that_all_left(server: Server) -> None:
    job = server.submit()
    record(server, job, version(vp.VersionId(0, 9), w0=10.0, w1=10.0), version(vp.VersionId(0, 10), w0=11.0))
    serve(server, job, w0=None, w1=None)
    client = Client(server.url)
    watcher = _Watcher(client, job)
    try:
        assert watcher.look().served == {"w0": "0.10", "w1": "0.9"}
        watcher._rest = 0.0  # it need not wait: nothing was slow
        server.bus.hset(VERSIONS.at(job), "0.9", b"not read again")
        record(server, job, version(vp.VersionId(1, 9), w1=12.0))
        serve(server, job, w0=vp.VersionId(1, 10))
        assert watcher.look().served == {"w0": "1.10", "w1": "1.9"}
        watcher._rest = 0.0
        serve(server, job, w0=None, w2=None)  # one that never served: all are looked through
        with pytest.raises(Refused, match=r"0\.9"):
            watcher.look()
    finally:
        client.close()
