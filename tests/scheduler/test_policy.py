"""The measured policy on synthetic traces: it switches when that pays, once, and not for noise."""

from __future__ import annotations

import random

import pytest

from syncline.contract.events import Mode, Phase, PhaseName, UpdateMetrics
from syncline.scheduler.machine import begin
from syncline.scheduler.policy import Cycle, cycles, decide, fits


def colocated(sampling: float, training: float, toll: float = 0.5) -> Cycle:
    whole = sampling + training + toll
    return Cycle(mode="colocated", whole=whole, sampling=sampling, training=training)


def disjoint(whole: float, training: float = 1.0, wasted: float = 0.0) -> Cycle:
    return Cycle(mode="disjoint", whole=whole, sampling=whole, training=training, wasted=wasted)


def test_balanced_work_overlaps_and_so_goes_disjoint() -> None:
    history = [colocated(10, 9)] * 6
    assert decide(history, "colocated", left=50, fits=True, since_switch=6) == "disjoint"


@pytest.mark.parametrize(
    ("why", "left", "fits_", "since"),
    [("too little left to pay", 1, True, 6), ("no memory", 50, False, 6), ("memory unknown", 50, None, 6),
     ("switched just now", 50, True, 2)],
)  # fmt: skip
def test_it_stays(why: str, left: int, fits_: bool | None, since: int) -> None:
    assert decide([colocated(10, 9)] * 6, "colocated", left, fits_, since) is None, why


def test_lopsided_work_gains_too_little() -> None:
    assert decide([colocated(10, 0.5, toll=0.2)] * 8, "colocated", 100, True, 8) is None


def test_one_slow_update_is_no_reason() -> None:
    history = [colocated(10, 0.5, toll=0.2)] * 7 + [colocated(10, 8)]
    assert decide(history, "colocated", 100, True, 8) is None


def test_what_disjoint_really_took_counts_more_than_the_prediction() -> None:
    history = [disjoint(25.0)] * 5 + [colocated(10, 9)] * 6
    assert decide(history, "colocated", 100, True, 6) is None


def test_it_goes_back_where_disjoint_turns_out_dear() -> None:
    history = [colocated(10, 9)] * 6 + [disjoint(30.0)] * 5
    assert decide(history, "disjoint", 100, True, 5) == "colocated"
    dropped = [colocated(10, 9)] * 6 + [disjoint(14.0, wasted=0.5)] * 5
    assert decide(dropped, "disjoint", 100, True, 5) == "colocated"


def test_it_leaves_disjoint_at_once_when_memory_is_over() -> None:
    assert decide([], "disjoint", 100, False, 0) == "colocated"


def test_disjoint_without_anything_to_compare_tries_the_other_where_one_side_waits() -> None:
    """Sampling alone cannot be told while both overlap: a few updates must tell, if the rest can pay for them."""
    lopsided = [disjoint(30.0, training=1.0)] * 9
    assert decide(lopsided, "disjoint", 100, True, 9) == "colocated"
    balanced = [disjoint(30.0, training=27.0)] * 9
    assert decide(balanced, "disjoint", 1000, True, 9) is None
    trainer_bound = [disjoint(30.0, training=30.0)] * 9
    assert decide(trainer_bound, "disjoint", 100, True, 9) == "colocated"
    assert decide(trainer_bound, "disjoint", 70, True, 9) is None, "the trial may cost four updates of 70"


@pytest.mark.parametrize("whole", [40.0, 30.2])
def test_a_trial_that_does_not_pay_is_over_soon_and_not_repeated(whole: float) -> None:
    """Disjoint, a trial of colocated, and back: what was measured of it counts from then on."""
    before = [disjoint(30.0, training=10.0)] * 5
    trial = [colocated(whole - 10.0, 10.0)] * 3
    back = decide([*before, *trial], "colocated", 100, True, 4)
    assert back == ("disjoint" if whole == 40.0 else None)
    assert decide([*before, *trial, *before], "disjoint", 1000, True, 5) is None


def test_measurements_of_the_other_mode_follow_the_drift() -> None:
    """Sampling takes twice as long disjoint, training as long. Trainings grow: what was dear begins to pay."""
    history = [colocated(10, 3.3)] * 5 + [disjoint(20.0, training=3.3)] * 4 + [colocated(10, 3.3)] * 5
    assert decide(history, "colocated", 100, True, 5) is None
    assert decide([*history, *[colocated(10, 30)] * 5], "colocated", 100, True, 10) == "disjoint"
    grown = [*history, *[colocated(10, 30)] * 5, *[disjoint(30.0, training=30.0)] * 5]
    assert decide(grown, "disjoint", 100, True, 5) is None
    shrunk = [*grown, *[disjoint(20.0, training=3.3)] * 5]
    assert decide(shrunk, "disjoint", 100, True, 10) == "colocated"


def test_noise_does_not_make_it_swing() -> None:
    """A closed loop: whatever it picks is what is measured next. It may change once, and then stays."""
    dice = random.Random(7)
    history: list[Cycle] = []
    mode: Mode = "colocated"
    changes, since = 0, 0
    for update in range(200):
        sampling, training = dice.gauss(10, 1.5), dice.gauss(8, 1.5)
        history.append(
            colocated(sampling, training)
            if mode == "colocated"
            else disjoint(max(sampling, training) * 1.1, training)
        )
        since += 1
        wish = decide(history, mode, 200 - update, True, since)
        if wish is not None:
            mode, since, changes = wish, 0, changes + 1
    assert mode == "disjoint"
    assert changes == 1


def metric(update: int, at: float, mode: Mode = "colocated", **more: float) -> UpdateMetrics:
    values = dict.fromkeys(
        ("reward", "loss", "grad_norm", "entropy", "ratio_mean", "clip_fraction", "gap_mean", "gap_max",
         "same_version_gap", "kl")
    ) | dict.fromkeys(
        ("epoch", "trajectories", "tokens", "unscored", "lag_max", "masked_tokens", "expired", "non_finite"), 0
    )  # fmt: skip
    return UpdateMetrics(
        **{"lag_mean": 0.0, "response_mean": 0.0, "waited": 0.0, "seconds": 3.0, **values, **more},  # type: ignore[arg-type]
        update=update, mode=mode, groups=4, lag_counts={}, skipped=False, at=at,
    )  # fmt: skip


def phase(name: PhaseName, at: float) -> Phase:
    return Phase(
        seq=1, mode="colocated", phase=name, rollout="awake", trainer="asleep", gate="open", update=0, at=at
    )


def test_cycles_are_read_from_metrics_and_phases() -> None:
    phases = [
        phase("sync", 100),
        phase("sample", 101),
        phase("drain", 106),
        phase("train", 107),
        phase("sync", 111),
    ]
    found = cycles([metric(1, 100.0), metric(2, 111.0)], phases)
    assert found == [Cycle(mode="colocated", whole=11.0, sampling=6.0, training=3.0)]
    assert found[0].alternating == 2.0


def test_updates_around_a_pause_or_a_switch_are_left_out() -> None:
    assert cycles([metric(1, 1.0), metric(2, 9.0)], [phase("sample", 0), phase("paused", 3)]) == []
    assert cycles([metric(1, 1.0), metric(2, 9.0, "disjoint")], [phase("sample", 0)]) == []
    assert cycles([metric(1, 1.0), metric(3, 9.0)], [phase("sample", 0)]) == []


def test_memory_is_known_once_every_engine_was_awake() -> None:
    state, _ = begin(4, ("w0", "w1"), "colocated")
    assert fits({"w0": 3, "trainer": 4}, state, 10) is None
    assert fits({"w0": 3, "w1": 3, "trainer": 4}, state, 10) is True
    assert fits({"w0": 3, "w1": 3, "trainer": 5}, state, 10) is False
