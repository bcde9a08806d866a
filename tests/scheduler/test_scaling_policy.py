"""The pool's policy: what it may never do, whatever was measured, and that it settles under any steady load."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from syncline.contract.events import WorkerStatus
from syncline.scheduler.saved import Size
from syncline.scheduler.scaling import COOL, STEADY, Share, busy_share, decide, turns

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
