"""Lineage of long jobs: what is not read again for every question, and that nothing is missed for it."""

from __future__ import annotations

import itertools
import os
import time
from pathlib import Path

import msgspec
import pytest
from left_behind import CONTRACT, SIZE, ledger, publish, row, submit_group, trajectory, write_update
from serving import SPEC, Server, problem

from syncline.contract import version_path as vp
from syncline.contract.job import JobSpec
from syncline.gateway import reporter
from syncline.gateway.records import find
from syncline.gateway.segment_index import SETTLED_NS, SegmentIndex
from syncline.runtime import segments

OLD = time.time() - 2 * SETTLED_NS / 1e9


def settle(folder: Path) -> None:
    """The segments' folder was changed long ago."""
    os.utime(folder / "segments", (OLD, OLD))


def write(folder: Path, job: str, update: int, uses: str = "train") -> None:
    write_update(folder, job, update, [row(trajectory(job, update, i), uses) for i in range(SIZE)])


def listed(index: SegmentIndex, **asked: int | str | None) -> list[tuple[str, int, str]]:
    """Members on all pages of three."""
    given = {"use": None, "update": None, "group": None, **asked}
    found: list[tuple[str, int, str]] = []
    after = (-1, -1)
    while page := index.page(**given, after=after, limit=3):  # type: ignore[arg-type]
        found += [(member.trajectory, member.update, member.use) for member in page]
        _, group, member = page[-1].trajectory.split("-")
        after = (int(group), int(member))
    return found


def test_a_folder_that_has_not_changed_is_not_gone_through_again(tmp_path: Path, job: str) -> None:
    write(tmp_path, job, 1)
    settle(tmp_path)
    index = SegmentIndex(tmp_path)
    assert len(listed(index)) == SIZE
    write(tmp_path, job, 2)
    settle(tmp_path)  # its time is put back, which no writer does
    assert len(listed(index)) == SIZE, "the folder was listed though its time is the one that the index knows"
    write(tmp_path, job, 3)
    assert len(listed(index)) == 3 * SIZE
    segments.segment_path(tmp_path / "segments", 2).unlink()
    assert {update for _, update, _ in listed(index)} == {1, 3}


def test_a_change_in_the_moment_of_the_last_look_is_seen(tmp_path: Path, job: str) -> None:
    """The time that a folder bears may be coarse: another change may leave it as it is."""
    index = SegmentIndex(tmp_path)
    write(tmp_path, job, 1)
    now = (tmp_path / "segments").stat().st_mtime_ns
    assert len(listed(index)) == SIZE
    write(tmp_path, job, 2)
    os.utime(tmp_path / "segments", ns=(now, now))
    assert len(listed(index)) == 2 * SIZE


def test_a_segment_that_was_written_again_is_read_again_whatever_the_folder_says(
    tmp_path: Path, job: str
) -> None:
    write(tmp_path, job, 1)
    settle(tmp_path)
    index, name = SegmentIndex(tmp_path), f"{job}-1-0"
    found = index.find(name)
    assert found is not None
    assert found.use == "train"
    write(tmp_path, job, 1, "filtered")
    settle(tmp_path)
    found = index.find(name)
    assert found is not None
    assert found.use == "filtered"


def test_pages_hold_what_was_asked_for(tmp_path: Path, job: str) -> None:
    uses = ["train", "filtered", "train", "train", "filtered"]
    for number, name in enumerate(uses, start=1):
        write(tmp_path, job, number, name)
    every = [
        (f"{job}-{number}-{i}", number, name)
        for number, name in enumerate(uses, start=1)
        for i in range(SIZE)
    ]
    index = SegmentIndex(tmp_path)
    kinds: tuple[str | None, ...] = (None, "train", "filtered")
    for use, update, group in itertools.product(kinds, (None, 2, 9), (None, 3, 2)):
        wanted = [
            one
            for one in every
            if use in (None, one[2])
            and update in (None, one[1])
            and group in (None, int(one[0].split("-")[1]))
        ]
        assert listed(index, use=use, update=update, group=group) == wanted, (use, update, group)


def test_what_is_open_is_listed_from_the_open_groups(server: Server) -> None:
    job = server.submit(batch={"groups": 1, "group_size": SIZE}, schedule={"max_lag": 5, "mode": "disjoint"})
    for group in range(4):
        publish(server, job, group)
    for group in range(4, 7):
        submit_group(server, job, group)
    for index in range(SIZE):
        ledger(server, job).end(f"{job}-1-{index}", "expired", "over the lag bound")
    path = f"/v1/jobs/{job}/trajectories"
    for state, groups in (("buffered", (0, 2, 3)), ("running", (4, 5, 6)), ("expired", (1,))):
        found, after = [], None
        while True:
            params: dict[str, str | int] = {"state": state, "limit": 3}
            if after:
                params["after"] = after
            page = server.http.get(path, params=params).json()
            found += [item["trajectory"] for item in page["items"]]
            after = page["next"]
            if after is None:
                break
        assert found == [f"{job}-{group}-{index}" for group in groups for index in range(SIZE)], state


@pytest.fixture
def forgotten(server: Server, job: str) -> Path:
    """The folder of a job that Redis does not know."""
    folder: Path = server.settings.job_dir(job)
    folder.mkdir()
    (folder / "spec.json").write_text(JobSpec.model_validate(SPEC).canonical())
    return folder


def test_versions_of_a_forgotten_job_are_those_of_its_newest_evidence(
    server: Server, job: str, forgotten: Path
) -> None:
    """They are kept between questions, and read again when the evidence was written again."""
    recorded = server.submit()
    record = find(server.bus, server.settings, recorded)
    assert record is not None
    evidence = msgspec.structs.replace(reporter.gather(server.bus, record), job=job)

    def version(number: int) -> vp.VersionRecord:
        of = vp.VersionId(0, number)
        return vp.VersionRecord(
            version=of, parent=None, optimizer_step=number, contract=CONTRACT, state="active", published=1.0
        )

    path = f"/v1/jobs/{job}/versions"
    for count in (2, 3):
        versions = tuple(version(number) for number in range(count))
        told = msgspec.structs.replace(evidence, versions=versions)
        (forgotten / reporter.EVIDENCE).write_bytes(msgspec.msgpack.encode(told))
        for _ in range(2):
            assert len(server.http.get(path).json()["items"]) == count
            assert server.http.get(f"{path}/{count - 1}").json()["record"]["version"] == f"0.{count - 1}"
            problem(server.http.get(f"{path}/{count}"), 404)
            problem(server.http.get(f"{path}/0.{count}"), 404)
