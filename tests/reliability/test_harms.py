"""Each kind of harm to messages, consumers and Redis: the weights are those of a run without it, or say whom it hit."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from field import Field
from harms import HARMS, Harm
from lives import harmed
from own_redis import OwnRedis


@pytest.mark.parametrize("harm", HARMS, ids=lambda harm: harm.name.replace(" ", "_"))
def test_harm(field_of: Callable[..., Field], harm: Harm) -> None:
    server = OwnRedis(harm.own) if harm.own else None
    try:
        more = {"schedule": {"updates": 12}}
        job = field_of(server.url, **more) if server else field_of(**more)
        story = harmed(job, harm, server, times=2, seed=1)
        assert len(story.struck) == 2, f"done {len(story.struck)} times"
        assert story.verdict.clean, story.verdict
        if harm.loses == "none":
            assert story.verdict.reported == []
    finally:
        if server:
            server.remove()
