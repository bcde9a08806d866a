"""A worker answers probes of the version that it serves, also at its last moment; others it calls missed."""

from __future__ import annotations

from pathlib import Path

from conformance.forge import cold_logprobs, gap, plain
from waiting import wait_until
from worker_world import SECONDS, World, world

from syncline.contract.diagnosis import Probe, Probed
from syncline.contract.events import Slept, Woke
from syncline.contract.streams import PROBED, PROBES
from syncline.contract.version_path import VersionId
from syncline.runtime.bus import unpack

IDS = (1, *range(20, 40))
POSITIONS = (3, 4, 5, 9, 10, 20)  # two gaps, as observed tokens leave them


def ask(w: World, number: int, trajectory: str = "a", worker: str = "w0", temperature: float = 1.0) -> None:
    w.bus.append(
        PROBES.at(w.job),
        Probe(
            update=number + 1,
            version=VersionId(0, number),
            trajectory=trajectory,
            worker=worker,
            tokens=IDS,
            positions=POSITIONS,
            temperature=temperature,
            experts=True,
        ),
    )


def answers(w: World) -> list[Probed]:
    """To what was asked."""
    return [answer for answer in said(w) if not answer.decode]


def said(w: World) -> list[Probed]:
    return [unpack(entry, Probed) for entry in w.bus.range(PROBED.at(w.job))]


def answered(w: World, count: int) -> list[Probed]:
    wait_until(lambda: len(answers(w)) >= count, SECONDS, f"{count} answers")
    found = answers(w)
    assert len(found) == count
    return found


def cold(w: World, number: int) -> list[float]:
    """The same tokens' log-probs from cold weights; `cold_logprobs` scores all behind a prompt."""
    scored = cold_logprobs(plain(w.forge.folder, number), list(IDS), POSITIONS[0])
    return [scored[p - POSITIONS[0]] for p in POSITIONS]


def test_probes_are_answered_under_exactly_their_version(redis_url: str, job: str, tmp_path: Path) -> None:
    with world(redis_url, job, tmp_path) as w:
        w.start()
        w.phase()
        w.install(0)
        ask(w, 1, "early")  # its version does not serve yet
        ask(w, 0, "now")
        ask(w, 0, "not mine", worker="w1")
        ask(w, 0, "warm", temperature=2.0)
        now, warm = answered(w, 2)
        assert [a.trajectory for a in (now, warm)] == ["now", "warm"]
        assert (now.worker, now.version, now.missed, now.wide_kv) == ("w0", VersionId(0, 0), "", ())
        assert gap(now.logprobs, cold(w, 0)) < 5e-5
        assert gap(warm.logprobs, now.logprobs) > 0.1
        assert now.experts_shape is not None
        assert now.experts_shape[0] == len(IDS) - 1
        assert len(now.experts) == now.experts_shape[0] * now.experts_shape[1] * now.experts_shape[2]
        w.install(1)
        early = answered(w, 3)[-1]
        assert (early.trajectory, early.version) == ("early", VersionId(0, 1))
        assert gap(early.logprobs, cold(w, 1)) < 5e-5
        assert gap(early.logprobs, now.logprobs) > 1e-3
        ask(w, 0, "late")
        assert answered(w, 4)[-1].missed == "serves 0.1 already"


def test_while_tokens_are_sampled_probes_are_answered_between_steps(
    redis_url: str, job: str, tmp_path: Path
) -> None:
    slow = {
        "sampling": {"length_median": 60, "length_sigma": 0.1, "max_tokens": 80},
        "rollout": {"pace": [0.02, 1]},
    }
    with world(redis_url, job, tmp_path, **slow) as w:
        w.start()
        w.phase()
        w.install(0)
        wanted = w.submit(2)
        wait_until(lambda: (s := w.status()) is not None and s.running, SECONDS, "requests run")
        for name in "abc":
            ask(w, 0, name)
        found = answered(w, 3)
        assert not w.published(), "the answers did not wait for the requests"
        assert len({a.logprobs for a in found}) == 1
        assert len(w.wait_published(wanted)) == len(wanted)


def test_who_wakes_answers_before_the_next_version_is_committed(
    redis_url: str, job: str, tmp_path: Path
) -> None:
    with world(redis_url, job, tmp_path) as w:
        w.start()
        w.phase(mode="colocated")
        w.install(0)
        asleep = w.phase(rollout="asleep", gate="shut", mode="colocated")
        w.event(Slept, lambda e: e.seq == asleep)
        for i in range(9):
            ask(w, 0, f"t{i}")
        staged = w.order("stage", 1)
        awake = w.phase(gate="shut", mode="colocated")
        w.event(Woke, lambda e: e.seq == awake)
        w.ack("verified", staged)
        w.ack("active", w.order("commit", 1))
        found = answered(w, 9)
        assert [a.missed for a in found] == [""] * 9
        assert {a.version for a in found} == {VersionId(0, 0)}
        assert gap(found[-1].logprobs, cold(w, 0)) < 5e-5


def test_decode_is_compared_with_prefill_once_for_each_version(
    redis_url: str, job: str, tmp_path: Path
) -> None:
    with world(redis_url, job, tmp_path, sampling={"temperature": 1.5}) as w:
        w.start()
        w.phase()
        w.install(0)
        w.wait_published(w.submit(3))
        wait_until(lambda: said(w), SECONDS, "the comparison")
        (first,) = said(w)
        record = next(t for t in w.published() if t.trajectory == first.trajectory)
        assert (first.update, first.version, first.worker) == (1, VersionId(0, 0), "w0")
        assert first.decode == tuple(record.logprobs)
        assert 0 <= gap(first.logprobs, first.decode) < 5e-5
        w.install(1)
        before = len(w.published())
        w.submit(1)
        wait_until(lambda: len(w.published()) == before + 4, SECONDS, "the next group")
        wait_until(lambda: len(said(w)) > 1, SECONDS, "the next comparison")
        assert [(a.update, a.version) for a in said(w)] == [(1, VersionId(0, 0)), (2, VersionId(0, 1))]


def test_no_probes_wanted_no_comparison_made(redis_url: str, job: str, tmp_path: Path) -> None:
    with world(redis_url, job, tmp_path, diagnostics={"trajectories": 0}) as w:
        w.start()
        w.phase()
        w.install(0)
        w.wait_published(w.submit(1))
        assert said(w) == []


def test_a_new_worker_takes_up_the_newest_update_and_leaves_the_rest(
    redis_url: str, job: str, tmp_path: Path
) -> None:
    with world(redis_url, job, tmp_path) as w:
        ask(w, 0, "closed long ago")
        ask(w, 1, "open")
        w.start()
        w.phase()
        w.install(1)
        (only,) = answered(w, 1)
        assert (only.trajectory, only.missed) == ("open", "")
        ask(w, 1, "next")
        assert answered(w, 2)[-1].trajectory == "next"
