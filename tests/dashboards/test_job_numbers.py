"""The jobs' numbers: equal to the records, the same from any gateway, bounded, and never in the way."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from left_behind import metrics
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from serving import SPEC, Server

from syncline.contract.diagnosis import Diagnostics, Tail
from syncline.contract.events import Heartbeat, Phase, WorkerStatus
from syncline.contract.pulled import Pulled
from syncline.contract.streams import (
    CELERY,
    COUNTS,
    DIAGNOSTICS,
    GROUPS,
    HEARTBEAT,
    JOB,
    JOBS,
    METRICS,
    PHASES,
    VERSIONS,
    WORKERS,
    Key,
)
from syncline.contract.version_path import VersionId, VersionRecord, WorkerPath
from syncline.gateway import metrics as scrape
from syncline.gateway import metrics_names as names
from syncline.gateway.metrics_jobs import MOST_JOBS, RECENT, choose
from syncline.gateway.metrics_sheet import Sheet, Tally
from syncline.runtime.bus import Bus, pack
from syncline.runtime.errands import QUEUE
from syncline.runtime.settings import Settings

Said = dict[tuple[str, tuple[tuple[str, str], ...]], float]


@pytest.fixture
def settings(redis_url: str, tmp_path: Path) -> Settings:
    """A database of its own, so that no other suite's jobs are told."""
    models = tmp_path / "models" / "tiny"
    models.mkdir(parents=True)
    (models / "config.json").write_text("{}")
    return Settings.read(
        {
            "SYNCLINE_REDIS_URL": f"{redis_url}?db=9",
            "SYNCLINE_MODELS": str(tmp_path / "models"),
            "SYNCLINE_RUNS": str(tmp_path / "runs"),
        }
    )


@pytest.fixture
def server(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setattr(scrape, "FRESH", -1.0)
    bus = Bus(settings.redis_url, deadline=2)
    bus.call("FLUSHDB")
    found = Server(settings, bus)
    yield found
    found.stop()
    bus.call("FLUSHDB")
    bus.close()


def parsed(text: str) -> Said:
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def scraped(server: Server) -> Said:
    answer = server.http.get("/metrics")
    assert answer.status_code == 200
    return parsed(answer.text)


def value(said: Said, name: str, **labels: str) -> float:
    return said[f"syncline_{name}", tuple(sorted(labels.items()))]


def started(server: Server, **changes: Any) -> str:
    job = server.submit(**changes)
    server.set_state(job, "running")
    return job


def order(server: Server, job: str, phase: str, **more: str) -> None:
    told = {"rollout": "awake", "trainer": "asleep", "gate": "open"} | more
    server.bus.append(
        PHASES.at(job),
        Phase(seq=1, mode="colocated", phase=phase, update=0, at=0.0, **told),  # type: ignore[arg-type]
    )


def status(name: str, **changes: Any) -> WorkerStatus:
    told: dict[str, Any] = {
        "worker": name,
        "incarnation": "i",
        "state": "serving",
        "version": VersionId(0, 2),
        "digest": "d",
        "staged": None,
        "running": 3,
        "waiting": 2,
        "tokens": 500,
        "tokens_per_second": 40.5,
        "device": "cpu",
        "resident": 1000,
        "why": "",
        "at": 0.0,
        "busy": 12.5,
    }
    return WorkerStatus(**told | changes)


def version(server: Server, job: str, number: int, state: str, minted: float, **more: Any) -> None:
    record = VersionRecord(
        version=VersionId(0, number),
        parent=None,
        optimizer_step=number,
        contract="c",
        state=state,  # type: ignore[arg-type]
        minted=minted,
        nbytes=100,
        new_bytes=60,
        **more,
    )
    server.bus.hset(VERSIONS.at(job), str(record.version), msgspec.json.encode(record))


# ---- equal to the records -----------------------------------------------------------------------------------
def test_updates_add_up(server: Server) -> None:
    job = started(server, schedule={"max_lag": 3, "updates": 9})
    for update, counts in ((1, {"0": 4}), (2, {"0": 1, "2": 3})):
        told = metrics(update, loss=0.5 * update, lag_counts=counts, tokens=10, masked_tokens=2, seconds=0.3)
        server.bus.append(METRICS.at(job), msgspec.structs.replace(told, expired=1, unscored=1, reward=0.25))
    said = scraped(server)
    assert value(said, "updates_total", job_id=job) == 2
    assert value(said, "update", job_id=job) == 2
    assert value(said, "updates_wanted", job_id=job) == 9
    assert value(said, "trained_tokens_total", job_id=job) == 20
    assert value(said, "loss", job_id=job) == 1.0
    assert value(said, "reward", job_id=job) == 0.25
    assert value(said, "tokens_cut_total", job_id=job, why="masked") == 4
    assert value(said, "groups_over_lag_total", job_id=job) == 2
    assert value(said, "unscored_trajectories_total", job_id=job) == 2
    assert value(said, "lag_bucket", job_id=job, le="0.0") == 5
    assert value(said, "lag_bucket", job_id=job, le="1.0") == 5
    assert value(said, "lag_bucket", job_id=job, le="2.0") == 8
    assert value(said, "lag_bucket", job_id=job, le="+Inf") == value(said, "lag_count", job_id=job) == 8
    assert value(said, "lag_sum", job_id=job) == 6
    assert value(said, "lag_bound", job_id=job) == 3
    assert value(said, "update_seconds_sum", job_id=job) == pytest.approx(0.6)
    server.bus.append(METRICS.at(job), metrics(3, loss=float("nan")))
    assert value(scraped(server), "updates_total", job_id=job) == 3


def test_another_gateway_says_the_same_sums(server: Server, settings: Settings) -> None:
    job = started(server)
    for update in range(1, 4):
        server.bus.append(METRICS.at(job), metrics(update, loss=1.0))
    version(server, job, 1, "retired", 100.0, converted=101.0)
    old = scraped(server)
    version(server, job, 2, "published", 200.0, converted=200.5)
    server.bus.append(METRICS.at(job), metrics(4, loss=1.0))
    registry = CollectorRegistry()
    registry.register(scrape.JobNumbers(settings, server.bus))
    fresh, now = parsed(generate_latest(registry).decode()), scraped(server)
    for name, labels in [("updates_total", {}), ("version_seconds_count", {"stage": "converted"})]:
        assert value(fresh, name, job_id=job, **labels) == value(now, name, job_id=job, **labels)
        assert value(now, name, job_id=job, **labels) == value(old, name, job_id=job, **labels) + 1


def test_time_in_phases_is_the_redis_server_s(server: Server) -> None:
    job = started(server, rollout={"workers": 2})
    key = PHASES.at(job)
    order(server, job, "sample")
    first = int(server.bus.last_id(key).partition("-")[0])
    for seconds, phase, more in (
        (10, "train", {"rollout": "asleep", "trainer": "awake", "gate": "shut"}),
        (14, "done", {"rollout": "asleep", "trainer": "asleep"}),
    ):
        order(server, job, phase, **more)
        entry = server.bus.newest(key, 1)[0]
        server.bus.delete_entries(key, [entry.id])
        server.bus.call("XADD", key, f"{first + 1000 * seconds}-0", "m", entry.fields[b"m"])
    said = scraped(server)
    assert value(said, "phase_seconds_total", job_id=job, mode="colocated", phase="sample") == 10
    assert value(said, "phase_seconds_total", job_id=job, mode="colocated", phase="train") == 4
    assert value(said, "phases_total", job_id=job, mode="colocated", phase="done") == 1
    assert value(said, "awake_seconds_total", job_id=job, side="rollout") == 20, "two workers"
    assert value(said, "awake_seconds_total", job_id=job, side="trainer") == 4
    assert ("syncline_phase_seconds_total", "done") not in {(n, dict(at).get("phase")) for n, at in said}


def test_a_phase_goes_on_while_it_lasts(server: Server) -> None:
    job = started(server)
    order(server, job, "sample")
    labels = {"job_id": job, "mode": "colocated", "phase": "sample"}
    first = value(scraped(server), "phase_seconds_total", **labels)
    assert value(scraped(server), "phase_seconds_total", **labels) > first
    server.set_state(job, "failed")
    server.bus.hset(JOB.at(job), "ended", repr(time.time()))
    last = value(scraped(server), "phase_seconds_total", **labels)
    assert last > first
    assert value(scraped(server), "phase_seconds_total", **labels) == last


def test_versions_and_workers(server: Server) -> None:
    job = started(server, rollout={"workers": 2})
    now = time.time()
    pulled = Pulled(kind="http", seconds=0.25, full=40, deltas=10, held=50)
    path = WorkerPath(staged=now - 58, verified=now - 57, active=now - 56, pause_ms=20.0, pulled=pulled)
    version(server, job, 1, "retired", now - 100, converted=now - 99, workers={"w0": path})
    version(
        server,
        job,
        2,
        "active",
        now - 60,
        converted=now - 59,
        published=now - 59,
        active=now - 56,
        workers={"w0": path},
    )
    version(server, job, 3, "published", now - 20, published=now - 19)
    server.bus.hset(WORKERS.at(job), "w0", pack(status("w0")))
    server.bus.hset(WORKERS.at(job), "w1", pack(status("w1", version=None, state="empty", busy=0.0)))
    said = scraped(server)
    assert [value(said, "version", job_id=job, at=at) for at in ("minted", "published", "active")] == [
        3,
        3,
        2,
    ]
    assert value(said, "worker_version", job_id=job, worker="w0") == 2
    assert value(said, "worker_versions_behind", job_id=job, worker="w0") == 1
    assert value(said, "version_age_seconds", job_id=job, worker="w0") == pytest.approx(60, abs=5)
    assert value(said, "version_reached_seconds", job_id=job, worker="w0", stage="active") == pytest.approx(
        4, abs=0.1
    )
    assert value(said, "version_seconds_count", job_id=job, stage="converted") == 2
    assert value(said, "sync_pause_seconds_sum", job_id=job) == pytest.approx(0.04)
    assert value(said, "pull_seconds_count", job_id=job) == 2
    bytes_ = {
        kind: value(said, "sync_bytes_total", job_id=job, kind=kind)
        for kind in ("whole", "new", "full", "deltas", "held")
    }
    assert bytes_ == {"whole": 300, "new": 180, "full": 80, "deltas": 20, "held": 100}
    assert value(said, "worker_state", job_id=job, worker="w1", state="empty") == 1
    assert value(said, "worker_requests", job_id=job, worker="w0", state="waiting") == 2
    assert value(said, "busy_seconds_total", job_id=job, side="rollout", worker="w0") == 12.5
    assert ("syncline_worker_version", (("job_id", job), ("worker", "w1"))) not in said
    server.set_state(job, "succeeded")
    server.bus.hset(JOB.at(job), "ended", repr(time.time()))
    ended = scraped(server)
    assert value(ended, "sampled_tokens_total", job_id=job, worker="w0") == 500, "counters stand"
    gone = {name for name, labels in ended if dict(labels).get("worker")}
    assert gone == {"syncline_busy_seconds_total", "syncline_sampled_tokens_total"}, (
        "and what is no more so does not"
    )


def test_a_worker_may_serve_a_version_that_is_retired(server: Server) -> None:
    job, now = started(server), time.time()
    version(
        server, job, 2, "retired", now - 60, published=now - 59, workers={"w0": WorkerPath(active=now - 50)}
    )
    version(server, job, 3, "published", now - 20, published=now - 19)
    server.bus.hset(WORKERS.at(job), "w0", pack(status("w0")))
    said = scraped(server)
    assert value(said, "worker_version", job_id=job, worker="w0") == 2
    assert value(said, "version_age_seconds", job_id=job, worker="w0") == pytest.approx(60, abs=5)
    assert value(said, "version_reached_seconds", job_id=job, worker="w0", stage="active") == pytest.approx(
        10, abs=0.1
    )


def test_what_a_version_changed_is_told_of_the_newest_that_was_compared(server: Server) -> None:
    """A comparison ends after publication, and may end after the version itself has."""
    job, now = started(server), time.time()

    def told() -> float | None:
        return scraped(server).get(("syncline_version_changed_share", (("job_id", job),)))

    version(server, job, 1, "active", now - 30, published=now - 29)
    assert told() is None
    version(server, job, 1, "active", now - 30, published=now - 29, changed_share=0.25)
    version(server, job, 2, "failed", now - 10, published=now - 9)
    assert told() == 0.25, "version 2 is not compared yet"
    version(server, job, 2, "failed", now - 10, published=now - 9, changed_share=0.5)
    assert told() == 0.5
    version(server, job, 3, "published", now - 5, published=now - 4)
    assert told() == 0.5
    assert value(scraped(server), "versions_failed_total", job_id=job) == 1, "counted once"


def test_queues_credits_and_drops(server: Server) -> None:
    job = started(server, batch={"groups": 3, "group_size": 2}, schedule={"max_lag": 1})
    server.bus.hset(COUNTS.at(job), {"submitted": 9, "trained": 4, "running": 5, "fenced": 2, "oldest:3": 1})
    server.bus.hset(GROUPS.at(job), {"1": b"x", "2": b"y"})
    source = {
        "name": "s", "epoch": 0, "drawn": 9, "again": 0, "open": 2, "trained": 2, "filtered": {"all 0": 3, "all 1": 1},
        "failed": 1, "expired": 0, "unused": 0, "given_up": 0, "rested": 0, "reward": None, "recent_reward": None,
    }  # fmt: skip
    server.bus.hset(
        JOB.at(job), "prompts", msgspec.json.encode({"sources": [source, {**source, "name": "t"}]})
    )
    server.bus.call("LPUSH", CELERY.at(QUEUE), "one", "two")
    said = scraped(server)
    assert value(said, "trajectories", job_id=job, state="running") == 5
    assert value(said, "queue_depth", job_id=job, queue="open") == 2
    assert value(said, "credits", job_id=job) == 4, "(1 + 1) x 3 - 2"
    assert value(said, "groups_dropped_total", job_id=job, how="filtered", why="all 0") == 6
    assert value(said, "groups_dropped_total", job_id=job, how="failed", why="") == 2
    assert value(said, "ledger_calls_total", job_id=job, what="fenced") == 2
    assert value(said, "errands_queued") == 2
    assert scrape.QUEUE == QUEUE


def test_terms_by_lag_and_what_is_not_measured(server: Server) -> None:
    job = started(server)
    tail = Tail(count=5, mean=0.1, median=0.05, p99=0.4, max=0.5, signed=0.0)
    none = Tail(count=0, mean=0.0, median=0.0, p99=0.0, max=0.0, signed=0.0)
    many = {str(lag): msgspec.structs.replace(tail, mean=lag / 100) for lag in range(100)}
    server.bus.append(
        DIAGNOSTICS.at(job),
        Diagnostics(
            update=1, version=VersionId(0, 1), contract="c", trajectories=2, tokens=5, alarms=("mismatch",),
            terms={"total": tail, "kv_cache": none}, unmeasured={"routes": "the model does not route"},
            tails_by_lag={"staleness": many}, baseline=0.01,
        ),
    )  # fmt: skip
    said = scraped(server)
    assert value(said, "mismatch", job_id=job, term="total", quantile="0.99") == 0.4
    assert value(said, "mismatch_mean", job_id=job, term="total") == 0.1
    assert ("kv_cache", "0.5") not in {(dict(at).get("term"), dict(at).get("quantile")) for _, at in said}
    assert value(said, "mismatch_by_lag_mean", job_id=job, term="staleness", lag="7") == 0.07
    lags = {dict(at)["lag"] for name, at in said if name == "syncline_mismatch_by_lag_mean"}
    assert lags == {str(lag) for lag in range(names.MOST_VALUES)}
    assert value(said, "mismatch_unmeasured", job_id=job, term="routes") == 1
    assert value(said, "mismatch_alarms_total", job_id=job) == 1
    assert value(said, "mismatch_baseline", job_id=job) == 0.01


def test_processes_tell_of_their_spans(server: Server) -> None:
    job = started(server)
    beat = Heartbeat(
        service="trainer", name="trainer", incarnation="i", pid=1, port=None, ready=True, why="", at=0.0,
        spans=70, missing={"store": 3, "links": 0},
    )  # fmt: skip
    server.bus.set(HEARTBEAT.at(f"{job}/trainer/trainer"), pack(beat), ttl=60)
    said = scraped(server)
    who = {"job_id": job, "service": "trainer", "process": "trainer"}
    assert value(said, "process_up", **who) == value(said, "process_ready", **who) == 1
    assert value(said, "spans_total", **who) == 70
    assert value(said, "spans_missing", **who, why="store") == 3
    assert value(said, "process_up", job_id=job, service="sync", process="sync") == 0


# ---- bounded ------------------------------------------------------------------------------------------------
def test_jobs_shown_are_few_whatever_there_is() -> None:
    now = 10_000.0
    running = [(f"j{n}", "running", None) for n in range(40)]
    fresh = [(f"e{n}", "failed", now - 10) for n in range(40)]
    old = [(f"o{n}", "succeeded", now - RECENT - 1) for n in range(1000)]
    found = choose([*fresh, *old, *running, ("gone", "", None)], now)
    assert found.jobs == tuple(job for job, _, _ in [*running, *fresh])[:MOST_JOBS]
    assert found.left_out == 80 - MOST_JOBS
    assert found.states == {"running": 40, "failed": 40, "succeeded": 1000}
    assert choose([], now) == choose([("gone", "", None)], now)


def test_an_ended_job_s_numbers_end(server: Server) -> None:
    job = started(server)
    server.set_state(job, "succeeded")
    server.bus.hset(JOB.at(job), "ended", repr(time.time() - RECENT + 60))
    assert value(scraped(server), "updates_total", job_id=job) == 0
    server.bus.hset(JOB.at(job), "ended", repr(time.time() - RECENT - 1))
    said = scraped(server)
    assert not any(dict(labels).get("job_id") == job for _, labels in said)
    assert value(said, "jobs", state="succeeded") == 1


def test_labels_are_those_of_the_table(server: Server) -> None:
    job = started(server)
    order(server, job, "sample")
    server.bus.append(METRICS.at(job), metrics(1, loss=1.0))
    known = {metric.name: set(metric.labels) for metric in names.METRICS}
    ends = ("_total", "_bucket", "_sum", "_count")
    for name, labels in scraped(server):
        base = next((name.removesuffix(end) for end in ends if name.removesuffix(end) in known), name)
        if base in known:
            assert {label for label, _ in labels} - {"le"} == known[base], name
    with pytest.raises(ValueError, match=r"is a gauge with labels \('job_id',\)"):
        Sheet().say(names.REWARD, 1.0, "j1", "more")
    with pytest.raises(ValueError, match="has labels"):
        Sheet().tally(Tally(names.LAG))


# ---- never in the way ---------------------------------------------------------------------------------------
def test_a_record_that_cannot_be_read_costs_its_own_job_alone(server: Server) -> None:
    bad, good = started(server), started(server)
    server.bus.append(METRICS.at(bad), {b"m": b"\xc1"})
    said = scraped(server)
    assert value(said, "updates_total", job_id=good) == 0
    assert ("syncline_updates_total", (("job_id", bad),)) not in said
    server.bus.hset(WORKERS.at(good), "w0", b"\xc1")
    assert not any(name == "syncline_updates_total" for name, _ in scraped(server))


@pytest.mark.parametrize(("key", "field"), [(JOB, "violations"), (COUNTS, "running")])
def test_a_count_that_is_none_costs_its_own_job_alone(server: Server, key: Key, field: str) -> None:
    bad, good = started(server), started(server)
    server.bus.hset(key.at(bad), field, b"many")
    said = scraped(server)
    assert value(said, "updates_total", job_id=good) == 0
    assert ("syncline_updates_total", (("job_id", bad),)) not in said


def test_without_redis_the_gateway_s_own_numbers_are_left(settings: Settings) -> None:
    away = msgspec.structs.replace(settings, redis_url="redis://127.0.0.1:1/0")
    server = Server(away, Bus(away.redis_url, deadline=0.1))
    said = scraped(server)
    assert value(said, "redis_up") == 0
    assert any(name == "process_cpu_seconds_total" for name, _ in said)
    assert {name for name, _ in said if name.startswith("syncline_")} <= {
        "syncline_redis_up", "syncline_gateway_event_streams",
        "syncline_gateway_requests_total", "syncline_gateway_seconds_bucket",
        "syncline_gateway_seconds_count", "syncline_gateway_seconds_sum",
    }  # fmt: skip
    server.stop()
    server.bus.close()


def test_a_scrape_reads_what_is_new_alone(server: Server, settings: Settings) -> None:
    """3,000 settled versions and 3,000 updates are read once; the next scrape asks for none of them."""
    job = started(server)
    record = VersionRecord(
        version=VersionId(0, 0), parent=None, optimizer_step=0, contract="c", state="retired", minted=1.0
    )
    told = {
        f"0.{n}": msgspec.json.encode(msgspec.structs.replace(record, version=VersionId(0, n)))
        for n in range(3000)
    }
    server.bus.hset(VERSIONS.at(job), told)
    row = pack(metrics(1, loss=1.0))
    server.bus.many([("XADD", METRICS.at(job), "*", "m", row)] * 3000)
    numbers = scrape.JobNumbers(settings, server.bus)
    registry = CollectorRegistry()
    registry.register(numbers)
    before = _reads(server.bus)
    assert value(parsed(generate_latest(registry).decode()), "updates_total", job_id=job) == 3000
    first, before = _reads(server.bus) - before, _reads(server.bus)
    generate_latest(registry)
    again = _reads(server.bus) - before
    assert again < first / 20


def _reads(bus: Bus) -> int:
    """Bytes that Redis has sent so far."""
    lines = bus.call("INFO", "stats").decode().splitlines()
    return int(next(line for line in lines if line.startswith("total_net_output_bytes:")).partition(":")[2])


def test_many_scrapes_at_once_cost_one(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    started(server)
    monkeypatch.setattr(scrape, "FRESH", 60.0)
    first = scraped(server)
    job = started(server)
    assert not any(dict(labels).get("job_id") == job for _, labels in scraped(server))
    assert value(first, "redis_up") == 1
    assert server.bus.zcard(JOBS.at()) == 2
    assert SPEC["name"] == "run"
