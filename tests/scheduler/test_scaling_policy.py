"""The pool's policy: what it may never do, whatever was measured, and that it settles under any steady load."""

from __future__ import annotations

import random

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from syncline.contract import events as e
from syncline.contract.events import WorkerStatus
from syncline.contract.job import JobSpec
from syncline.contract.streams import METRICS, WORKERS
from syncline.contract.version_path import VersionId
from syncline.runtime.bus import Bus, pack
from syncline.scheduler.machine import begin, fold
from syncline.scheduler.saved import Size, Watch
from syncline.scheduler.scaling import COOL, STEADY, Scaler, Share, busy_share, decide, rested, turns

parts = st.floats(0, 1)
measured = st.lists(st.builds(Share, waited=parts, busy=parts), max_size=8)


def sizes_of(first: int, *changes: tuple[int, int]) -> list[Size]:
    return [Size(update=0, workers=first), *(Size(update=u, workers=w) for u, w in changes)]


STARVED = [Share(waited=0.4, busy=1.0)] * STEADY
IDLE = [Share(waited=0.0, busy=0.3)] * STEADY


@settings(max_examples=300, deadline=None, derandomize=True)
@given(
    shares=measured, least=st.integers(1, 4), more=st.integers(0, 4), now=st.data(), left=st.integers(0, 100)
)
def test_one_step_within_the_bounds(
    shares: list[Share], least: int, more: int, now: st.DataObject, left: int
) -> None:
    workers = now.draw(st.integers(least, least + more))
    wanted = decide(shares, sizes_of(workers), 50, (least, least + more), left)
    assert least <= wanted <= least + more
    assert abs(wanted - workers) <= 1
    if len(shares) < STEADY or left <= COOL:
        assert wanted == workers


@pytest.mark.parametrize(("shares", "wanted"), [(STARVED, 3), (IDLE, 1)])
def test_a_change_waits_for_the_one_before_it(shares: list[Share], wanted: int) -> None:
    changed = sizes_of(1, (10, 2))
    assert decide(shares, changed, 10 + COOL - 1, (1, 4), 100) == 2
    assert decide(shares, changed, 10 + COOL, (1, 4), 100) == wanted
    turned = sizes_of(2, (10, 3), (20, 2))
    assert turns(turned) == 1
    assert decide(shares, turned, 20 + 2 * COOL - 1, (1, 4), 100) == 2
    assert decide(shares, turned, 20 + 2 * COOL, (1, 4), 100) == wanted


def test_one_measurement_that_disagrees_is_enough_to_stay() -> None:
    for other in (Share(waited=0.1, busy=1.0), Share(waited=0.4, busy=0.5)):
        assert decide([*STARVED[1:], other], sizes_of(2), 50, (1, 4), 100) == 2
    assert decide([*IDLE[1:], Share(waited=0.1, busy=0.3)], sizes_of(2), 50, (1, 4), 100) == 2
    assert decide([*IDLE[1:], Share(waited=0.0, busy=0.6)], sizes_of(2), 50, (1, 4), 100) == 2


def test_no_worker_is_added_where_rewards_are_slow() -> None:
    assert decide([Share(waited=0.6, busy=0.4)] * STEADY, sizes_of(2), 50, (1, 4), 100) == 2


def run(
    load: float, first: int, bounds: tuple[int, int], noise: float, seed: int, updates: int
) -> list[Size]:
    """A job whose sampling takes `load` workers as long as the trainer's step, which is 1."""
    dice, sizes = random.Random(seed), sizes_of(first)
    shares: list[Share] = []
    for update in range(1, updates):
        now = sizes[-1].workers
        sampling = load / now * (1 + noise * dice.uniform(-1, 1))
        whole = max(1.0, sampling)
        shares.append(Share(waited=1 - 1 / whole, busy=sampling / whole))
        wanted = decide(shares, sizes, update, bounds, updates - update)
        if wanted != now:
            sizes.append(Size(update=update, workers=wanted))
            shares = []
    return sizes


@settings(max_examples=200, deadline=None, derandomize=True)
@given(load=st.floats(0.05, 12), first=st.integers(1, 8))
def test_a_steady_load_is_met_without_a_step_back(load: float, first: int) -> None:
    sizes = run(load, first, (1, 8), 0.0, 0, 200)
    last = sizes[-1].workers
    assert turns(sizes) == 0, sizes
    assert last == 8 or load / last < 1.2, "the trainer is not left to wait for workers that there could be"
    assert last in (1, first) or last > first or load / (last - 1) > 0.8, "and no worker too many"


@settings(max_examples=100, deadline=None, derandomize=True)
@given(load=st.floats(0.5, 7), first=st.integers(1, 8), seed=st.integers(0, 1000))
def test_noise_makes_few_changes(load: float, first: int, seed: int) -> None:
    sizes = run(load, first, (1, 8), 0.2, seed, 400)
    assert turns(sizes) <= 3, sizes


def status(busy: float, at: float, incarnation: str = "a") -> WorkerStatus:
    return WorkerStatus(
        worker="w0",
        incarnation=incarnation,
        state="serving",
        version=None,
        digest="",
        staged=None,
        running=0,
        waiting=0,
        tokens=0,
        tokens_per_second=0.0,
        device="",
        resident=0,
        why="",
        at=at,
        busy=busy,
    )


def test_a_worker_that_was_replaced_is_not_measured() -> None:
    before = {"w0": status(10.0, 100.0), "w1": status(5.0, 100.0)}
    after = {"w0": status(14.0, 110.0), "w1": status(1.0, 110.0, "b"), "w2": status(9.0, 110.0)}
    assert busy_share(before, after) == pytest.approx(0.4)
    assert busy_share({}, after) is None


# ---- measured from what trainer and workers say ----------------------------------------------------------------
SPEC = JobSpec.model_validate(
    {
        "name": "n",
        "model": {"name": "m"},
        "schedule": {"mode": "disjoint", "updates": 100},
        "rollout": {"workers": 2, "workers_least": 1, "workers_most": 3},
    }
)


_NONE = ("reward", "loss", "grad_norm", "entropy", "ratio_mean", "clip_fraction", "gap_mean", "gap_max")
_NOUGHT = ("epoch", "trajectories", "tokens", "unscored", "lag_max", "masked_tokens", "expired", "non_finite")
BLANK = e.UpdateMetrics(
    **dict.fromkeys((*_NONE, "same_version_gap", "kl")),  # type: ignore[arg-type]
    **dict.fromkeys(_NOUGHT, 0),  # type: ignore[arg-type]
    **dict.fromkeys(("lag_mean", "response_mean", "waited", "seconds", "at"), 0.0),  # type: ignore[arg-type]
    update=0,
    mode="disjoint",
    groups=4,
    lag_counts={},
    skipped=False,
)


class Told:
    """A job's streams as trainer and workers write them: updates of 10 s."""

    def __init__(self, url: str, job: str) -> None:
        self.bus, self.job, self.watch = Bus(url), job, Watch()
        self.scaler = Scaler(self.bus, job, SPEC, "")
        self.state, _ = begin(100, ("w0", "w1"), "disjoint")
        self.made, self.spent = 0, 0.0
        self.fold(0)

    def fold(self, update: int) -> None:
        version = VersionId(0, update)
        self.state = fold(self.state, [e.Minted(version=version), e.Active(version=version, workers=("w0",))])

    def update(self, waited: float, busy: float) -> int | None:
        """One update more; what is wished for then."""
        self.made, self.spent = self.made + 1, self.spent + 10 * busy
        at = 1000.0 + 10 * self.made
        told = msgspec.structs.replace(BLANK, update=self.made, waited=10 * waited, at=at)
        self.bus.append(METRICS.at(self.job), told)
        for name in ("w0", "w1"):
            self.bus.hset(WORKERS.at(self.job), name, pack(status(self.spent, at)))
        self.fold(self.made)
        return self.scaler.wish(self.state, self.watch)


def test_a_starved_job_wishes_for_a_worker_once_it_is_sure(redis_url: str, job: str) -> None:
    told = Told(redis_url, job)
    assert [told.update(0.4, 1.0) for _ in range(STEADY + 1)] == [None] * STEADY + [3]


def test_an_idle_one_gives_one_back(redis_url: str, job: str) -> None:
    told = Told(redis_url, job)
    assert [told.update(0.0, 0.2) for _ in range(STEADY + 1)] == [None] * STEADY + [1]


@pytest.mark.parametrize(
    "unsettled",
    [
        e.Pause(),
        e.SwitchTo(mode="colocated", why="request"),
        e.ScaleTo(workers=1, why="request"),
        e.Minted(version=VersionId(0, STEADY + 2)),
        None,
    ],
    ids=["pause", "switch", "a worker leaves", "sync", "a worker is missing"],
)
def test_nothing_is_wished_for_while_something_is_under_way(
    redis_url: str, job: str, unsettled: e.Event | None
) -> None:
    told = Told(redis_url, job)
    for _ in range(STEADY):
        assert told.update(0.4, 1.0) is None
    if unsettled is None:
        told.watch.awaited["w1"] = 1.0
    else:
        told.state = fold(told.state, [unsettled])
    assert told.update(0.4, 1.0) is None


def test_the_mode_s_policy_rests_after_a_change_of_the_pool_and_the_pool_s_while_the_mode_changes(
    redis_url: str, job: str
) -> None:
    assert rested(Watch(), 0)
    changed = Watch(sizes=[Size(update=10, workers=3)])
    assert [rested(changed, 10 + passed) for passed in (0, COOL - 1, COOL)] == [False, False, True]
    told = Told(redis_url, job)
    told.state = fold(told.state, [e.SwitchTo(mode="colocated", why="policy")])
    assert [told.update(0.4, 1.0) for _ in range(2 * STEADY)] == [None] * 2 * STEADY


def test_nobody_is_asked_where_nothing_may_change(redis_url: str, job: str) -> None:
    told = Told(redis_url, job)
    told.scaler = Scaler(told.bus, job, SPEC, "a gang is admitted whole")
    assert [told.update(0.4, 1.0) for _ in range(STEADY + 2)] == [None] * (STEADY + 2)
