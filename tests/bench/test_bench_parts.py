"""Parts of the bench whose figures are the same on every machine, or hold on any: what they must show."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from statistics import fmean

import pytest

BENCH = Path(__file__).parents[2] / "bench"
Rows = dict[tuple[str, str], float]


def rows(folder: Path, part: str, *arguments: str) -> Rows:
    """(case, figure) -> value of a part."""
    path = folder / "rows.json"
    argv = [sys.executable, str(BENCH / f"{part}.py"), *arguments, "--json", str(path)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    return {(row["case"], row["figure"]): row["value"] for row in json.loads(path.read_text())}


@pytest.fixture(scope="module")
def schedules(tmp_path_factory: pytest.TempPathFactory) -> Rows:
    """Where sampling gets slower on one core and training does not: each mode is the better one somewhere."""
    return rows(tmp_path_factory.mktemp("schedules"), "schedules", "--updates", "100", "--cores", "mixed")


def test_each_schedule_is_within_a_tenth_of_its_bound(schedules: Rows) -> None:
    shares = [value for (_, figure), value in schedules.items() if figure.startswith("bound over step")]
    assert len(shares) == 6
    assert all(0.9 <= share <= 1.0 for share in shares), shares


def test_the_policy_picks_the_better_mode_and_follows_a_drift(schedules: Rows) -> None:
    figure = "time of all updates, policy from {} over best fixed"
    lost = {
        (case, mode): schedules[case, figure.format(mode)]
        for case in {case for case, _ in schedules}
        for mode in ("colocated", "disjoint")
    }
    assert len(lost) == 10
    assert all(value <= 1.05 for value in lost.values()), lost
    drifts = [value for (case, _), value in lost.items() if "drifts" in case]
    assert fmean(drifts) < 1.0, "either fixed mode is the wrong one for half of a drift"


def test_an_idle_stack_is_small_and_has_no_torch_in_it(tmp_path: Path) -> None:
    found = rows(tmp_path, "idle")
    assert found["idle stack", "files of torch loaded"] == 0
    assert 50 < found["idle stack", "PSS, all processes"] < 700
    for name in ("supervisor", "redis", "gateway", "scheduler", "errands"):
        assert found["idle stack", f"PSS, {name}"] > 1


def test_without_their_environment_the_peers_are_left_out(tmp_path: Path) -> None:
    """The floor needs nothing; of the peers no row is made up."""
    few = ("--trajectories", "64", "--repetitions", "1")
    found = rows(tmp_path, "queue_peers", *few, "--peers", str(tmp_path / "none"))
    figures = {figure for _, figure in found}
    assert figures == {
        "CPU per trajectory, ours over Bus.many",
        "CPU per trajectory, ours over carry",
        "CPU per trajectory, ours",
        "CPU per trajectory, Bus.many",
        "CPU per trajectory, carry",
    }


def test_without_their_environment_trl_is_left_out(tmp_path: Path) -> None:
    """No row of a race that was not run."""
    assert rows(tmp_path, "trl_peer", "--peers", str(tmp_path / "none")) == {}


@pytest.mark.parametrize(("model", "experts"), [("tiny-moe", True), ("tiny-dense", False)])
def test_trl_is_told_whether_the_saved_model_has_experts(tmp_path: Path, model: str, experts: bool) -> None:
    """Or it would train on an auxiliary loss of the router, which ours has not."""
    told = (
        "import sys; from pathlib import Path; import trl_peer as t; folder = Path(sys.argv[1]);"
        "saved = t.saved(t.MODELS, folder / 'saved', sys.argv[2], 0);"
        "print(t.order_of(saved, folder, 1, 1, 0)['experts'])"
    )
    # in a process of its own: the bench's modules have names that tests have too
    argv = [sys.executable, "-c", told, str(tmp_path), model]
    done = subprocess.run(argv, cwd=BENCH, capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout.strip() == str(experts), done.stderr


def test_with_tracing_switched_off_messages_still_carry_a_trace_context(tmp_path: Path) -> None:
    """OpenTelemetry's own switch, which the bench uses: no span is kept, and nobody stumbles over ids of zeros."""
    code = """
import sys, time
from pathlib import Path
from syncline.contract.token_path import PROMPTED
from syncline.runtime import tracing
from syncline.runtime.trace_store import parse_traceparent
store = Path(sys.argv[1])
tracing.setup("bench", "bench", store, None)
now = time.time()
given = {name: "x" for name in (*PROMPTED.attributes, "job")}
root = tracing.record(PROMPTED, None, now, now, **given)
parse_traceparent(root)
parse_traceparent(tracing.record(PROMPTED, root, now, now, **given))
tracing.shutdown()
print(len(tracing.spans_of(store, job="x")) if store.exists() else 0)
"""
    counts = []
    for extra in ({}, {"OTEL_SDK_DISABLED": "true"}):
        argv = [sys.executable, "-c", code, str(tmp_path / f"traces{len(extra)}.sqlite")]
        done = subprocess.run(
            argv, env=os.environ | extra, capture_output=True, text=True, timeout=60, check=True
        )
        counts.append(int(done.stdout))
    assert counts == [2, 0]
