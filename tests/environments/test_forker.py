"""The scorer's process: what it holds, and that whoever asks it outlives it."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from waiting import wait_until

from syncline.contract.job import JobSpec
from syncline.errands.forker import Forker
from syncline.errands.scorer import BrokenScorer, all_judged
from syncline.runtime.sandbox import Outcome

before: set[int] = set()


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))
    before.clear()
    before.update(process.pid for process in psutil.Process().children())


@contextlib.contextmanager
def forker(**reward: object) -> Iterator[Forker]:
    made = Forker(
        JobSpec.model_validate({"name": "scored", "model": {"name": "tiny-dense"}, "reward": reward})
    )
    yield made
    made.close()
    wait_until(lambda: not scorers(), 5, "the end of its sandbox, which dies with it")


def python(name: str) -> dict[str, object]:
    return {"source": "python", "function": f"reward_functions:{name}"}


def scorers() -> list[psutil.Process]:
    """Scorers that this test started and that live. Orphans of other tests end up as this process's children too."""
    found = []
    for process in psutil.Process().children():
        if process.pid in before:
            continue
        with contextlib.suppress(psutil.NoSuchProcess):  # a zombie is one
            if "syncline.errands.scorer" in process.cmdline():
                found.append(process)
    return found


def test_one_process_scores_all_and_names_the_judge() -> None:
    with forker(**python("length")) as asked:
        assert [asked.run("t", 0, text).value for text in ("abc", "line\nand \u2028")] == [0.3, 1.0]
        [first] = scorers()
        assert asked.run("t", 1, "").value == 0.0
        assert scorers() == [first]
        assert asked.judge.startswith("reward_functions:length ")


def test_many_at_once_score_as_each_alone() -> None:
    texts = ["abc", "", "a\nb\u2028", "hca"] * 20
    with forker() as asked:
        alone = [asked.run("t", n % 7, text).value for n, text in enumerate(texts)]
        together = asked.run_many([("t", n % 7, text, ()) for n, text in enumerate(texts)])
        assert all_judged(together, len(texts)) == alone
        assert all_judged(together, len(texts) - 1) is None
        assert all_judged(asked.run_many([("t", 0, "abc", ()), ("t", -1, "abc", ())]), 2) is None, (
            "one raises"
        )
        assert asked.run("t", 0, "abc").kind == "value"


def test_it_holds_nothing_of_the_service() -> None:
    with forker(**python("looks_around")) as asked:
        assert asked.run("t", 0, "").value == 0.0


def test_killed_while_idle_it_is_replaced_unnoticed() -> None:
    with forker() as asked:
        assert asked.run("t", 0, "abc").kind == "value"
        [process] = scorers()
        process.kill()
        process.wait(10)
        assert asked.run("t", 0, "abc").kind == "value"
        assert scorers() != [process]


def test_killed_at_work_its_request_is_lost_and_the_next_is_not() -> None:
    with forker(**python("waits_if_told"), timeout=60.0) as asked:
        assert asked.run("t", 0, "live").value == 0.5
        [process] = scorers()
        outcomes: list[Outcome] = []
        thread = threading.Thread(target=lambda: outcomes.append(asked.run("t", 0, "wait")))
        thread.start()
        at_rest = len(process.children(recursive=True)) - 1  # with its sandbox it has one more
        wait_until(lambda: len(process.children(recursive=True)) > max(at_rest, 0), 20, "a sandbox at work")
        process.kill()
        thread.join(30)
        [lost] = outcomes
        assert (lost.kind, lost.reason) == ("lost", "its scorer's process ended with exit code -9")
        assert asked.run("t", 0, "live").value == 0.5


def test_broken_scorer_says_so_each_time_and_leaves_no_process() -> None:
    with forker(**python("missing")) as asked:
        for _ in range(2):
            with pytest.raises(BrokenScorer, match="no function missing"):
                asked.run("t", 0, "")
            assert not scorers()


def test_only_who_was_given_the_network_has_it() -> None:
    own = os.readlink("/proc/self/ns/net")
    for reward, given in (
        ({}, False),
        (python("length"), False),
        (python("length") | {"network": True}, True),
    ):
        with forker(**reward) as asked:
            asked.run("t", 0, "abc")
            [process] = scorers()
            left = os.readlink(f"/proc/{process.pid}/ns/net") != own
            assert left == (not given and "network could not be left" not in asked.missing)
