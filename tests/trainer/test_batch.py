"""Who trains and who does not: the rules of incomplete groups, masks and records that do not fit."""

from __future__ import annotations

from array import array
from collections.abc import Mapping

import msgspec
import pytest
from trainer_records import reward, trajectory
from world import spec_of

from syncline.contract.job import JobSpec
from syncline.contract.job_rules import problems
from syncline.contract.token_path import Reward, SamplingConvention, Segment, Trajectory, check
from syncline.runtime.ledger import Claim, ClaimedGroup
from syncline.runtime.segments import SegmentRow
from syncline.trainer.batch import decide, samples_of

SPEC = spec_of(loss={"advantage": "group_mean"})


def group_of(
    values: list[float | None],
    spec: JobSpec = SPEC,
    *,
    missing: tuple[str, ...] = (),
    gone: tuple[int, ...] = (),
    version: int = 1,
    records: Mapping[int, Trajectory] | None = None,
    rewards: Mapping[int, Reward] | None = None,
) -> tuple[SegmentRow, ...]:
    """One group of `values` as rewards. `gone`: members whose record is lost."""
    made = [trajectory(index=i, contract="c") for i in range(len(values))]
    made = [(records or {}).get(i, t) for i, t in enumerate(made)]
    ids = tuple(t.trajectory for t in made)
    claim = Claim(version + 1, version, (ClaimedGroup(0, ids, missing),))
    there = {t.trajectory: t for i, t in enumerate(made) if i not in gone}
    scored = {t.trajectory: reward(t, v) for t, v in zip(made, values, strict=True)}
    scored |= {ids[i]: r for i, r in (rewards or {}).items()}
    return decide(claim, there, scored, spec, "c")


def uses(rows: tuple[SegmentRow, ...]) -> str:
    return "".join("t" if row.use == "train" else "f" for row in rows)


def test_a_whole_group_trains_with_lag_and_advantage() -> None:
    rows = group_of([1.0, 0.0, 0.0, 1.0], version=3)
    assert uses(rows) == "tttt"
    assert [row.advantage for row in rows] == [0.5, -0.5, -0.5, 0.5]
    assert {row.lag for row in rows} == {3}
    assert all(row.used_mask == row.trajectory.loss_mask for row in rows)


@pytest.mark.parametrize(
    ("values", "expected"),
    [([1.0, 0.0, None, 0.0], "ttft"), ([1.0, None, None, None], "ffff"), ([None] * 4, "ffff")],
)
def test_unscored_members_are_left_out_and_two_are_enough(values: list[float | None], expected: str) -> None:
    assert uses(group_of(values)) == expected


def test_the_baseline_is_that_of_the_scored_members() -> None:
    rows = group_of([1.0, None, 0.0, 0.5])
    assert [row.advantage for row in rows] == [0.5, 0.0, -0.5, 0.0]
    assert [row.use for row in rows] == ["train", "filtered", "train", "train"]


def test_missing_members_are_named_when_the_group_is_dropped() -> None:
    spec = spec_of(batch={"incomplete": "drop"})
    rows = group_of([1.0, 0.0], spec, missing=("j0-0-7",))
    assert uses(rows) == "ff"
    assert all("without j0-0-7" in row.why for row in rows)
    assert uses(group_of([1.0, 0.0], spec)) == "tt"
    assert uses(group_of([1.0, 0.0, 0.5], spec, gone=(2,))) == "ff"
    assert uses(group_of([1.0, 0.0], SPEC, missing=("j0-0-7",))) == "tt"


def test_members_lost_on_the_way_shrink_the_group() -> None:
    assert uses(group_of([1.0, 0.0, 0.5], gone=(0,))) == "tt"
    alone = group_of([1.0, 0.0, 0.5], gone=(0, 2))
    assert uses(alone) == "f"
    assert "fewer than two scored members: without j0-0-0, j0-0-2" in alone[0].why


def test_equal_rewards_train_with_advantage_nought() -> None:
    rows = group_of([0.3, 0.3, 0.3])
    assert uses(rows) == "ttt"
    assert [row.advantage for row in rows] == [0.0, 0.0, 0.0]


def test_a_failed_reward_says_why() -> None:
    broken = Reward(trajectory="j0-0-1", attempt=1, state="failed", value=None, reason="scorer crashed")
    rows = group_of([1.0, 1.0, 0.0], rewards={1: broken})
    assert uses(rows) == "tft"
    assert rows[1].why == "reward failed: scorer crashed"


def test_records_that_cannot_be_scored_again_are_filtered_by_reason() -> None:
    foreign = trajectory(index=0, contract="other")
    cut = msgspec.structs.replace(
        trajectory(index=1), convention=SamplingConvention(logprob="processed", top_p=0.9)
    )
    blank = msgspec.structs.replace(trajectory(index=3), loss_mask=bytes(trajectory(index=3).sampled))
    rows = group_of([1.0, 0.0, 0.5, 0.25, 0.75, 0.1], records={0: foreign, 1: cut, 3: blank})
    assert uses(rows) == "fftftt"
    assert "precision contract" in rows[0].why
    assert "cut" in rows[1].why
    assert rows[3].why == "no token of it is in the loss"


def test_old_tokens_are_masked_by_span_and_all_old_is_filtered() -> None:
    spec = spec_of(schedule={"lag_policy": "mask_old_tokens", "max_lag": 1})
    mixed = trajectory(index=0, versions=(0, 3, 4), sampled=6)
    old = trajectory(index=1, versions=(1, 2), sampled=4)
    young = trajectory(index=2, versions=(4,), sampled=4)
    rows = group_of([1.0, 0.0, 0.5], spec, version=4, records={0: mixed, 1: old, 2: young})
    assert [row.used_mask for row in rows] == [bytes([0, 0, 1, 1, 1, 1]), bytes(4), bytes([1] * 4)]
    assert uses(rows) == "tft"
    assert rows[1].why == "every token is over the lag bound"
    assert uses(group_of([1.0, 0.0, 0.5], SPEC, version=4, records={1: old})) == "ttt"


def test_samples_carry_what_the_engine_needs() -> None:
    t = check(
        msgspec.structs.replace(
            trajectory(index=0, sampled=6, temperature=0.5),
            segments=(
                Segment(kind="prompt", start=0, end=2),
                Segment(kind="sampled", start=2, end=4),
                Segment(kind="observed", start=4, end=5),
                Segment(kind="sampled", start=5, end=9),
            ),
            tokens=array("i", range(10, 19)),
        )
    )
    rows = group_of([1.0, 0.0], records={0: t})
    sample = samples_of(rows)[0]
    assert list(sample.positions) == [2, 3, 5, 6, 7, 8]
    assert (sample.temperature, sample.advantage) == (0.5, 0.5)
    assert sample.behaviour is t.logprobs


def test_a_dual_clip_that_the_loss_would_refuse_is_refused_at_submit() -> None:
    found = problems(spec_of(loss={"kind": "cispo", "dual_clip": 3.0}))
    assert [p.path for p in found] == ["loss.dual_clip"]
    assert problems(spec_of(loss={"kind": "gspo", "dual_clip": 3.0})) == []
