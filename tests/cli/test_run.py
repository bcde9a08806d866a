"""`syncline run`: the whole way from nothing to a report, and what Ctrl-C does on it."""

from __future__ import annotations

import json
import re
import signal
import subprocess
from pathlib import Path

import psutil
import pytest
from command_line import ROOT, SYNCLINE, Here
from waiting import wait_until

SPEC = """
name = "short"
[model]
name = "tiny-dense"
[task]
environment = "characters"
options = { game = "reverse", length = 3, alphabet = 8 }
[sampling]
max_tokens = 3
[batch]
groups = 2
group_size = 2
[schedule]
updates = %d
"""


@pytest.fixture
def spec(tmp_path: Path) -> Path:
    path = tmp_path / "short.toml"
    path.write_text(SPEC % 3)
    return path


def left_over(here: Here) -> list[str]:
    """Command lines of live processes that work in this run root."""
    found = []
    for process in psutil.process_iter(["environ", "cmdline", "status"]):
        environ = process.info["environ"] or {}
        if environ.get("SYNCLINE_RUNS") == str(here.runs) and process.info["status"] != psutil.STATUS_ZOMBIE:
            found.append(" ".join(process.info["cmdline"] or []))
    return found


@pytest.mark.slow
def test_run_trains_reports_and_leaves_nothing_running(here: Here, spec: Path) -> None:
    done = here.cli("run", str(spec))
    assert done.returncode == 0, done.stdout + done.stderr
    for part in ("update 3/3", "succeeded after 3 updates", "lost          0, repeated 0", "report.html"):
        assert part in done.stdout, done.stdout
    assert left_over(here) == []
    (job,) = (folder for folder in here.runs.glob("j*") if folder.is_dir())
    summary = json.loads((job / "summary.json").read_text())
    assert (summary["state"], summary["updates"], summary["conservation_violations"]) == ("succeeded", 3, 0)
    assert (job / "report.html").read_text().startswith("<!doctype html>")

    traced = here.cli("trace", f"{job.name}-0-1", "--token", "1")
    assert traced.returncode == 0, traced.stderr
    hops = ("token.prompted", "token.sampled", "token.published", "token.rewarded", "token.trained")
    for part in (*hops, "version.minted", "version.verified", "version.active", "version 0.0"):
        assert part in traced.stdout, traced.stdout
    whole = json.loads(here.cli("trace", f"{job.name}-0-1", "--json").stdout)
    assert whole["state"] == "trained"


@pytest.mark.slow
def test_ctrl_c_cancels_the_job_and_stops_what_run_started(here: Here, tmp_path: Path) -> None:
    spec = tmp_path / "long.toml"
    spec.write_text(SPEC % 100_000)
    running = subprocess.Popen(
        [str(SYNCLINE), "run", str(spec)],
        cwd=ROOT,
        env=here.env,
        stdin=subprocess.DEVNULL,
        stdout=(tmp_path / "out").open("w"),
        stderr=(tmp_path / "err").open("w"),
        start_new_session=True,
    )
    try:
        # the line is printed once a second, so the first number that it shows may be any
        begun = re.compile(r"update [1-9]\d*/100000")
        wait_until(lambda: begun.search((tmp_path / "out").read_text()), 90, "the first update")
        running.send_signal(signal.SIGINT)
        assert running.wait(60) == 1
    finally:
        running.kill()
    said = (tmp_path / "out").read_text() + (tmp_path / "err").read_text()
    assert "cancelled after" in said, said
    assert "Traceback" not in said
    assert left_over(here) == []


@pytest.mark.slow
def test_the_run_that_started_the_services_leaves_them_to_the_other(here: Here, spec: Path) -> None:
    first = subprocess.Popen(
        [str(SYNCLINE), "run", str(spec)], cwd=ROOT, env=here.env, stderr=subprocess.PIPE, text=True
    )
    wait_until(lambda: list(here.runs.glob("j*/spec.json")), 60, "the first job")
    second = here.cli("run", str(spec))
    assert second.returncode == 0, second.stdout + second.stderr
    assert first.wait(60) == 0
    assert first.stderr is not None
    assert "left up for job" in first.stderr.read()


@pytest.mark.slow
def test_a_run_leaves_the_services_that_somebody_else_brought_back(here: Here, tmp_path: Path) -> None:
    spec = tmp_path / "long.toml"
    spec.write_text(SPEC % 100_000)
    err = tmp_path / "err"
    following = subprocess.Popen(
        [str(SYNCLINE), "run", str(spec)],
        cwd=ROOT,
        env=here.env,
        stdout=subprocess.DEVNULL,
        stderr=err.open("w"),
    )
    try:
        wait_until(lambda: list(here.runs.glob("j*/spec.json")), 60, "the job")
        assert here.cli("down").returncode == 0
        wait_until(lambda: "the services went away" in err.read_text(), 10, "word that they went")
        up = here.up()
        wait_until(lambda: "the services are back" in err.read_text(), 20, "word that they are back")
        assert here.cli("cancel", "latest").returncode == 0
        assert following.wait(60) == 1
    finally:
        following.kill()
        following.wait()
    assert here.now["supervisor"] == up["supervisor"]
    assert here.cli("list").returncode == 0


@pytest.mark.slow
def test_a_job_goes_on_after_down_and_up(here: Here, tmp_path: Path) -> None:
    """What was trained stays trained, and the rest is trained once."""
    spec = tmp_path / "twenty.toml"
    spec.write_text(SPEC % 20 + "[checkpoint]\nevery = 3\n")
    here.up()
    job = here.cli("submit", str(spec)).stdout.strip()

    def updates() -> int:
        return int(json.loads(here.cli("status", job, "--json").stdout)["update"])

    wait_until(lambda: updates() >= 4, 120, "four updates")
    assert here.cli("down").returncode == 0
    assert left_over(here) == []
    here.up()
    done = here.cli("watch", job)
    assert done.returncode == 0, done.stdout + done.stderr
    summary = json.loads(here.cli("report", job, "--json").stdout)
    assert (summary["state"], summary["updates"], summary["lost"], summary["repeated"]) == (
        "succeeded",
        20,
        0,
        0,
    )
    assert summary["ledger"]["trained"] == 20 * 4
    assert summary["conservation_violations"] == 0
