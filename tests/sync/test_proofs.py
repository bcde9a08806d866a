"""Versions that must pass level 6: no worker commits one before its proof, whatever comes when."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from exports import minted
from scripted import Installation, ScriptedWorker
from test_decide import Story
from waiting import wait_until

from syncline.contract.events import Active, SyncFailed
from syncline.contract.job import JobSpec
from syncline.contract.streams import JOB, MINTED, PROOFS
from syncline.contract.validation import Proof, VersionRefused, Wanted
from syncline.contract.version_path import VersionId
from syncline.runtime.bus import unpack
from syncline.sync.state import Effect, Minted, Proved, Published, Reached, Scope, Tick


def publish(s: Story, number: int, complete: bool = False) -> None:
    """A version that must be proved."""
    version = VersionId(0, number)
    s.tell(Minted(version=version))
    published = Published(
        version=version,
        digest=f"m{number}",
        loaded=f"l{number}",
        canaries=True,
        tolerance=0.1,
        complete=complete,
        proof=True,
    )
    s.tell(published)


def prove(s: Story, number: int, holds: bool = True, digest: str | None = None) -> list[Effect]:
    told = Proved(version=VersionId(0, number), digest=digest or f"m{number}", holds=holds, reason="level 6")
    return s.tell(told)


@pytest.mark.parametrize("scope", ["barrier", "rolling"])
def test_no_worker_commits_before_the_proof(scope: Scope) -> None:
    s = Story(scope)
    s.join("w0", "w1")
    publish(s, 0)
    assert s.said() == [("stage", 0, ("w0", "w1"))], "staging goes on beside the proof"
    for worker in ("w0", "w1"):
        s.answer(worker, 0, "verified")
    s.tell(Tick())
    assert s.said() == []
    prove(s, 0, digest="another manifest")
    assert s.said() == []
    prove(s, 0)
    assert s.said() == [("commit", 0, ("w0", "w1"))]
    for worker in ("w0", "w1"):
        s.answer(worker, 0, "active")
    assert s.ended() == [(0, "active")]
    prove(s, 0, holds=False)
    assert (s.said(), s.ended()) == ([], []), "what is over stays over"


@pytest.mark.parametrize("scope", ["barrier", "rolling"])
def test_a_version_that_does_not_hold_is_served_by_none_and_the_next_has_its_own_chance(scope: Scope) -> None:
    s = Story(scope)
    s.join("w0", "w1")
    publish(s, 0)
    prove(s, 0)
    for kind in ("verified", "active"):
        for worker in ("w0", "w1"):
            s.answer(worker, 0, kind)
    s.said(), s.ended()
    publish(s, 1)
    s.answer("w0", 1, "verified")
    effects = prove(s, 1, holds=False)
    assert s.said()[-2:] == [("abort", 1, ("w0",)), ("abort", 1, ("w1",))]
    assert s.ended() == [(1, "refused")]
    assert {e.worker for e in effects if isinstance(e, Reached) and e.what == "out"} == {"w0", "w1"}
    s.answer("w1", 1, "verified")
    s.tell(Tick(), 1000.0)
    assert (s.said(), s.ended()) == ([], []), "nobody waits for it any more"
    s.join("w2")
    assert s.said() == [("stage", 0, ("w2",))], "a newcomer gets what is active"
    publish(s, 2)
    prove(s, 2)
    assert [what for what, number, _ in s.said() if number == 2] == ["stage"]
    for worker in ("w0", "w1"):
        s.answer(worker, 2, "verified")
    if scope == "barrier":
        s.answer("w2", 0, "verified")  # from which it is brought on
        s.answer("w2", 2, "verified")
    assert ("commit", 2) in {(what, number) for what, number, _ in s.said()}


def test_a_proof_that_never_comes_is_said_to_be_what_is_missing() -> None:
    s = Story("rolling")
    s.join("w0")
    publish(s, 0)
    s.answer("w0", 0, "verified")
    s.tell(Tick(), 1000.0)
    s.tell(Tick(), 2000.0)
    assert [e.how for e in s.ends] == ["failed"]
    assert "its level 6 has not come to an end" in s.ends[0].reason


@pytest.mark.parametrize("seed", range(40))
def test_in_no_order_of_anything_is_an_unproved_version_committed(seed: int) -> None:
    dice = random.Random(seed)
    s = Story(dice.choice(["barrier", "rolling"]))
    held: set[int] = set()
    number = -1
    for _ in range(120):
        match dice.randrange(6):
            case 0:
                number += 1
                publish(s, number)
            case 1:
                s.join(dice.choice(["w0", "w1", "w2"]))
            case 2 if number >= 0:
                about = dice.randint(0, number)
                if dice.random() < 0.6:
                    held.add(about)
                    prove(s, about)
                else:
                    prove(s, about, holds=False)
            case _:
                for worker in dice.sample(sorted(s.state.workers), k=min(1, len(s.state.workers))):
                    on = s.state.workers[worker].on
                    if on is not None:
                        s.answer(worker, on.number, dice.choice(["staged", "verified", "active", "failed"]))
        committed = {number for what, number, _ in s.said() if what == "commit"}
        assert committed <= held
    assert all(version.number in held for version in {w.active for w in s.state.workers.values()} if version)


# ---- as a process -----------------------------------------------------------------------------------------------
@pytest.fixture
def place(redis_url: str, job: str, tmp_path: Path) -> Iterator[Installation]:
    made = Installation(redis_url, job, tmp_path)
    spec = JobSpec.model_validate_json(made.bus.hget(JOB.at(job), "spec") or b"")
    told = spec.model_dump(mode="json") | {"validation": {"before_active": [6]}}
    made.bus.hset(JOB.at(job), "spec", JobSpec.model_validate_json(json.dumps(told)).canonical())
    yield made
    made.stop()


def mint(place: Installation, number: int) -> VersionId:
    version = VersionId(0, number)
    place.bus.append(MINTED.at(place.job), minted(place.job, place.run, version, number))
    return version


def wanted(place: Installation) -> list[Wanted]:
    entries = place.bus.range(PROOFS.at(place.job))
    return [m for m in (unpack(entry, Wanted | Proof) for entry in entries) if isinstance(m, Wanted)]


def answer(place: Installation, version: VersionId, holds: bool) -> None:
    """What the validator says, once it is asked."""
    asked = wait_until(
        lambda: [w for w in wanted(place) if w.version == version], 30, f"the wish for {version}"
    )
    proof = Proof(
        version=version, digest=asked[0].digest, holds=holds, reason="level 6 fails", number=1, seconds=1.0
    )
    place.bus.append(PROOFS.at(place.job), proof)


def test_sync_asks_once_waits_and_says_what_the_job_can_do(place: Installation) -> None:
    place.phase("colocated", "awake")
    place.start()
    worker = ScriptedWorker(place, "w0").start()
    first = mint(place, 0)
    wait_until(lambda: [o for o in place.orders() if o.order == "stage"], 30, "staging beside the proof")
    place.kill()
    place.start()
    answer(place, first, True)
    wait_until(lambda: worker.active == first, 30, "version 0.0")
    assert [(w.version, w.before) for w in wanted(place)] == [(first, None)], (
        "asked once, though sync was killed"
    )

    second = mint(place, 1)
    wait_until(lambda: len(wanted(place)) == 2, 30, "the next wish")
    third = mint(place, 2)
    assert [(w.version, w.before) for w in wanted(place)[1:]] == [(second, first)]
    answer(place, second, False)
    told = wait_until(lambda: [e for e in place.events() if isinstance(e, VersionRefused)], 30, "the refusal")
    assert (told[0].version, told[0].active) == (second, first), "the newer one waited until this was decided"
    assert "level 6 fails" in told[0].reason
    refused = place.record(second)
    assert refused is not None
    assert (refused.state, refused.active) == ("failed", None)
    answer(place, third, False)
    failed = wait_until(lambda: [e for e in place.events() if isinstance(e, SyncFailed)], 30, "the failure")
    assert "nothing newer can be sampled" in failed[0].reason
    assert worker.history == [first]
    assert [e.version for e in place.events() if isinstance(e, Active)] == [first]
    worker.stop()
