"""What has ended waits for what ends soon after, and never for long."""

from __future__ import annotations

from waiting import wait_until

from syncline.rollout.publishing import Gathering


def test_what_ends_within_a_moment_is_published_together() -> None:
    gathering = Gathering()
    assert not gathering.over(0, sampling=True)
    assert not gathering.over(0, sampling=False), "there is nothing to publish"
    assert not gathering.over(1, sampling=True)
    assert gathering.over(64, sampling=True), "enough of them"
    assert not gathering.over(1, sampling=True)
    assert gathering.over(2, sampling=False), "nothing that could join them is sampled"
    assert not gathering.over(1, sampling=True)
    assert not gathering.over(0, sampling=False), "the one that waited was taken over"
    assert not gathering.over(1, sampling=True), "another begins to wait anew"
    wait_until(lambda: gathering.over(1, sampling=True), 5, "the end of its wait")
