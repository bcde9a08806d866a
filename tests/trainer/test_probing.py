"""A trainer asks for same-version scores, never waits for them, and says of each term what it is or why it is not."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from trainer_records import trajectory
from waiting import wait_until
from world import InProcess, Killed, World, spec_of

from syncline.contract import events
from syncline.contract.diagnosis import TERMS, Diagnostics, Probe, Probed
from syncline.contract.streams import DIAGNOSTICS, PROBED, PROBES
from syncline.contract.version_path import VersionId
from syncline.runtime import segments
from syncline.runtime.bus import unpack
from syncline.runtime.segment_probes import probes_path, read_probes
from syncline.trainer.choosing import choose

SECONDS = 60.0
OFF = 0.25  # by how much the played rollout differs from the played sampler


def probes(world: World) -> list[Probe]:
    return [unpack(entry, Probe) for entry in world.bus.range(PROBES.at(world.job))]


def records(world: World) -> list[Diagnostics]:
    return [unpack(entry, Diagnostics) for entry in world.bus.range(DIAGNOSTICS.at(world.job))]


def asked(world: World, update: int, count: int) -> list[Probe]:
    def of_update() -> list[Probe]:
        found = [probe for probe in probes(world) if probe.update == update]
        return found if len(found) >= count else []

    return wait_until(of_update, SECONDS, f"{count} probes of update {update}")


def reply(world: World, probe: Probe, made: list[Any], by: float = -OFF, **more: Any) -> None:
    """Score as sampled, `by` apart on each token."""
    t = next(t for t in made if t.trajectory == probe.trajectory)
    answer: dict[str, Any] = {"logprobs": tuple(p + by for p in t.logprobs)}
    answer |= more
    world.bus.append(
        PROBED.at(world.job),
        Probed(
            update=probe.update,
            version=probe.version,
            trajectory=probe.trajectory,
            worker=probe.worker,
            **answer,
        ),
    )


def recorded(world: World, count: int) -> list[Diagnostics]:
    wait_until(lambda: len(records(world)) >= count, SECONDS, f"{count} diagnostics")
    return records(world)


def flow(redis_url: str, job: str, tmp_path: Path, **parts: Any) -> tuple[World, InProcess]:
    world = World(redis_url, job, tmp_path, spec_of(**parts))
    world.order("flow", "awake")
    trainer = InProcess(world)
    world.await_version(VersionId(0, 0))
    return world, trainer


def test_each_term_of_an_answered_update(redis_url: str, job: str, tmp_path: Path) -> None:
    world, trainer = flow(redis_url, job, tmp_path, diagnostics={"trajectories": 3})
    made = world.feed(2)
    found = asked(world, 1, 3)
    assert len(probes(world)) == 3
    for probe in found:
        t = next(t for t in made if t.trajectory == probe.trajectory)
        assert (probe.version, probe.worker, probe.temperature) == (VersionId(0, 0), "w0", 1.0)
        assert probe.tokens == tuple(t.tokens)
        assert [probe.tokens[p] for p in probe.positions] == t.sampled_ids().tolist()
        assert not probe.experts, "tiny-dense does not route"
        reply(world, probe, made)
    (record,) = recorded(world, 1)
    trainer.stop()
    tokens = sum(len(p.positions) for p in found)
    assert (record.update, record.version, record.trajectories, record.tokens) == (
        1,
        VersionId(0, 0),
        3,
        tokens,
    )
    assert record.contract == world.spec.contract_digest()
    staleness = record.terms["staleness"]
    assert staleness.count == tokens
    assert staleness.mean == pytest.approx(OFF)
    assert staleness.signed == pytest.approx(-OFF)
    assert record.terms["noise_staleness"] == record.terms["noise_decode"] == staleness
    assert record.by_lag["staleness"] == {"0": pytest.approx(OFF)}
    assert record.first_of_span["staleness"] == pytest.approx(OFF)
    assert set(record.kl) == {"k1", "k2", "k3"}
    assert record.exact == 0.0
    assert record.clip_fraction is not None
    assert record.effective_sample_size is not None
    assert set(record.unmeasured) == {"kv_cache", "routes", "truncated", "reference_kl"}
    assert all(record.unmeasured.values())

    rows = read_probes(probes_path(world.folder / "segments", 1))
    assert len(rows) == tokens
    scores = {r.trajectory: r for r in segments.read_scores(
        segments.scores_path(world.folder / "segments", 1)).rows}  # fmt: skip
    for row in rows:
        assert row.total == pytest.approx(row.mismatch + row.staleness, abs=1e-6)
        assert row.trainer == scores[row.trajectory].logprobs[row.token]
        assert row.total == pytest.approx(scores[row.trajectory].gap[row.token], abs=1e-6)
    assert {row.first_of_span for row in rows if row.token == 0} == {True}
    one = read_probes(probes_path(world.folder / "segments", 1), rows[0].trajectory)
    assert [r for r in rows if r.trajectory == rows[0].trajectory] == one
    assert segments.updates(world.folder / "segments") == [1], "the table is no segment"


def test_nobody_waits_for_an_answer_and_what_is_missing_says_why(
    redis_url: str, job: str, tmp_path: Path
) -> None:
    world, trainer = flow(redis_url, job, tmp_path, diagnostics={"trajectories": 2})
    made = world.feed(2)
    world.await_version(VersionId(0, 1))  # without any answer
    first = asked(world, 1, 2)
    reply(world, first[0], made)
    stray = Probed(update=9, version=VersionId(0, 8), trajectory=first[1].trajectory, worker="w0", missed="?")
    world.bus.append(PROBED.at(job), stray)
    made = world.feed(2, 1)
    for probe in asked(world, 2, 2):
        reply(world, probe, made, logprobs=(), missed="serves 0.2 already")
    record, missed = recorded(world, 2)
    trainer.stop()
    assert record.trajectories == 1
    assert record.unmeasured["answers"] == (
        "1 of 2 probes without a score: w0 gave no answer before update 2 was claimed"
    )
    assert record.terms["mismatch"].count == len(first[0].positions)
    assert missed.terms == {}
    assert set(TERMS) <= missed.unmeasured.keys()
    assert "w0 serves 0.2 already (2 times)" in missed.unmeasured["mismatch"]
    assert not probes_path(world.folder / "segments", 2).exists()


def test_decode_against_prefill_is_measured_also_where_every_token_is_older(
    redis_url: str, job: str, tmp_path: Path
) -> None:
    world, trainer = flow(redis_url, job, tmp_path, diagnostics={"trajectories": 1})
    first = world.begin(2, 0)
    world.feed(2, 0)
    world.await_version(VersionId(0, 1))
    made = [t for group in first for t in world.publish(group, (0,))]
    (probe,) = asked(world, 2, 1)
    for decode in ((-1.0, -2.0), (-1.0,), (-1.0, float("nan"))):
        noise = Probed(
            update=1,
            version=VersionId(0, 0),
            trajectory="any",
            worker="w1",
            logprobs=(-1.5, -2.25),
            decode=decode,
        )
        world.bus.append(PROBED.at(job), noise)
    reply(world, probe, made)
    record = recorded(world, 2)[-1]
    trainer.stop()
    assert record.by_lag["staleness"].keys() == {"1"}
    assert "noise_staleness" in record.unmeasured
    noise_tail = record.terms["noise_decode"]
    assert noise_tail.count == 2, "what does not fit is left out"
    assert noise_tail.mean == pytest.approx(0.375)


def test_reference_kl_and_truncation_are_there_for_a_job_that_has_them(
    redis_url: str, job: str, tmp_path: Path
) -> None:
    loss = {"kl": {"coefficient": 0.1, "estimator": "k3"}, "correction": {"kind": "truncate", "high": 1.01}}
    world, trainer = flow(redis_url, job, tmp_path, loss=loss, diagnostics={"trajectories": 1})
    for version in range(2):
        made = world.feed(2, version)
        for probe in asked(world, version + 1, 1):
            reply(world, probe, made)
        world.await_version(VersionId(0, version + 1))
    first, second = recorded(world, 2)
    trainer.stop()
    assert first.reference_kl == {"k1": 0.0, "k2": 0.0, "k3": 0.0}, "nothing has been trained yet"
    assert second.reference_kl["k2"] > 0
    assert second.reference_kl["k3"] == pytest.approx(world.metrics()[1].kl)
    assert second.truncated is not None
    assert 0 < second.truncated <= 1, "the played log-probs are far from the trainer's"
    assert not {"reference_kl", "truncated"} & second.unmeasured.keys()


def test_answers_that_do_not_fit_are_told_and_not_used(redis_url: str, job: str, tmp_path: Path) -> None:
    world, trainer = flow(redis_url, job, tmp_path, diagnostics={"trajectories": 2})
    made = world.feed(2)
    short, good = asked(world, 1, 2)
    reply(world, short, made, logprobs=(-1.0,))
    reply(world, good, made)
    (record,) = recorded(world, 1)
    trainer.stop()
    assert record.trajectories == 1
    assert record.unmeasured["answers"].startswith(f"{short.trajectory}: log-probs of")
    assert {row.trajectory for row in read_probes(probes_path(world.folder / "segments", 1))} == {
        good.trajectory
    }


def test_older_tokens_and_a_narrow_kv_cache_have_their_own_terms(
    redis_url: str, job: str, tmp_path: Path
) -> None:
    spec = {"schedule": {"updates": 9, "max_lag": 2}, "diagnostics": {"trajectories": 4}}
    world, trainer = flow(redis_url, job, tmp_path, **spec)
    (mixed,) = world.begin(1, 0)
    for version in range(2):
        made = world.feed(2, version)
        for probe in asked(world, version + 1, 4):
            reply(world, probe, made)
        world.await_version(VersionId(0, version + 1))
    made = world.publish(mixed, versions=(0, 2), sampled=10)
    made += world.feed(1, 2)
    for probe in asked(world, 3, 4):
        t = next(t for t in made if t.trajectory == probe.trajectory)
        wide = tuple(p - OFF - 0.125 for p in t.logprobs)
        reply(world, probe, made, wide_kv=wide)
    record = recorded(world, 3)[-1]
    trainer.stop()
    assert set(record.by_lag["staleness"]) == {"0", "2"}
    tails = record.tails_by_lag["staleness"]
    assert {lag: tail.mean for lag, tail in tails.items()} == record.by_lag["staleness"]
    assert sum(tail.count for tail in tails.values()) == record.terms["staleness"].count
    assert max(tail.max for tail in tails.values()) == record.terms["staleness"].max
    assert record.terms["kv_cache"].mean == pytest.approx(0.125)
    own = [r for r in read_probes(probes_path(world.folder / "segments", 3)) if r.lag == 0]
    assert record.terms["noise_staleness"].count == len(own) < record.tokens
    firsts = [r for r in read_probes(probes_path(world.folder / "segments", 3)) if r.first_of_span]
    assert len(firsts) == 2 * 2 + 2


def test_routes_of_both_sides_are_compared_layer_by_layer(redis_url: str, job: str, tmp_path: Path) -> None:
    world, trainer = flow(
        redis_url, job, tmp_path, model={"name": "tiny-moe"}, diagnostics={"trajectories": 1}
    )
    made = world.feed(2)
    (probe,) = asked(world, 1, 1)
    assert probe.experts
    shape = (len(probe.tokens) - 1, *_routing(world))
    ids = bytes(range(shape[2])) * (shape[0] * shape[1])
    reply(world, probe, made, experts=ids, experts_shape=shape)
    (record,) = recorded(world, 1)
    trainer.stop()
    assert len(record.routes) == shape[1]
    assert all(0 <= share < 1 for share in record.routes), "made-up ids are not what a router chooses"
    assert sum(record.diverging.values()) == probe.positions[-1]
    assert "routes" not in record.unmeasured


def _routing(world: World) -> tuple[int, int]:
    from syncline.reference.model import empty_model, model_folder
    from syncline.reference.routes import RouteTap

    tap = RouteTap(empty_model(model_folder(world.settings.models, world.spec.model.name)))
    return tap.layers, tap.topk


def test_a_drift_against_the_learned_baseline_raises_an_alarm(
    redis_url: str, job: str, tmp_path: Path
) -> None:
    world, trainer = flow(redis_url, job, tmp_path, diagnostics={"trajectories": 2, "learn": 2, "drift": 2.0})
    for version, by in enumerate((0.25, 0.35, 5.0, 6.0)):
        made = world.feed(2, version)
        for probe in asked(world, version + 1, 2):
            reply(world, probe, made, by)
        world.await_version(VersionId(0, version + 1))
    found = recorded(world, 4)
    trainer.stop()
    assert [r.baseline is None for r in found] == [True, False, False, False]
    noise = 0.5 * (0.25 + 0.35)
    assert [bool(r.alarms) for r in found[:3]] == [False, False, False]
    told = [alarm for alarm in found[3].alarms if alarm.startswith("noise_decode")]
    assert told == [f"noise_decode: mean 6 against a baseline of {noise:.3g}"]
    (alarm,) = [e for e in world.said() if isinstance(e, events.Alarm)]
    assert (alarm.who, alarm.update) == ("trainer", 4)
    assert "noise_decode" in alarm.what
    kept = json.loads((world.folder / "baseline.json").read_text())
    assert sorted(kept["means"]["noise_decode"]) == ["1", "2"]


def test_after_a_crash_the_open_update_is_unmeasured_and_the_next_one_measured(
    redis_url: str, job: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from syncline.trainer.minting import Mint

    world, first = flow(redis_url, job, tmp_path, diagnostics={"trajectories": 2})
    real: Callable[..., Any] = Mint.mint

    def dies(self: Mint, engine: Any, version: VersionId, *rest: Any) -> str:
        if version == VersionId(0, 1):
            raise Killed
        return str(real(self, engine, version, *rest))

    monkeypatch.setattr(Mint, "mint", dies)
    made = world.feed(2)
    wait_until(first.died, SECONDS, "the trainer's death")
    first.forget()
    assert len(asked(world, 1, 2)) == 2
    second = InProcess(world)
    world.await_version(VersionId(1, 1))
    (record,) = recorded(world, 1)
    assert (record.update, record.trajectories) == (1, 0)
    assert set(record.unmeasured.values()) == {"the trainer was started again before the answers were in"}
    made = world.feed(2, 1, epoch=1)
    for probe in asked(world, 2, 2):
        assert probe.version == VersionId(1, 1)
        reply(world, probe, made)
    found = recorded(world, 2)
    second.stop()
    assert [r.update for r in found] == [1, 2]
    assert found[1].trajectories == 2
    assert len([p for p in probes(world) if p.update == 1]) == 2, "a repeated update is not asked of again"


def test_none_are_asked_for_when_none_are_wanted(redis_url: str, job: str, tmp_path: Path) -> None:
    world, trainer = flow(redis_url, job, tmp_path, diagnostics={"trajectories": 1, "every": 2})
    for version in range(3):
        world.feed(2, version)
        world.await_version(VersionId(0, version + 1))
    trainer.stop()
    assert sorted({probe.update for probe in probes(world)}) == [1, 3]
    assert [r.update for r in records(world)] == [1, 3]
    assert "before the trainer was told to stop" in records(world)[1].unmeasured["mismatch"]


def test_the_choice_spreads_over_lag_and_worker_and_repeats() -> None:
    rows = [
        segments.SegmentRow(
            trajectory=trajectory("j7", group, 0, worker=worker),
            reward=None,
            use="train",
            why="",
            lag=lag,
            advantage=0.0,
            used_mask=b"",
        )
        for group, (lag, worker) in enumerate([(0, "w0")] * 20 + [(0, "w1")] * 3 + [(1, "w0")] * 2)
    ]
    chosen = choose(rows, 3, "j7", 1)
    assert {(row.lag, row.trajectory.spans[-1].worker) for row in chosen} == {(0, "w0"), (0, "w1"), (1, "w0")}
    assert chosen == choose(list(reversed(rows)), 3, "j7", 1)
    ids = [row.trajectory.trajectory for row in choose(rows, 99, "j7", 1)]
    assert sorted(ids) == sorted(row.trajectory.trajectory for row in rows)
    others = [[r.trajectory.trajectory for r in choose(rows, 3, "j7", update)] for update in range(2, 8)]
    assert len({tuple(names) for names in others}) > 1
