"""Between a claim and a segment, when Redis comes back older than what was already agreed."""

from __future__ import annotations

from pathlib import Path

import pytest
from world import World, spec_of

from syncline.contract.streams import REWARDS, TRAJECTORIES
from syncline.contract.version_path import VersionId
from syncline.trainer.intake import ClaimForgotten, Intake


def intake_of(world: World) -> Intake:
    return Intake(world.bus, world.ledger, world.spec, "h")


def test_what_no_update_is_left_for_is_told_as_expired(redis_url: str, job: str, tmp_path: Path) -> None:
    """Six groups begun under version 2, as a ledger allows that knows of no update; the trainer has made four."""
    world = World(redis_url, job, tmp_path, spec_of(schedule={"max_lag": 2}))
    groups = world.begin(6, version=2)
    for group in groups[3:5]:
        world.publish(group, (2,))
    intake = intake_of(world)
    assert intake.expire_unusable(2) == 0, "updates 3, 4 and 5 can take two each"
    assert intake.expire_unusable(4) == 4, "update 5 can take two, and it is the last within the bound"
    assert sorted(world.ledger.groups()) == groups[3:5], "those that are ready stay"
    gone = world.ledger.entry(f"{job}-{groups[0]}-0")
    assert gone is not None
    assert gone.state == "expired"
    assert gone.reason == (
        "at version 4, no update within the lag bound of 2 is left for it, as when Redis comes back older"
    )
    assert world.ledger.claim(5, 4) is not None


def test_only_the_policy_that_waits_can_wait_in_vain(redis_url: str, job: str, tmp_path: Path) -> None:
    world = World(redis_url, job, tmp_path, spec_of(schedule={"max_lag": 1, "lag_policy": "expire"}))
    world.begin(6, version=0)
    assert intake_of(world).expire_unusable(1) == 0
    assert len(world.ledger.groups()) == 6


@pytest.mark.parametrize("went_back", [True, False])
def test_a_record_that_is_gone_ends_its_trajectory_only_while_it_is_claimed(
    redis_url: str, job: str, tmp_path: Path, went_back: bool
) -> None:
    """Between the claim and its records Redis may go back: nothing of it ends then, workers sample it again."""
    world = World(redis_url, job, tmp_path, spec_of())
    world.feed(2)
    claim = world.ledger.claim(1, 0)
    assert claim is not None
    first = claim.trajectories[0]
    entry = world.ledger.entry(first)
    assert entry is not None
    world.bus.call("XDEL", TRAJECTORIES.at(job), str(entry.stream_id))
    if went_back:
        assert world.ledger.unclaim(1)
        with pytest.raises(ClaimForgotten, match="update 1: the ledger does not know of its claim any more"):
            intake_of(world).segment(claim, VersionId(0, 0))
    else:
        segment = intake_of(world).segment(claim, VersionId(0, 0))
        assert segment.lost == {first: f"its record {entry.stream_id} is gone from the stream"}


def test_rewards_are_those_of_the_moment_of_the_claim(redis_url: str, job: str, tmp_path: Path) -> None:
    world = World(redis_url, job, tmp_path, spec_of())
    world.feed(2)
    claim = world.ledger.claim(1, 0)
    assert claim is not None
    world.bus.delete(REWARDS.at(job))
    segment = intake_of(world).segment(claim, VersionId(0, 0))
    assert all(row.reward is not None and row.use == "train" for row in segment.members)
