"""Which prompts are drawn: permutations, exact shares, and a resume at any point that changes nothing."""

from __future__ import annotations

from collections import Counter
from typing import Any

import hypothesis.strategies as st
import msgspec
import pytest
from hypothesis import given, settings

from syncline.contract.prompts_spec import PromptsSpec
from syncline.runtime.ledger_shapes import Outcome
from syncline.scheduler.outcomes import fold, in_vain
from syncline.scheduler.prompts import Draw, Drawn, Rates, Sequences, Source, shuffled

ORDERS = st.sampled_from(["given", "shuffled", "easiest_first"])


def sequences(*sources: Source, seed: int = 0, **keys: Any) -> Sequences:
    return Sequences(sources, PromptsSpec.model_validate(keys), seed)


def drawn_from(seq: Sequences, count: int) -> list[Draw]:
    state = seq.begin(0)
    return [seq.next(state, group, {}) for group in range(count)]


def ended(draw: Draw, how: Any, mean: float = 0.5, low: float = 0.0, high: float = 1.0) -> Outcome:
    scored = 2 if how in ("trained", "filtered") else 0
    return Outcome(draw.group, draw.prompt, how, "why", scored, mean, low, high)


# ---- one data set ------------------------------------------------------------------------------------------------
@given(size=st.integers(1, 300), key=st.binary(min_size=0, max_size=20))
def test_a_shuffle_is_a_permutation(size: int, key: bytes) -> None:
    assert sorted(shuffled(place, size, key) for place in range(size)) == list(range(size))


def test_a_shuffle_is_even() -> None:
    """Over 4,000 keys each of 5 items comes to each place about as often, and most of 120 orders appear."""
    orders = [tuple(shuffled(place, 5, b"%d" % key) for place in range(5)) for key in range(4000)]
    counts = Counter((place, order[place]) for order in orders for place in range(5))
    assert len(counts) == 25
    assert all(650 < times < 950 for times in counts.values()), counts  # 800 +- 6 standard deviations
    assert len(set(orders)) > 110


@given(
    first=st.integers(0, 50),
    items=st.integers(1, 40),
    beyond=st.none() | st.integers(0, 9),
    epochs=st.integers(1, 4),
    seed=st.integers(0, 9),
    order=ORDERS,
    hard=st.booleans(),
)
def test_each_epoch_draws_each_item_of_the_range_once(
    first: int, items: int, beyond: int | None, epochs: int, seed: int, order: Any, hard: bool
) -> None:
    whole = None if beyond is None else first + items + beyond
    marks = tuple(float(i % 3) for i in range(items)) if hard else ()
    one = Source(name="a", first=first, items=items, whole=whole, order=order, difficulties=marks)
    draws = drawn_from(sequences(one, seed=seed, order=order), epochs * items)
    for epoch in range(epochs):
        part = draws[epoch * items : (epoch + 1) * items]
        offset = 0 if whole is None else epoch * whole
        assert sorted(draw.prompt - offset for draw in part) == list(range(first, first + items))
        assert {draw.epoch for draw in part} == {epoch}
        if hard and order == "easiest_first":
            found = [marks[draw.prompt - offset - first] for draw in part]
            assert found == sorted(found)


def test_epochs_are_shuffled_differently() -> None:
    one = Source(name="a", items=50, whole=50, order="shuffled")
    prompts = [draw.prompt % 50 for draw in drawn_from(sequences(one), 150)]
    assert len({tuple(prompts[start : start + 50]) for start in (0, 50, 100)}) == 3
    assert prompts != [draw.prompt % 50 for draw in drawn_from(sequences(one, seed=1), 150)]


def test_the_given_order_of_an_endless_data_set_is_the_groups_own_number() -> None:
    assert [draw.prompt for draw in drawn_from(sequences(Source(name="a")), 9)] == list(range(9))
    held_out = drawn_from(sequences(Source(name="a", first=100)), 3)
    assert [draw.prompt for draw in held_out] == [100, 101, 102]


# ---- several data sets -------------------------------------------------------------------------------------------
@given(weights=st.lists(st.integers(1, 9), min_size=1, max_size=4), rounds=st.integers(1, 5))
def test_each_round_has_exact_shares(weights: list[int], rounds: int) -> None:
    seq = sequences(*(Source(name=f"s{i}", weight=weight) for i, weight in enumerate(weights)))
    size, count = sum(weights), len(weights)
    draws = drawn_from(seq, rounds * size)
    for start in range(0, len(draws), size):
        shares = Counter(draw.prompt % count for draw in draws[start : start + size])
        assert [shares[i] for i in range(count)] == weights
    for which in range(count):
        own = [draw.prompt // count for draw in draws if draw.prompt % count == which]
        assert own == list(range(len(own)))


# ---- what becomes of groups --------------------------------------------------------------------------------------
def test_a_failed_group_s_prompt_comes_again_until_its_budget_is_spent() -> None:
    seq = sequences(Source(name="a"), retries=2)
    state, rates = seq.begin(0), Rates()
    first = seq.next(state, 0, rates)
    for group in (1, 2):
        fold(state, ended(Draw(group - 1, first.prompt, 0), "failed"), seq, rates)
        assert seq.next(state, group, rates).prompt == first.prompt
    fold(state, ended(Draw(2, first.prompt, 0), "expired"), seq, rates)
    assert seq.next(state, 3, rates).prompt == 1
    (tally,), (lost,) = state.tallies, state.lost
    assert (tally.drawn, tally.again, tally.failed, tally.expired, tally.given_up) == (4, 2, 2, 1, 1)
    assert (lost.prompt, lost.tries, lost.reason) == (0, 2, "expired: why")
    assert state.tries == {}


def test_what_an_ended_job_leaves_is_neither_lost_nor_drawn_again() -> None:
    seq = sequences(Source(name="a"), retries=2)
    state = seq.begin(0)
    draw = seq.next(state, 0, {})
    fold(state, Outcome(0, draw.prompt, "expired", "job ended", 0, 0.0, 0.0, 0.0), seq, {})
    assert (state.tallies[0].unused, state.tallies[0].expired, state.again, state.lost) == (1, 0, [], [])
    half = Outcome(
        1, seq.next(state, 1, {}).prompt, "filtered", "fewer than two scored members", 1, 0.0, 0.0, 0.0
    )
    fold(state, half, seq, {}, left=True)  # its other members had ended with the job
    fold(state, ended(seq.next(state, 2, {}), "trained"), seq, {}, left=True)
    tally = state.tallies[0]
    assert (tally.unused, tally.filtered, tally.trained, tally.scored) == (2, {}, 1, 1)


def test_filtered_groups_are_counted_by_reason_and_end_a_barren_job() -> None:
    seq = sequences(Source(name="a"), zero_variance="filter", give_up=2)
    state = seq.begin(0)
    for group, value in enumerate((0.0, 1.0, 0.25, 0.0)):
        assert in_vain(state, seq, batch=2) is None
        fold(state, ended(seq.next(state, group, {}), "filtered", value, value, value), seq, {})
    assert state.tallies[0].filtered == {"all 0": 2, "all 1": 1, "all equal": 1}
    story = in_vain(state, seq, batch=2)
    assert story is not None
    assert "4 groups in a row" in story
    assert "all 0: 2" in story
    trained_as_they_are = sequences(Source(name="a"), give_up=2)
    assert in_vain(state, trained_as_they_are, batch=2) is None
    fold(state, ended(seq.next(state, 4, {}), "trained"), seq, {})
    assert in_vain(state, seq, batch=2) is None


def test_what_is_too_easy_or_too_hard_rests_and_comes_again() -> None:
    one = Source(name="a", items=4, whole=4)
    seq = sequences(one, easiest=0.9, hardest=0.1, rest=1, last=3)
    state, rates = seq.begin(0), Rates()
    means = {0: 1.0, 1: 0.5, 2: 0.0, 3: 0.9}
    group, epochs = 0, [list[int]() for _ in range(5)]
    while state.places[0] < 16:
        draw = seq.next(state, group, rates)
        epochs[draw.epoch].append(draw.prompt % 4)
        fold(state, ended(draw, "trained", means[draw.prompt % 4]), seq, rates)
        group += 1
    assert epochs[:4] == [[0, 1, 2, 3], [1, 3], [0, 1, 2, 3], [1, 3]]
    assert state.tallies[0].rested == 4
    assert (state.tallies[0].scored, state.epochs) == (group, {})


def test_by_measured_reward_the_next_epoch_begins_with_what_went_best() -> None:
    one = Source(name="a", items=6, whole=6, order="easiest_first")
    seq = sequences(one, order="easiest_first")
    state, rates = seq.begin(0), Rates()
    for group in range(6):
        draw = seq.next(state, group, rates)
        fold(state, ended(draw, "trained", draw.prompt / 10), seq, rates)
    assert [seq.next(state, group, rates).prompt for group in range(6, 12)] == [11, 10, 9, 8, 7, 6]


# ---- resume ------------------------------------------------------------------------------------------------------
class World:
    """A scheduler that may die between any two steps, and what outlives it: its memory, the ledger, the outcomes."""

    def __init__(self, sources: list[Source], keys: dict[str, Any], ends: dict[int, Any]) -> None:
        self.sources, self.keys, self.ends = sources, keys, ends
        self.submitted: dict[int, int] = {}
        self.outcomes: list[Outcome] = []
        self.memory = b""
        self.kept: dict[str, Any] = {"rates": {}, "orders": {}}
        self.born()

    def born(self) -> None:
        self.seq = Sequences(self.sources, PromptsSpec.model_validate(self.keys), 7)
        self.rates: Rates = dict(self.kept["rates"])
        self.seq.orders = dict(self.kept["orders"])
        self.state = msgspec.json.decode(self.memory, type=Drawn) if self.memory else self.seq.begin(0)
        self.group = max([*self.submitted, *(draw.group for draw in self.state.pending)], default=-1) + 1
        self.submit()

    def turn(self, dies: str, seen: int) -> None:
        """Fold up to `seen` outcomes, draw two prompts, save, submit; die `before` or `after` the save, or not."""
        for outcome in self.outcomes[int(self.state.cursor) : seen]:
            fold(self.state, outcome, self.seq, self.rates)
        self.state.cursor = str(max(seen, int(self.state.cursor)))
        for _ in range(2):
            self.state.pending.append(self.seq.next(self.state, self.group, self.rates))
            self.group += 1
        if dies == "before":
            return self.born()
        self.memory = msgspec.json.encode(self.state)
        self.kept = {"rates": dict(self.rates), "orders": dict(self.seq.orders)}
        if dies == "after":
            return self.born()
        return self.submit()

    def submit(self) -> None:
        for draw in self.state.pending:
            if draw.group not in self.submitted:
                self.submitted[draw.group] = draw.prompt
                how = self.ends.get(draw.group % 5, "trained")
                self.outcomes.append(ended(draw, how, (draw.prompt * 7 % 10) / 10))
        self.state.pending = []


@settings(max_examples=60, deadline=None)
@given(
    deaths=st.lists(st.sampled_from(["before", "after", "no", "no"]), min_size=6, max_size=25),
    mixed=st.booleans(),
    order=ORDERS,
    retries=st.integers(0, 2),
    bounds=st.booleans(),
    ends=st.dictionaries(st.integers(0, 4), st.sampled_from(["failed", "expired", "filtered", "trained"])),
)
def test_a_scheduler_killed_anywhere_draws_as_one_that_lived(
    deaths: list[str], mixed: bool, order: Any, retries: int, bounds: bool, ends: dict[int, Any]
) -> None:
    sources = [Source(name="a", items=7, whole=9, order=order)]
    if mixed:
        sources.append(Source(name="b", items=5, weight=2, order=order))
    keys: dict[str, Any] = {"order": order, "retries": retries, "last": 6}
    keys |= {"easiest": 0.8, "hardest": 0.2} if bounds else {}
    lived, died = World(sources, keys, ends), World(sources, keys, ends)
    for death in deaths:
        seen = len(lived.outcomes)
        lived.turn("no", seen)
        died.turn(death, seen)
        if death == "before":  # nothing of that turn is left: the successor makes it
            died.turn("no", seen)
        assert died.submitted == lived.submitted
    assert msgspec.json.encode(died.state) == msgspec.json.encode(lived.state)
    assert (died.rates, died.seq.orders) == (lived.rates, lived.seq.orders)


def test_a_state_stays_small() -> None:
    """After 20,000 draws of a data set of 5,000 items, what is saved is no larger than after 200."""
    seq = sequences(Source(name="a", items=5000, whole=5000, order="shuffled"), order="shuffled", retries=1)
    state, sizes = seq.begin(0), list[int]()
    for group in range(20_000):
        draw = seq.next(state, group, {})
        fold(state, ended(draw, "failed" if group % 50 == 0 else "trained"), seq, {})
        if group in (199, 19_999):
            sizes.append(len(msgspec.json.encode(state)))
    assert sizes[1] < sizes[0] + 12_000
    assert sizes[1] < 16_000


def test_the_memory_of_a_job_from_before_goes_on_where_it_was() -> None:
    seq = sequences(Source(name="a"))
    assert seq.next(seq.begin(17), 17, {}).prompt == 17


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 16, 17])
def test_small_sets_are_shuffled_too(size: int) -> None:
    orders = {tuple(shuffled(place, size, b"%d" % key) for place in range(size)) for key in range(200)}
    assert len(orders) == 1 if size == 1 else len(orders) > 1
