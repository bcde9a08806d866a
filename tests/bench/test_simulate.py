"""Fleets in virtual time: a run keeps the bound and ends, and a decision costs no more for a larger fleet."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest

from syncline.contract import events as e
from syncline.contract.version_path import VersionId
from syncline.scheduler import invariants, machine

SIMULATE = Path(__file__).parents[2] / "bench" / "simulate.py"


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], float]:
    """The rows of a short run: (case, figure) -> value."""
    path = tmp_path_factory.mktemp("simulate") / "rows.json"
    subprocess.run([sys.executable, str(SIMULATE), "--short", "--json", str(path)], check=True, timeout=120)
    return {(row["case"], row["figure"]): row["value"] for row in json.loads(path.read_text())}


def test_what_overlaps_is_faster_and_what_alternates_is_on_policy(rows: dict[tuple[str, str], float]) -> None:
    for fleet, allowed in (("Qwen3-30B-A3B", 1), ("20 workers", 2)):
        assert rows[f"{fleet}, colocated", "largest lag"] == 0
        assert 0 < rows[f"{fleet}, disjoint", "largest lag"] <= allowed
        assert rows[f"{fleet}, disjoint", "goodput"] > rows[f"{fleet}, colocated", "goodput"]
    assert rows["Qwen3-30B-A3B", "speed-up of disjoint"] > 1


def test_one_run_is_like_another(rows: dict[tuple[str, str], float], tmp_path: Path) -> None:
    """Virtual time does not depend on the machine: all but what costs CPU comes out the same."""
    path = tmp_path / "rows.json"
    subprocess.run([sys.executable, str(SIMULATE), "--short", "--json", str(path)], check=True, timeout=120)
    again = {(row["case"], row["figure"]): row for row in json.loads(path.read_text())}
    assert {key: row["value"] for key, row in again.items() if row["kind"] != "time"} == {
        key: rows[key] for key, row in again.items() if row["kind"] != "time"
    }


@pytest.mark.parametrize("arguments", [["--updates", "3"], ["--workers", "1"]])
def test_what_cannot_be_simulated_is_named(arguments: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, str(SIMULATE), *arguments], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 2
    assert " ".join(arguments) in done.stderr


def test_a_decision_costs_the_same_for_any_fleet() -> None:
    """CPU per event, its invariants included: 10,000 workers take at most three times what 100 take."""
    small, large = min(_per_event(100) for _ in range(5)), min(_per_event(10_000) for _ in range(2))
    assert large < 3 * small


def _per_event(workers: int) -> float:
    """CPU seconds per event of a colocated update in which every worker wakes, hears the shut gate, and sleeps."""
    names = tuple(f"w{i}" for i in range(workers))
    state, _ = machine.begin(2, names, "colocated")
    first = VersionId(0, 0)
    awake, asleep = [partial(_woke, who) for who in names], [partial(_slept, who) for who in names]
    began, events = time.thread_time(), 0

    def tell(event: e.Event) -> None:
        nonlocal state, events
        before, events = state, events + 1
        state, commands = machine.step(before, event)
        invariants.check(state)
        invariants.check_step(before, event, state, commands)

    tell(e.Minted(version=first))
    tell(_slept("trainer", state.seq))
    for answer in awake:
        tell(answer(state.seq))
    tell(e.Active(version=first, workers=()))
    tell(e.BatchReady(groups=1, seq=state.seq))
    for answer in awake:
        tell(answer(state.seq))
    tell(e.Drained(seq=state.seq))
    for answer in asleep:
        tell(answer(state.seq))
    assert state.stage == "train"
    return (time.thread_time() - began) / events


def _woke(who: str, seq: int) -> e.Event:
    return e.Woke(who=who, seq=seq, version=None, resident=1, seconds=0.1)


def _slept(who: str, seq: int) -> e.Event:
    return e.Slept(who=who, seq=seq, resident=1, baseline=1)
