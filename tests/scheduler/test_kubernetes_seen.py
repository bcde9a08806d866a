"""From pods to what runs, without a cluster: counts over every history of pods, and what each state is called."""

from __future__ import annotations

import json
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from syncline.scheduler.launch.kubernetes.seen import Count, count, entries, observe
from syncline.scheduler.launch.kubernetes.template import POOL, PROCESSES
from syncline.scheduler.launch.launcher import Observed, ProcessView
from syncline.scheduler.lookout import lost
from syncline.scheduler.saved import Watch

AT = "2026-01-01T00:00:00Z"
RUNNING = {"running": {"startedAt": AT}}
KILLED = {"terminated": {"exitCode": 137}}


def pod(
    uid: str = "u1", names: tuple[str, ...] = ("j1/w{}",), name: str = "j1-rollout-0", **status: Any
) -> dict[str, Any]:
    """A pod with one container. `status`: of the container; `phase`; `ending`."""
    metadata: dict[str, Any] = {
        "name": name,
        "uid": uid,
        "labels": {POOL: "j1-rollout"},
        "creationTimestamp": AT,
    }
    metadata["annotations"] = {PROCESSES: json.dumps({"rollout": list(names)})}
    if status.pop("ending", False):
        metadata["deletionTimestamp"] = AT
    phase = status.pop("phase", "Running")
    told = {"name": "rollout", "restartCount": 0, **status}
    return {
        "metadata": metadata,
        "spec": {"containers": []},
        "status": {"phase": phase, "containerStatuses": [told]},
    }


def state(one: dict[str, Any], inner: dict[str, Observed] | None = None) -> ProcessView:
    counts = count([one], inner or {}, {})
    return observe([one], inner or {}, counts, ()).processes["j1/w0"]


@pytest.mark.parametrize(
    ("one", "expected"),
    [
        (pod(state={"waiting": {"reason": "ContainerCreating"}}), ("waiting", None, 0)),
        (pod(state=RUNNING), ("running", None, 1)),
        (pod(state={"waiting": {}}, lastState=KILLED), ("waiting", -9, 1)),
        (pod(state=RUNNING, lastState=KILLED, restartCount=1), ("running", -9, 2)),
        (pod(state=RUNNING, ending=True), ("stopping", None, 1)),
        (pod(state={"terminated": {"exitCode": 1}}, phase="Failed"), ("waiting", 1, 1)),
    ],
)
def test_a_container_is_called_what_a_local_process_would_be(
    one: dict[str, Any], expected: tuple[str, int | None, int]
) -> None:
    view = state(one)
    assert (view.state, view.exit, view.starts) == expected


def test_of_two_pods_the_one_that_stays_speaks() -> None:
    old, new = pod("u1", state=RUNNING, ending=True), pod("u2", state={"waiting": {}})
    for both in ([old, new], [new, old]):
        counts = count(both, {}, {})
        assert observe(both, {}, counts, ()).processes["j1/w0"].state == "waiting"
        assert counts["j1/w0"].starts == 1


def test_processes_that_share_a_container_are_as_their_entry_says() -> None:
    shared = pod(names=("j1/w0", "j1/trainer"), name="j1-shared-0", state=RUNNING)
    assert list(entries(shared)) == ["rollout"]
    assert (state(shared).state, state(shared).starts) == ("waiting", 0)
    told = ProcessView(name="j1/w0", state="waiting", pid=None, exit=-9, starts=3, restarts=2, since=0.0)
    inner = {"u1": Observed(processes={"j1/w0": told})}
    view = state(shared, inner)
    assert (view.state, view.exit, view.starts) == ("waiting", -9, 3)


def test_a_scheduler_that_has_just_come_takes_the_living_for_alive() -> None:
    """Nobody has asked the entry yet; a process called dead would have to report for duty again, and would not."""
    names = ("j1/w0", "j1/trainer")
    one = pod(names=names, name="j1-shared-0", state=RUNNING)
    told = ProcessView(name="j1/w0", state="running", pid=7, exit=None, starts=1, restarts=0, since=5.0)
    counts = count([one], {"u1": Observed(processes={"j1/w0": told})}, {})
    assert observe([one], {}, counts, ()).processes["j1/w0"].state == "running"
    later = {"running": {"startedAt": "2026-01-01T00:01:00Z"}}
    restarted = pod(names=names, name="j1-shared-0", state=later, lastState=KILLED, restartCount=1)
    again = count([restarted], {}, counts)
    view = observe([restarted], {}, again, ()).processes["j1/w0"]
    assert (view.state, view.starts) == ("waiting", 1)


def test_deaths_are_told_once_and_not_when_the_next_has_reported_for_duty_already() -> None:
    def at(state: str, starts: int, since: float = 0.0) -> Observed:
        view = ProcessView(
            name="j1/w0", state=cast(Any, state), pid=None, exit=-9, starts=starts, restarts=0, since=since
        )
        return Observed(processes={"j1/w0": view})

    watch = Watch()
    assert lost("j1", at("running", 1, 10.0), watch) == []
    assert [event.who for event in lost("j1", at("waiting", 1), watch)] == ["w0"]
    assert lost("j1", at("waiting", 1), watch) == []
    assert lost("j1", at("running", 2, 20.0), watch) == []
    watch.up["w0"] = 21.0
    assert [event.who for event in lost("j1", at("running", 3, 30.0), watch)] == [
        "w0"
    ]  # who has not yet reported
    watch.up["w0"] = 41.0
    assert lost("j1", at("running", 4, 40.0), watch) == []  # seen late: the fourth is on duty
    assert [event.who for event in lost("j1", at("waiting", 4), watch)] == ["w0"]


def test_what_is_wanted_and_in_no_pod_waits() -> None:
    counts = {"j1/w0": Count(before=2)}
    view = observe([], {}, counts, ["j1/w0"]).processes["j1/w0"]
    assert (view.state, view.starts) == ("waiting", 2)


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 2), st.booleans()), max_size=30))
def test_starts_never_fall_and_deaths_are_never_negative(history: list[tuple[int, int, bool]]) -> None:
    """Whatever pods come and go, restart, are seen late or not at all."""
    counts: dict[str, Count] = {}
    before, generation, restarts = 0, 0, 0
    for newer, more, running in history:
        generation += newer > 2
        restarts = 0 if newer > 2 else restarts + more
        told = RUNNING if running else {"waiting": {}}
        one = pod(f"u{generation}", state=told, lastState=KILLED if restarts else {}, restartCount=restarts)
        counts = count([one], {}, counts)
        view = observe([one], {}, counts, ()).processes["j1/w0"]
        assert view.starts >= before
        assert view.starts - (view.state in ("running", "stopping")) >= 0
        assert count([one], {}, counts) == counts
        before = view.starts
