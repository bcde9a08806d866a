"""Trackers: each update reaches the event file and the run, once the library's own files say so; a failure is told."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from event_files import history_of, scalars_in, wandb_records
from left_behind import metrics
from serving import SPEC, Server
from waiting import wait_until

from syncline.contract.job import JobSpec
from syncline.contract.streams import JOB, METRICS
from syncline.gateway import tracking
from syncline.gateway.tracking import Trackers, missing_extras
from syncline.runtime.bus import Bus

BOTH = {"tensorboard": True, "wandb": {"project": "p", "mode": "offline"}}
SECRET = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def keeping(server: Server) -> Iterator[Callable[[], Callable[[], None]]]:
    """Starts what a gateway process runs on a thread of its own; what it gives stops that."""
    stops: list[Callable[[], None]] = []

    def start() -> Callable[[], None]:
        stopping = threading.Event()
        trackers: Trackers = server.app.state.gateway.trackers
        bus = Bus(server.settings.redis_url, deadline=5)
        thread = threading.Thread(target=trackers.keep, args=(bus, stopping))
        thread.start()

        def stop() -> None:
            stopping.set()
            thread.join(30)
            assert not thread.is_alive()
            bus.close()

        stops.append(stop)
        return stop

    yield start
    for stop in stops:
        stop()


def begun(server: Server, **tracked: Any) -> str:
    """A job that has begun and has trackers."""
    job = server.submit(tracking=tracked)
    server.settings.job_dir(job).mkdir(parents=True)
    server.set_state(job, "running")
    return job


def views(server: Server, job: str) -> dict[str, dict[str, Any]]:
    found = server.http.get(f"/v1/jobs/{job}/tracking").json()["items"]
    return {view["tracker"]: view for view in found}


def test_each_update_is_in_the_files_and_the_key_is_not(
    server: Server, keeping: Callable[[], Callable[[], None]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_API_KEY", SECRET)
    job = begun(server, **BOTH)
    folder = server.settings.job_dir(job)
    stop = keeping()
    for update in (1, 2):
        server.bus.append(METRICS.at(job), metrics(update))
    wait_until(
        lambda: [v["update"] for v in views(server, job).values()] == [2, 2],
        120,
        "two updates that were told",
    )
    assert {v["state"] for v in views(server, job).values()} == {"following"}
    stop()  # the gateway goes, and another one comes
    wait_until(lambda: not server.app.state.gateway.trackers.busy(), 60, "trackers that end with the gateway")
    keeping()
    server.bus.append(METRICS.at(job), metrics(3, reward=None, loss=float("nan")))
    server.set_state(job, "succeeded")
    wait_until(
        lambda: {v["state"] for v in views(server, job).values()} == {"done"}, 120, "all that was told"
    )

    one = metrics(2)
    points = scalars_in(folder / "tensorboard")
    assert {step for _, step in points} == {1, 2, 3}
    assert points["train/reward", 2] == pytest.approx(one.reward)
    assert points["train/lag_max", 2] == one.lag_max
    assert ("train/reward", 3) not in points, "what was not scored has no reward"
    assert points["train/loss", 3] != points["train/loss", 3], "a loss that is no number is shown as such"

    runs = sorted(folder.glob("tracking/wandb/offline-run-*/*.wandb"))
    assert len(runs) == 2
    logged = {key: value for path in runs for key, value in history_of(path).items()}
    assert {step for name, step in logged if name == "train/gap_mean"} == {1, 2, 3}
    assert logged["train/reward", 2] == pytest.approx(one.reward)
    run = next(r.run for r in wandb_records(runs[0]) if r.WhichOneof("record_type") == "run")
    assert (run.project, run.run_id, run.display_name) == ("p", job, SPEC["name"])

    written = [path for path in folder.rglob("*") if path.is_file()]
    assert any(path.name == "tracking-wandb.log" for path in written)
    assert [path for path in written if SECRET.encode() in path.read_bytes()] == []


def test_a_tracker_that_fails_is_told_and_tried_again(
    server: Server, keeping: Callable[[], Callable[[], None]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.delenv("WANDB_MODE", raising=False)
    monkeypatch.setattr(tracking, "AGAIN", (0.1,))
    job = begun(server, tensorboard=True, wandb={"project": "p"})
    folder = server.settings.job_dir(job)
    (folder / "tensorboard").write_text("in the way")
    keeping()
    server.bus.append(METRICS.at(job), metrics(1))
    wait_until(
        lambda: all(v["failures"] >= 2 for v in views(server, job).values()), 120, "trackers that fail twice"
    )
    told = views(server, job)
    assert {v["state"] for v in told.values()} == {"failing"}
    assert "WANDB_API_KEY is not set" in told["wandb"]["reason"]
    assert "File exists" in told["tensorboard"]["reason"]
    assert server.http.get(f"/v1/jobs/{job}").json()["state"] == "running"
    (folder / "tensorboard").unlink()
    wait_until(lambda: views(server, job)["tensorboard"]["update"] == 1, 120, "the update that was missed")
    wait_until(lambda: views(server, job)["tensorboard"]["reason"] == "", 60, "a tracker that works again")
    assert ("train/reward", 1) in scalars_in(folder / "tensorboard")


def test_a_tracker_without_its_library_is_refused_at_submit(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = JobSpec.model_validate({**SPEC, "tracking": {"wandb": {"project": "p"}}}, strict=False)
    assert missing_extras(spec) == []
    monkeypatch.setattr(tracking, "EXTRAS", {"wandb": "no_such_module", "tensorboard": "no_such_module"})
    (found,) = missing_extras(spec)
    assert (found.path, found.hint) == ("tracking.wandb", "pip install 'syncline[wandb]'")


def test_a_spec_holds_no_secret(server: Server) -> None:
    for key in ("api_key", "key", "token"):
        answer = server.http.post(
            "/v1/jobs", json={**SPEC, "tracking": {"wandb": {"project": "p", key: SECRET}}}
        )
        assert answer.status_code == 422
        assert SECRET not in answer.text


def test_a_job_without_trackers_has_none(server: Server) -> None:
    assert views(server, server.submit()) == {}


def test_a_job_that_cannot_be_read_keeps_no_tracker_from_another(
    server: Server, keeping: Callable[[], Callable[[], None]]
) -> None:
    damaged, job = begun(server, tensorboard=True), begun(server, tensorboard=True)
    server.bus.hset(JOB.at(damaged), "spec", "{no")
    try:
        stop = keeping()
        server.bus.append(METRICS.at(job), metrics(1))
        wait_until(lambda: views(server, job)["tensorboard"]["update"] == 1, 120, "an update that was told")
        stop()
    finally:
        server.bus.delete(JOB.at(damaged))
