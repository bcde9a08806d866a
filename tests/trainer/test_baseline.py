"""When a term has drifted: what is learned, what a contract allows, and what is no more than a code that tipped."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from syncline.contract.diagnosis import Tail
from syncline.contract.precision import Expectation, PrecisionContract
from syncline.contract.recipes import RECIPES
from syncline.trainer import baseline


def _tail(mean: float) -> Tail:
    return Tail(count=8, mean=mean, median=mean, p99=mean, max=mean, signed=mean)


def _judged(
    kept: baseline.Baselines, means: Sequence[float], term: str = "mismatch"
) -> list[tuple[str, ...]]:
    """What `kept` says of updates 1, 2, ... with these means of `term`."""
    return [kept.note(update, {term: _tail(mean)}) for update, mean in enumerate(means, 1)]


def _bare(**changes: Any) -> PrecisionContract:
    return PrecisionContract(name="c", **changes)


def test_a_baseline_is_kept_by_contract_and_counts_an_update_once(tmp_path: Path) -> None:
    path = tmp_path / "baseline.json"
    first = baseline.Baselines(path, _bare(), learn=2, drift=3.0)
    assert first.note(1, {"mismatch": _tail(0.01), "staleness": _tail(0.5)}) == ()
    assert first.note(1, {"mismatch": _tail(0.01)}) == ()
    assert first.of("mismatch") is None
    again = baseline.Baselines(path, _bare(), learn=2, drift=3.0)
    again.note(2, {"mismatch": _tail(0.03)})
    assert again.of("mismatch") == pytest.approx(0.02)
    assert again.of("staleness") is None
    assert again.note(3, {"mismatch": _tail(0.061)}) == ()
    assert again.note(3, {"mismatch": _tail(0.061)}) == (), "the same update again is no second one"
    assert again.note(4, {"mismatch": _tail(0.061)}) == ("mismatch: mean 0.061 against a baseline of 0.02",)
    assert again.note(5, {"staleness": _tail(50.0)}) == ()
    other = msgspec.structs.replace(_bare(), name="another")
    assert baseline.Baselines(path, other, learn=2, drift=3.0).of("mismatch") is None
    path.write_text("no json")
    assert baseline.Baselines(path, _bare(), learn=2, drift=3.0).of("mismatch") is None


def test_once_is_a_token_that_tipped_and_twice_is_a_drift(tmp_path: Path) -> None:
    kept = baseline.Baselines(tmp_path / "baseline.json", _bare(), learn=1, drift=3.0)
    told = _judged(kept, [0.01, 0.029, 0.031, 0.01, 0.031, 0.031, 0.031, 0.01, 0.031])
    assert [bool(alarms) for alarms in told] == [False] * 5 + [True, True, False, False]


@pytest.mark.parametrize(
    ("contract", "term", "allowed"),
    [
        (_bare(), "mismatch", baseline.FLOOR),
        (_bare(expected=Expectation(high=0.2)), "mismatch", 0.2),
        (_bare(expected=Expectation(high=0.2)), "noise_decode", baseline.FLOOR),
        (RECIPES["unified_fp8"], "noise_decode", baseline.FLOOR_CODES),
        (RECIPES["int4_qat_w4a16"], "noise_decode", baseline.FLOOR),
        (RECIPES["glm52"], "kv_cache", RECIPES["glm52"].expected.high),
    ],
)
def test_what_a_contract_allows_is_no_drift(
    contract: PrecisionContract, term: str, allowed: float, tmp_path: Path
) -> None:
    for by, expected in ((0.99, False), (1.01, True)):
        kept = baseline.Baselines(tmp_path / f"{by}.json", contract, learn=1, drift=3.0)
        assert bool(_judged(kept, [0.25 * allowed, *[by * allowed] * 2], term)[-1]) is expected


def test_other_weights_show_where_the_first_mismatch_was_large(tmp_path: Path) -> None:
    """As `glm52` on its tiny model: 0.065 from random weights, 0.009 later; weights one version old make 0.13."""
    contract = RECIPES["glm52"]
    kept = baseline.Baselines(tmp_path / "baseline.json", contract, learn=5, drift=3.0)
    falling = [0.11, 0.096, 0.086, 0.015, 0.02, *[0.006, 0.012, 0.009, 0.005, 0.015] * 4]
    told = _judged(kept, [*falling, 0.13, 0.13])
    assert not any(told[:-1])
    assert told[-1] == ("mismatch: mean 0.13 against 0.009 in recent updates",)
