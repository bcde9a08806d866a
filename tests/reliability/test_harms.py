"""Each kind of harm to messages, consumers and Redis: the weights are those of a run without it, or say whom it hit."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
from field import Field
from harms import HARMS, Harm
from lives import harmed
from own_redis import OwnRedis

SHORT = (
    "a record is posted twice at once",
    "an unreadable work item",
    "a reward is unreadable",
    "the consumer group is destroyed",
    "a slow worker posts what was taken over",
    "Redis is killed, appendfsync everysec",
    "Redis comes back a moment older",
    "Redis is out of memory",
)
"""Of each class one, or what was once not survived; the others are in the long form."""


def harms() -> list[Any]:
    return [
        pytest.param(
            harm,
            id=harm.name.replace(" ", "_"),
            marks=() if harm.name in SHORT else pytest.mark.long,
        )
        for harm in HARMS
    ]


@pytest.mark.parametrize("harm", harms())
def test_harm(field_of: Callable[..., Field], harm: Harm) -> None:
    server = OwnRedis(harm.own) if harm.own else None
    try:
        more = {"schedule": {"updates": 12}}
        job = field_of(server.url, **more) if server else field_of(**more)
        story = harmed(job, harm, server, times=2, seed=1)
        assert len(story.struck) == 2, f"done {len(story.struck)} times"
        assert story.verdict.clean, story.verdict
        told = [line for line in story.verdict.reported if not re.fullmatch(f"\\S+ (?:{harm.told})", line)]
        assert told == []
    finally:
        if server:
            server.remove()
