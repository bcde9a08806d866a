"""The lag bound's pure decisions, against a search over what can still be trained."""

from __future__ import annotations

from itertools import combinations, pairwise

import hypothesis.strategies as st
import pytest
from hypothesis import given

from syncline.contract import lag

DUES = st.lists(st.integers(0, 6), max_size=8)
CLAIMED = st.integers(-1, 6)
BATCH = st.integers(1, 3)
LAG = st.integers(0, 3)


def schedule(oldest: list[int], claimed: int, batch: int, max_lag: int) -> bool:
    """Whether the updates after `claimed`, each taking at most `batch` groups, can train all in time.

    Earliest deadline first is optimal for unit tasks, so running it decides.
    """
    left = sorted(lag.due(version, max_lag) for version in oldest)
    version = claimed + 1
    while left:
        if left[0] < version:
            return False
        del left[:batch]
        version += 1
    return True


@given(DUES, CLAIMED, BATCH, LAG)
def test_no_breach_means_that_all_can_be_trained_in_time(
    oldest: list[int], claimed: int, batch: int, max_lag: int
) -> None:
    breach = lag.first_breach(oldest, claimed, batch, max_lag)
    assert (breach is None) == schedule(oldest, claimed, batch, max_lag)


@given(DUES, CLAIMED, BATCH, LAG, st.integers(0, 6))
def test_a_group_may_start_only_if_all_still_fit(
    oldest: list[int], claimed: int, batch: int, max_lag: int, version: int
) -> None:
    assert lag.may_start(version, oldest, claimed, batch, max_lag) == schedule(
        [*oldest, version], claimed, batch, max_lag
    )


@given(st.lists(st.tuples(st.integers(0, 4), st.booleans()), max_size=8), st.integers(0, 4), BATCH, LAG)
def test_a_claim_takes_the_earliest_deadlines_and_leaves_what_fits(
    groups: list[tuple[int, bool]], version: int, batch: int, max_lag: int
) -> None:
    begun = dict(enumerate(oldest for oldest, _ in groups))
    ready = [(group, oldest) for group, (oldest, is_ready) in enumerate(groups) if is_ready]
    chosen = lag.claim(ready, begun, version, batch, max_lag)
    if chosen is None:
        by_deadline = sorted(ready, key=lambda pair: (pair[1], pair[0]))[:batch]
        rest = [oldest for group, oldest in begun.items() if group not in dict(by_deadline)]
        assert len(ready) < batch or not schedule(rest, version, batch, max_lag)
        return
    assert len(chosen) == batch
    assert all((begun[a], a) < (begun[b], b) for a, b in pairwise(chosen))
    assert all(oldest >= begun[chosen[-1]] for group, oldest in ready if group not in chosen)
    rest = [oldest for group, oldest in begun.items() if group not in chosen]
    assert schedule(rest, version, batch, max_lag)


@given(st.dictionaries(st.integers(0, 20), st.integers(0, 6)), st.integers(0, 9), LAG)
def test_overdue_are_those_whose_lag_would_be_over(begun: dict[int, int], version: int, max_lag: int) -> None:
    assert lag.overdue(begun, version, max_lag) == sorted(
        g for g, v in begun.items() if version - v > max_lag
    )


@given(st.lists(st.tuples(st.integers(0, 4), st.booleans()), max_size=7), CLAIMED, BATCH, LAG)
def test_without_the_unusable_all_fit_and_no_fewer_would_do(
    groups: list[tuple[int, bool]], claimed: int, batch: int, max_lag: int
) -> None:
    begun = dict(enumerate(oldest for oldest, _ in groups))
    ready = {group for group, (_, is_ready) in enumerate(groups) if is_ready}

    def fits(without: tuple[int, ...]) -> bool:
        return schedule([v for g, v in begun.items() if g not in without], claimed, batch, max_lag)

    found = lag.unusable(begun, ready, claimed, batch, max_lag)
    assert fits(tuple(found))
    if found:
        assert not any(fits(fewer) for fewer in combinations(begun, len(found) - 1))
    for group in found:  # none goes for one that is due by the same version and is not ready
        assert group not in ready or all(
            other in found for other in begun if begun[other] == begun[group] and other not in ready
        )


@pytest.mark.parametrize(
    ("open_groups", "left"), [(0, 16), (15, 1), (16, 0), (17, 0)], ids=["empty", "one left", "full", "over"]
)
def test_credits_limit_volume(open_groups: int, left: int) -> None:
    assert lag.credits(1, 8, open_groups) == left
