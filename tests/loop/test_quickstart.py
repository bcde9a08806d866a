"""What the README promises: one command trains, and any token of the run can be asked where it came from."""

from __future__ import annotations

import json
from typing import Any

import pytest
from guarantees import check, sampled_under, segment_files
from stack import ROOT, Stack

from syncline.contract.token_path import TOKEN_PATH
from syncline.contract.version_path import VERSION_PATH
from syncline.runtime import segments
from syncline.runtime.bus import Bus


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_quickstart_learns_switches_and_can_be_traced(stack: Stack) -> None:
    done = stack.cli("run", str(ROOT / "examples" / "quickstart.toml"), timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    job = json.loads(stack.cli("list", "--json").stdout)[0]["id"]
    run = stack.runs / job
    summary = stack.summary(job)
    check(run, summary, updates=60, max_lag=1)
    assert summary["reward"]["first_fifth"] < 0.4
    assert summary["reward"]["last_fifth"] >= 0.8
    assert [m["mode"] for m in summary["modes"]] == ["colocated", "disjoint", "colocated"]
    _every_version_is_accounted_for(stack, job, summary)
    assert (run / "report.html").stat().st_size > 10_000

    row = segments.read(segment_files(run)[30]).rows[0]
    name = row.trajectory.trajectory
    _trace_is_whole(stack, name)
    up = json.loads((stack.runs / "up.json").read_text())
    redis = Bus(up["redis_url"])
    redis.many([("FLUSHALL",)])
    redis.close()
    _trace_is_whole(stack, name)


def _every_version_is_accounted_for(stack: Stack, job: str, summary: dict[str, Any]) -> None:
    """All were active but those that, side by side with the trainer, another one overtook on its way to the workers:
    under those nothing was sampled."""
    versions = stack.get(f"/v1/jobs/{job}/versions?limit=100")["items"]
    overtaken = {int(v["version"].partition(".")[2]): v["reason"] for v in versions if v["active"] is None}
    assert len(versions) == 61
    assert summary["versions"] == {"minted": 61, "active": 61 - len(overtaken)}
    assert all(reason.startswith("superseded") for reason in overtaken.values()), overtaken
    assert all(20 < number <= 40 for number in overtaken), "none but of the disjoint part"
    assert not overtaken.keys() & sampled_under(stack.runs / job)


def _trace_is_whole(stack: Stack, name: str) -> None:
    """The printed path of one token, and its JSON form, hold exactly the hops of both paths, in their order."""
    text = stack.cli("trace", name, "--token", "5")
    assert text.returncode == 0, text.stdout + text.stderr
    told = json.loads(stack.cli("trace", name, "--token", "5", "--json").stdout)
    token = [hop["hop"] for hop in told["hops"]]
    assert token == [hop.name for hop in TOKEN_PATH]
    version = list(dict.fromkeys(hop["hop"] for hop in told["version"]["path"]))
    assert version == [hop.name for hop in VERSION_PATH][: len(version)]
    assert version[-1] in ("version.active", "version.retired")
    for word in (
        *token,
        *version,
        told["span"]["digest"][:12],
        told["span"]["version"],
        told["span"]["worker"],
    ):
        assert word in text.stdout, f"{word} is missing:\n{text.stdout}"
