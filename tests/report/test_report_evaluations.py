"""Evaluations stand beside the reward curve, with their intervals and with what did not count."""

from __future__ import annotations

import msgspec
from evidence import evidence

from syncline.contract.evaluation import Evaluation
from syncline.gateway.report import render
from syncline.gateway.report_evaluations import lines, newest, rows


def one(version: int, epoch: int = 0, **changes: object) -> Evaluation:
    made = Evaluation(
        job="j0123456789",
        of="j0123456789",
        shared=True,
        version=version,
        epoch=epoch,
        digest="d" * 64,
        contract="c" * 64,
        model="tiny-dense",
        prompts=64,
        samples=4,
        first=1 << 40,
        seed=0,
        counted=250,
        correct=125,
        threshold=1.0,
        mean_reward=0.6,
        reward_interval=(0.5, 0.7),
        pass_at={"1": (0.5, 0.42, 0.58), "4": (0.8, 0.7, 0.9)},
        pass_prompts={"1": 64, "4": 61},
        unscored=6,
        lost=0,
        foreign=0,
        sampling={},
        when=1.0,
    )
    return msgspec.structs.replace(made, **changes)


def test_points_and_intervals_are_at_their_versions() -> None:
    found = [one(10), one(20, mean_reward=0.7), one(10, epoch=1, mean_reward=0.65)]
    reward, rate = lines(found)
    assert reward.points == [(10.0, 0.65), (20.0, 0.7)]
    assert reward.ranges == [(10.0, 0.5, 0.7), (20.0, 0.5, 0.7)]
    assert rate.label == "held out, pass@1"
    assert rate.ranges == [(10.0, 0.42, 0.58), (20.0, 0.42, 0.58)]
    assert [str(e.id) for e in newest(found)] == ["1.10", "0.20"]
    assert lines([]) == []


def test_the_report_shows_them_and_what_did_not_count() -> None:
    without = render(evidence(30))
    shown = render(msgspec.structs.replace(evidence(30), evaluations=(one(10), one(20))))
    assert "held out" not in without
    assert "Held-out prompts" not in without
    assert "pass@4 0.800 [0.700, 0.900] over 61 prompts" in shown
    assert "6 unscored" in shown
    assert shown.count('<line class="line-c"') == 2
    assert shown.count('<line class="line-b"') == 2


def test_what_is_not_known_is_a_dash() -> None:
    (row,) = rows([one(10, mean_reward=None, pass_at={"4": None}, unscored=0)])
    assert row[3:6] == ["–", "pass@4 –", "none"]
    reward, rate = lines([one(10, mean_reward=None, reward_interval=None, pass_at={"4": None})])
    assert reward.points == [(10.0, None)]
    assert (rate.points, rate.ranges) == ([(10.0, None)], [])
