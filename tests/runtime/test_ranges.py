"""Entries that are asked for by their ids: together where they lie together, and no other one with them."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from syncline.contract.streams import PREFIX
from syncline.runtime.bus import AT_ONCE, Bus
from syncline.runtime.messages import id_order, ranges_of

IDS = st.sets(st.tuples(st.integers(1, 12), st.integers(0, 12)), max_size=3 * AT_ONCE).map(sorted)


@pytest.fixture(scope="module")
def bus(redis_url: str) -> Iterator[Bus]:
    bus = Bus(redis_url)
    yield bus
    bus.close()


def text(id: tuple[int, int]) -> str:
    return f"{id[0]}-{id[1]}"


@given(ids=IDS)
def test_ranges_hold_the_ids_and_no_room_for_another(ids: list[tuple[int, int]]) -> None:
    held = []
    for first, last in ranges_of(map(text, ids)):
        (milliseconds, low), (same, high) = id_order(first), id_order(last)
        assert milliseconds == same
        held += [(milliseconds, sequence) for sequence in range(low, high + 1)]
    assert held == ids


def test_what_one_script_added_is_one_range() -> None:
    assert ranges_of(["7-0", "7-1", "7-2", "9-0", "9-2", "10-0"]) == [
        ("7-0", "7-2"),
        ("9-0", "9-0"),
        ("9-2", "9-2"),
        ("10-0", "10-0"),
    ]


@given(there=IDS, asked=IDS, order=st.randoms(use_true_random=False))
def test_entries_come_by_the_ids_asked_for_oldest_first(
    bus: Bus, there: list[tuple[int, int]], asked: list[tuple[int, int]], order: Random
) -> None:
    key = f"{PREFIX}:{{ranges-{uuid.uuid4().hex}}}:bus"
    bus.many([("XADD", key, text(id), b"m", text(id)) for id in there])
    ids = [text(id) for id in [*asked, *asked[:2]]]
    order.shuffle(ids)
    found = bus.entries_at(key, ids)
    assert list(found) == [text(id) for id in asked if id in set(there)]
    assert all(entry.id == id and entry.fields == {b"m": id.encode()} for id, entry in found.items())
    bus.delete(key)
