"""Diagnostics by REST: in pages, for a token, as an alarm of the job; and the same after Redis has forgotten."""

from __future__ import annotations

import msgspec
import pytest
from left_behind import row, trajectory, write_update
from serving import Server

from syncline.contract.diagnosis import Diagnostics
from syncline.contract.streams import DIAGNOSTICS, JOB, KEYS
from syncline.gateway import examples, reporter
from syncline.gateway.records import find
from syncline.runtime.segment_probes import ProbedToken, write_probes

RECORD = examples.DIAGNOSTICS.items[0]


def tell(server: Server, job: str, updates: range, **changes: object) -> None:
    for update in updates:
        record: Diagnostics = msgspec.structs.replace(RECORD, update=update, **changes)
        server.bus.append(DIAGNOSTICS.at(job), record)


def test_diagnostics_come_in_pages(server: Server) -> None:
    job = server.submit()
    tell(server, job, range(1, 6))
    first = server.http.get(f"/v1/jobs/{job}/diagnostics", params={"limit": 3}).json()
    rest = server.http.get(f"/v1/jobs/{job}/diagnostics", params={"after": first["next"]}).json()
    assert [[r["update"] for r in page["items"]] for page in (first, rest)] == [[1, 2, 3], [4, 5]]
    assert rest["next"] is None
    one = first["items"][0]
    assert one["version"] == str(RECORD.version)
    assert one["terms"]["mismatch"]["mean"] == RECORD.terms["mismatch"].mean
    assert one["unmeasured"] == RECORD.unmeasured
    assert one["truncated"] is None


def test_a_job_shows_its_newest_alarm(server: Server) -> None:
    job = server.submit()
    assert server.http.get(f"/v1/jobs/{job}").json()["alarm"] == ""
    server.bus.hset(JOB.at(job), "alarm", "update 4: mismatch: mean 1 against a baseline of 0.1")
    assert server.http.get(f"/v1/jobs/{job}").json()["alarm"].startswith("update 4: mismatch")
    assert server.http.get("/v1/jobs").json()["items"][0]["alarm"].startswith("update 4: mismatch")


def test_a_forgotten_job_keeps_its_diagnostics_and_alarm(server: Server) -> None:
    job = server.submit()
    tell(server, job, range(1, 4), alarms=("mismatch: mean 1 against a baseline of 0.1",))
    before = server.http.get(f"/v1/jobs/{job}/diagnostics").json()
    record = find(server.bus, server.settings, job)
    assert record is not None
    record.folder.mkdir(parents=True, exist_ok=True)
    (record.folder / "spec.json").write_text(record.spec.model_dump_json())
    reporter.write(record.folder, reporter.gather(server.bus, record))
    server.bus.delete(*(key.at(job) for key in KEYS if key.scope == "job"))
    after = server.http.get(f"/v1/jobs/{job}/diagnostics").json()
    assert after["items"] == before["items"]
    paged = server.http.get(f"/v1/jobs/{job}/diagnostics", params={"limit": 2}).json()
    assert [r["update"] for r in paged["items"]] == [1, 2]
    told = server.http.get(f"/v1/jobs/{job}").json()
    assert told["alarm"] == "update 3: mismatch: mean 1 against a baseline of 0.1"


@pytest.mark.parametrize("probed", [True, False])
def test_a_probed_token_has_its_decomposition(server: Server, probed: bool) -> None:
    job = server.submit()
    folder = server.settings.job_dir(job)
    t = trajectory(job, 0, 0)
    write_update(folder, job, 9, [row(t)])
    if probed:
        rows = [
            ProbedToken(
                trajectory=t.trajectory,
                token=i,
                lag=1,
                version="0.7",
                worker="w1",
                trainer=-1.0,
                rollout=-1.25,
                behaviour=-1.5,
                total=0.5,
                mismatch=0.25 + i / 64,
                staleness=0.25 - i / 64,
                kv_cache=None,
                first_of_span=i in (0, 4),
                carried=False,
            )
            for i in range(6)
        ]
        write_probes(folder / "segments", 9, "0.8", rows)
    path = server.http.get(f"/v1/jobs/{job}/trajectories/{t.trajectory}/tokens/4").json()
    if not probed:
        assert path["decomposition"] is None
        return
    assert path["decomposition"] == {
        "worker": "w1",
        "rollout_logprob": -1.25,
        "total": 0.5,
        "mismatch": 0.25 + 4 / 64,
        "staleness": 0.25 - 4 / 64,
        "kv_cache": None,
    }
