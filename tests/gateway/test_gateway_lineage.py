"""A token's path: from the stream, from the segment, and after Redis has forgotten everything."""

from __future__ import annotations

import json
import math
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
from left_behind import (
    CONTRACT,
    DIGEST,
    SIZE,
    ledger,
    publish,
    reward,
    row,
    submit_group,
    trace,
    trajectory,
    write_update,
)
from serving import SPEC, Server, problem
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from syncline.contract import token_path as tp
from syncline.contract import version_path as vp
from syncline.contract.job import JobSpec
from syncline.contract.streams import HELD, JOB, TRAJECTORIES, VERSIONS, WORK
from syncline.runtime import segments


@pytest.fixture
def running(server: Server) -> str:
    """A job whose groups have two members; its claims are of one group."""
    return server.submit(batch={"groups": 1, "group_size": SIZE}, schedule={"max_lag": 5, "mode": "disjoint"})


def ask(server: Server, tid: str, token: int | None = None) -> dict[str, Any]:
    path = f"/v1/jobs/{tid.split('-')[0]}/trajectories/{tid}" + ("" if token is None else f"/tokens/{token}")
    answer = server.http.get(path)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def test_a_buffered_token_knows_who_sampled_it(server: Server, running: str) -> None:
    first, _ = publish(server, running, 0)
    ledger(server, running).reward(reward(first))
    path = ask(server, first.trajectory, 4)
    assert (path["token"]["index"], path["token"]["position"], path["token"]["id"]) == (4, 9, 7)
    assert (path["span"]["version"], path["span"]["digest"], path["span"]["worker"]) == (
        "0.8",
        DIGEST[8],
        "w0",
    )
    assert path["behaviour_logprob"] == pytest.approx(-0.5)
    assert (path["state"], path["update"], path["lag"], path["trainer_logprob"]) == (
        "buffered",
        None,
        None,
        None,
    )
    assert path["reward"]["value"] == 0.75
    assert path["missing"] == ["token.admitted", "token.scored", "token.trained"]
    assert {hop["source"] for hop in path["hops"]} == {"record"}
    assert path["version"] is None


def test_a_claimed_token_knows_its_update(server: Server, running: str) -> None:
    made = publish(server, running, 0)
    book = ledger(server, running)
    for t in made:
        assert book.reward(reward(t))
    assert book.claim(9, 8) is not None
    path = ask(server, made[0].trajectory, 0)
    assert (path["state"], path["update"], path["lag"]) == ("buffered", 9, 1)
    page = server.http.get(f"/v1/jobs/{running}/trajectories", params={"update": 9}).json()
    assert [item["trajectory"] for item in page["items"]] == [t.trajectory for t in made]


def test_a_trained_token_has_its_whole_path(server: Server, running: str) -> None:
    made = publish(server, running, 0)
    book = ledger(server, running)
    for t in made:
        book.reward(reward(t))
    book.claim(9, 8)
    write_update(server.settings.job_dir(running), running, 9, [row(t) for t in made])
    book.trained(9, [t.trajectory for t in made])
    book.forget([t.trajectory for t in made])
    record = vp.VersionRecord(
        version=vp.VersionId(0, 7),
        parent=vp.VersionId(0, 6),
        optimizer_step=7,
        contract=CONTRACT,
        state="active",
        digest=DIGEST[7],
        minted=0.2,
        active=0.7,
    )
    server.bus.hset(VERSIONS.at(running), "0.7", msgspec.json.encode(record))
    trace(server, made[0], 9)
    path = ask(server, made[0].trajectory, 2)
    assert [hop["hop"] for hop in path["hops"]] == [hop.name for hop in tp.TOKEN_PATH]
    assert path["missing"] == []
    by_name = {hop["hop"]: hop for hop in path["hops"]}
    sampled = by_name["token.sampled"]
    assert (sampled["source"], sampled["attributes"]["attempt"], sampled["at"]) == ("span", 1, 3.0)
    assert sampled["seconds"] == pytest.approx(1.0)
    assert by_name["token.scored"]["source"] == "record"  # its span was lost; the scores prove the hop
    assert by_name["token.trained"]["attributes"]["minted"] == "1.9"
    assert (path["state"], path["update"], path["lag"]) == ("trained", 9, 1)
    assert path["trainer_logprob"] == pytest.approx(-0.29, abs=1e-6)
    assert path["gap"] == pytest.approx(0.01, abs=1e-6)
    assert path["advantage"] == 0.5
    hops = [(hop["hop"], hop["attributes"].get("worker")) for hop in path["version"]["path"]]
    assert hops == [
        ("version.minted", None),
        ("version.converted", None),
        ("version.published", None),
        ("version.staged", "w0"),
        ("version.staged", "w1"),
        ("version.verified", "w0"),
        ("version.verified", "w1"),
        ("version.active", "w0"),
        ("version.active", "w1"),
    ]
    whole = ask(server, made[0].trajectory)
    assert whole["tokens"] == made[0].tokens.tolist()
    assert whole["trainer_logprobs"] == pytest.approx([b + 0.01 for b in made[0].logprobs], abs=1e-6)
    assert (whole["lag"], whole["state"], len(whole["spans"])) == (2, "trained", 2)
    assert sum(hop["hop"] == "token.sampled" for hop in whole["hops"]) == 3  # the first attempt's too


def test_the_path_outlives_redis(server: Server, job: str) -> None:
    folder = server.settings.job_dir(job)
    folder.mkdir()
    spec = JobSpec.model_validate({**SPEC, "batch": {"groups": 1, "group_size": SIZE}})
    (folder / "spec.json").write_text(spec.canonical())
    (folder / "summary.json").write_text(json.dumps({"state": "succeeded", "updates": 9}))
    for update in range(1, 10):
        made = [trajectory(job, update, index) for index in range(SIZE)]
        uses = ["train", "filtered" if update == 5 else "train"]
        write_update(folder, job, update, [row(t, use) for t, use in zip(made, uses, strict=True)])
    last = trajectory(job, 9, 1)
    trace(server, last, 9)
    assert not server.bus.exists(JOB.at(job))
    path = ask(server, last.trajectory, 2)
    assert (path["state"], path["update"], path["lag"]) == ("trained", 9, 1)
    assert path["trainer_logprob"] == pytest.approx(-0.29, abs=1e-6)
    assert path["missing"] == []
    version = path["version"]["record"]
    assert (version["version"], version["digest"], version["state"]) == ("0.7", DIGEST[7], "active")
    assert version["workers"]["w0"]["verdict"] == "verified"
    listed = server.http.get(f"/v1/jobs/{job}/versions").json()
    assert [v["version"] for v in listed["items"]] == ["0.7"]
    assert listed["latest"] == "0.7"
    filtered = ask(server, tp.trajectory_id(job, 5, 1))
    assert (filtered["state"], filtered["reason"]) == ("filtered", "no member of its group was scored")
    problem(server.http.get(f"/v1/jobs/{job}/trajectories/{job}-77-0"), 404)
    params: dict[str, str | int] = {"state": "trained", "limit": 10}
    page = server.http.get(f"/v1/jobs/{job}/trajectories", params=params).json()
    rest = server.http.get(f"/v1/jobs/{job}/trajectories", params={**params, "after": page["next"]}).json()
    assert len(page["items"]) == 10
    assert len(page["items"] + rest["items"]) == 17
    assert rest["next"] is None
    of_five = server.http.get(f"/v1/jobs/{job}/trajectories", params={"update": 5}).json()["items"]
    assert [item["state"] for item in of_five] == ["trained", "filtered"]


def test_an_update_that_was_never_stepped_trained_nothing(server: Server, job: str) -> None:
    folder = server.settings.job_dir(job)
    folder.mkdir()
    (folder / "spec.json").write_text(JobSpec.model_validate(SPEC).canonical())
    write_update(folder, job, 1, [row(trajectory(job, 0, 0))], scored=False)
    assert ask(server, f"{job}-0-0")["state"] == "buffered"
    write_update(
        folder, job, 1, [row(trajectory(job, 0, 0), "filtered")]
    )  # written again: the step was skipped
    assert ask(server, f"{job}-0-0")["state"] == "filtered"


def test_lookup_is_quick_among_thousands_of_segments(server: Server, job: str) -> None:
    folder = server.settings.job_dir(job)
    folder.mkdir()
    (folder / "spec.json").write_text(JobSpec.model_validate(SPEC).canonical())
    write_update(folder, job, 1, [row(trajectory(job, 0, 0))])
    first = segments.segment_path(folder / "segments", 1).read_bytes()
    for update in range(2, 1500):  # all hold the same trajectory: the newest counts
        segments.segment_path(folder / "segments", update).write_bytes(first)
    assert ask(server, f"{job}-0-0")["update"] == 1499  # builds the index
    began = time.monotonic()
    for _ in range(5):
        ask(server, f"{job}-0-0")
    assert (time.monotonic() - began) / 5 < 0.5


# ---- what there is no record of -----------------------------------------------------------------------------
def test_a_running_trajectory_has_no_record_yet(server: Server, running: str) -> None:
    submit_group(server, running, 0)
    told = problem(server.http.get(f"/v1/jobs/{running}/trajectories/{running}-0-1"), 409)
    assert told["state"] == "running"
    assert server.bus.length(WORK.at(running)) == SIZE


def test_a_dropped_trajectory_is_gone_with_its_reason(server: Server, running: str) -> None:
    made = publish(server, running, 0)
    ledger(server, running).end(made[0].trajectory, "expired", "over the lag bound")
    told = problem(server.http.get(f"/v1/jobs/{running}/trajectories/{made[0].trajectory}/tokens/0"), 410)
    assert told["state"] == "expired"
    assert "over the lag bound" in told["detail"]


@pytest.mark.parametrize(
    "tid", ["{}-0-9", "{}-00-0", "{}-0", "{}-0-0-0", "{}--1-0", "j0000000000-0-0", "..", "{}-0-x", "{}-٣-0"]
)
def test_strange_trajectories_are_like_unknown_ones(server: Server, running: str, tid: str) -> None:
    publish(server, running, 0)
    told = problem(server.http.get(f"/v1/jobs/{running}/trajectories/{tid.format(running)}/tokens/0"), 404)
    assert told["type"] == "urn:syncline:problem:not-found"


def test_a_token_beyond_the_end_is_refused_with_the_range(server: Server, running: str) -> None:
    made = publish(server, running, 0)
    told = problem(server.http.get(f"/v1/jobs/{running}/trajectories/{made[0].trajectory}/tokens/6"), 404)
    assert "0 to 5" in told["detail"]


def test_an_altered_record_is_refused(server: Server, running: str) -> None:
    made = publish(server, running, 0)
    entry = ledger(server, running).entry(made[0].trajectory)
    assert entry is not None
    raw = server.bus.hget(HELD.at(running), made[0].trajectory)
    assert raw is not None
    bad = server.bus.append(TRAJECTORIES.at(running), {b"m": b"\xc1"})
    server.bus.hset(
        HELD.at(running), made[0].trajectory, raw.replace((entry.stream_id or "").encode(), bad.encode())
    )
    problem(server.http.get(f"/v1/jobs/{running}/trajectories/{made[0].trajectory}"), 500)


# ---- listings -----------------------------------------------------------------------------------------------
def test_trajectories_are_listed_by_group_and_state(server: Server, running: str) -> None:
    for group in range(4):
        publish(server, running, group)
    ledger(server, running).end(f"{running}-2-1", "failed", "five attempts")
    path = f"/v1/jobs/{running}/trajectories"
    seen, after = [], None
    while True:
        page = server.http.get(path, params={"limit": 3} | ({"after": after} if after else {})).json()
        seen += [item["trajectory"] for item in page["items"]]
        after = page["next"]
        if after is None:
            break
    assert seen == [tp.trajectory_id(running, g, i) for g in range(4) for i in range(SIZE)]
    failed = server.http.get(path, params={"state": "failed"}).json()
    assert [(i["trajectory"], i["reason"]) for i in failed["items"]] == [(f"{running}-2-1", "five attempts")]
    assert failed["next"] is None
    group = server.http.get(path, params={"group": 3}).json()
    assert [item["index"] for item in group["items"]] == [0, 1]
    both = server.http.get(path, params={"group": 2, "state": "buffered"}).json()
    assert [item["trajectory"] for item in both["items"]] == [f"{running}-2-0"]
    assert server.http.get(path, params={"group": 99}).json() == {"items": [], "next": None}
    problem(server.http.get(path, params={"after": "x"}), 422)
    problem(server.http.get(path, params={"state": "lost"}), 422)


# ---- token text ---------------------------------------------------------------------------------------------
def test_a_token_has_its_text(server: Server, running: str, model_root: Path) -> None:
    made = publish(server, running, 0)
    assert ask(server, made[0].trajectory, 0)["token"]["text"] is None
    vocabulary = {letter: i for i, letter in enumerate("abcdefghij")}
    Tokenizer(WordLevel(vocabulary, unk_token="a")).save(str(model_root / "tiny" / "tokenizer.json"))
    try:
        token = ask(server, made[0].trajectory, 0)["token"]
    finally:
        (model_root / "tiny" / "tokenizer.json").unlink()
    assert (token["id"], token["text"], token["piece"]) == (3, "d", "d")


# ---- versions -----------------------------------------------------------------------------------------------
def test_versions_are_found_by_number_and_by_name(server: Server, running: str) -> None:
    for epoch, number in [(0, 7), (0, 8), (1, 8), (0, 10)]:
        record = vp.VersionRecord(
            version=vp.VersionId(epoch, number),
            parent=None,
            optimizer_step=number,
            contract=CONTRACT,
            state="minted",
            minted=1.0,
            workers={"w0": vp.WorkerPath(staged=2.0, canary_gap=math.nan)},
        )
        server.bus.hset(VERSIONS.at(running), f"{epoch}.{number}", msgspec.json.encode(record))
    server.bus.hset(VERSIONS.at(running), "latest", "0.10")
    path = f"/v1/jobs/{running}/versions"
    listed = server.http.get(path).json()
    assert [v["version"] for v in listed["items"]] == ["0.7", "0.8", "0.10", "1.8"]
    assert listed["latest"] == "0.10"
    assert server.http.get(f"{path}/8").json()["record"]["version"] == "1.8"
    one = server.http.get(f"{path}/0.8").json()
    assert one["record"]["version"] == "0.8"
    assert [(hop["hop"], hop["source"]) for hop in one["path"]] == [
        ("version.minted", "record"),
        ("version.staged", "record"),
    ]
    for name in ("9", "0.9", "x", "0.", ".8", "0.8.1", "-1", "٨", "1e1", "latest", "99999999999"):
        problem(server.http.get(f"{path}/{name}"), 404)
