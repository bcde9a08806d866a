"""The bus on a real server: groups, tombstones, lost servers, flushed servers, interrupted commands."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from types import FrameType
from typing import Any

import pytest
from records import items
from server import OwnServer, own_server
from waiting import wait_until

from syncline.contract.events import Drained, Event, Finished, WorkItem
from syncline.contract.streams import PREFIX
from syncline.contract.token_path import Reward
from syncline.runtime.bus import BadMessage, Bus, BusDown, CommandRefused, Entry, UnsafeServer, pack, unpack


@pytest.fixture
def bus(redis_url: str) -> Iterator[Bus]:
    bus = Bus(redis_url)
    yield bus
    bus.close()


@pytest.fixture
def key(job: str) -> str:
    """A fresh key, under the prefix that all keys of the product have: other suites look at all there are."""
    return f"{PREFIX}:{{{job}}}:bus"


@pytest.fixture
def server() -> Iterator[OwnServer]:
    with own_server() as server:
        yield server


# ---- messages -------------------------------------------------------------------------------------------------
def test_a_message_comes_back_as_its_type(bus: Bus, key: str) -> None:
    [item] = items(key, 0, 1)
    id = bus.append(key, item)
    [entry] = bus.read({key: "0"}, None)[key]
    assert entry.id == id
    assert unpack(entry, WorkItem) == item
    assert unpack(pack(Finished(updates=3)), Event) == Finished(updates=3)


def test_a_bad_message_is_named_by_key_and_id() -> None:
    entry = Entry("5-1", {b"m": pack(Drained(seq=1))}, "syncline:work")
    with pytest.raises(BadMessage, match="syncline:work 5-1"):
        unpack(entry, Reward)
    with pytest.raises(BadMessage, match=r"syncline:work 5-2: no field 'm' among \['x'\]"):
        unpack(Entry("5-2", {b"x": b""}, "syncline:work"), Reward)
    with pytest.raises(BadMessage, match="truncated"):
        unpack(entry.fields[b"m"][:-1], Event)


# ---- streams and groups ---------------------------------------------------------------------------------------
def test_read_goes_on_after_a_cursor_and_waits_for_what_comes(bus: Bus, key: str) -> None:
    other = key + "b"
    first = bus.append(key, {b"a": b"1"})
    assert bus.last_id(key) == first
    assert bus.last_id(other) == "0"
    assert bus.read({key: first, other: "0"}, 0.05) == {}
    cursors = {key: bus.last_id(key), other: bus.last_id(other)}
    late = threading.Timer(0.1, lambda: bus.append(other, {b"a": b"2"}))
    late.start()
    assert [e.fields for e in bus.read(cursors, 20.0)[other]] == [{b"a": b"2"}]
    late.join()
    with pytest.raises(ValueError, match="no entry id"):
        bus.read({key: "$"}, None)


def test_a_group_delivers_once_and_keeps_what_is_not_acknowledged(bus: Bus, key: str) -> None:
    ids = [bus.append(key, {b"n": b"%d" % n}) for n in range(5)]
    bus.ensure_group(key, "g")
    bus.ensure_group(key, "g")
    assert [e.id for e in bus.group_read(key, "g", "a", 2, None)] == ids[:2]
    assert [e.id for e in bus.group_read(key, "g", "b", 9, None)] == ids[2:]
    assert bus.group_read(key, "g", "a", 9, 0.02) == []
    assert [e.id for e in bus.group_pending(key, "g", "a")] == ids[:2]
    assert bus.group_pending_count(key, "g") == 5
    assert bus.ack(key, "g", ids[:1]) == 1
    assert bus.ack(key, "g", ids[:1]) == 0
    assert bus.ack(key, "g", ids[1:2], delete=False) == 1
    assert bus.group_pending(key, "g", "a") == []
    assert [e.id for e in bus.range(key)] == ids[1:]


def test_a_long_history_comes_back_whole_and_in_order(bus: Bus, key: str) -> None:
    ids = [bus.append(key, {b"n": b"1"}) for _ in range(600)]
    assert len(bus.group_read(key, "g", "a", 1000, None)) == 600
    assert [e.id for e in bus.group_pending(key, "g", "a")] == ids


def test_only_a_silent_consumer_s_entries_are_taken_over(bus: Bus, key: str) -> None:
    ids = [bus.append(key, {b"n": b"1"}) for _ in range(4)]
    bus.group_read(key, "g", "dead", 2, None)
    bus.group_read(key, "g", "alive", 2, None)

    def taken() -> list[str]:
        bus.group_keep(key, "g", "alive", ids)
        return [e.id for e in bus.group_take_over(key, "g", "heir", 0.3, 10)]

    assert wait_until(taken, 10, "the dead consumer's entries were taken over") == ids[:2]
    assert bus.group_keep(key, "g", "alive", ids) == ids[2:]
    assert bus.group_keep(key, "g", "dead", ids) == []
    assert bus.group_keep(key, "g", "heir", [*ids, "1-1"]) == ids[:2]


@pytest.mark.parametrize("way", ["own history", "take over"])
def test_a_tombstone_is_acknowledged_counted_and_named(bus: Bus, key: str, way: str) -> None:
    ids = [bus.append(key, {b"n": b"%d" % n}) for n in range(3)]
    bus.group_read(key, "g", "a", 3, None)
    assert bus.delete_entries(key, [ids[1]]) == 1
    again = Bus(bus.url)
    if way == "own history":
        taken = again.group_pending(key, "g", "a")
    else:
        taken = again.group_take_over(key, "g", "b", 0.0, 10)
    assert [e.id for e in taken] == [ids[0], ids[2]]
    assert taken.deleted == (ids[1],)
    assert again.tombstones == 1
    assert again.group_pending_count(key, "g") == 2
    assert again.group_pending(key, "g", "a").deleted == ()


def test_a_capped_stream_keeps_its_newest(bus: Bus, key: str) -> None:
    for n in range(500):
        bus.append(key, {b"n": b"%d" % n}, cap=100)
    assert 100 <= bus.length(key) < 300
    assert bus.range(key)[-1].fields == {b"n": b"499"}
    [newest] = bus.range(key, bus.last_id(key))
    assert bus.trim(key, newest.id) > 0
    assert bus.range(key) == [newest]


def test_keys(bus: Bus, key: str) -> None:
    assert bus.get(key) is None
    assert bus.set(key, "a", ttl=60)
    assert not bus.set(key, "b", only_new=True)
    assert (bus.get(key), bus.exists(key)) == (b"a", True)
    assert bus.delete(key) == 1
    bus.hset(key, {"a": 1, b"b": b"x"})
    bus.hset(key, "c", 2.5)
    assert bus.hgetall(key) == {b"a": b"1", b"b": b"x", b"c": b"2.5"}
    assert bus.hmget(key, ["a", "z"]) == [b"1", None]
    assert (bus.hincrby(key, "a", 2), bus.hlen(key), bus.hdel(key, "a", "z")) == (3, 3, 1)
    assert bus.zadd(key + "z", {"m": 2, "l": 1}) == 2
    assert bus.zrange(key + "z") == [b"l", b"m"]
    assert bus.zrange(key + "z", 0, 0, reverse=True) == [b"m"]
    assert bus.zscores(key + "z") == [(b"l", 1.0), (b"m", 2.0)]
    assert (bus.zrem(key + "z", "l"), bus.zcard(key + "z")) == (1, 1)
    with pytest.raises(ValueError, match="no value"):
        bus.hset(key, "c")
    with pytest.raises(CommandRefused, match="WRONGTYPE"):
        bus.get(key)
    assert bus.expire(key, 0.01)
    wait_until(lambda: not bus.exists(key), 5, "the key expired")
    assert not bus.expire(key, 0.01)


def test_threads_share_one_bus(bus: Bus, key: str) -> None:
    def count() -> None:
        for _ in range(200):
            bus.hincrby(key, "n")

    threads = [threading.Thread(target=count) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert bus.hget(key, "n") == b"800"


# ---- faults ---------------------------------------------------------------------------------------------------
class Interrupted(BaseException):
    """As from a signal handler in the middle of anything."""


def test_an_interrupted_command_leaves_no_reply_for_the_next_caller(bus: Bus, key: str) -> None:
    for n in range(100):
        bus.set(f"{key}-{n}", n)

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise Interrupted

    before = signal.signal(signal.SIGALRM, interrupt)
    interrupted = 0
    try:
        for n in range(100):
            try:
                signal.setitimer(signal.ITIMER_REAL, 0.0002 * (1 + n % 7))  # it may ring at once
                while True:
                    assert bus.get(f"{key}-{n}") == b"%d" % n
                    bus.read({f"{key}-none": "0"}, 0.002)
            except Interrupted:
                interrupted += 1
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert interrupted == 100
    assert [bus.get(f"{key}-{n}") for n in range(100)] == [b"%d" % n for n in range(100)]


def test_a_connection_interrupted_while_it_is_made_is_not_used(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, seen = Bus._on_connect, list[object]()

    def on_connect(self: Bus, connection: Any) -> None:
        seen.append(connection)
        if len(seen) == 1:
            raise Interrupted
        whole(self, connection)

    monkeypatch.setattr(Bus, "_on_connect", on_connect)
    bus = Bus(redis_url)
    with pytest.raises(Interrupted):
        bus.ping()
    assert bus.ping()
    assert seen[0] is seen[1], "the pool gives the same one again"
    bus.close()


def goes_on(sent: list[str]) -> None:
    wanted = len(sent) + 50
    wait_until(lambda: len(sent) >= wanted, 30, "entries were written")


def test_a_server_killed_and_restarted_loses_nothing_it_acknowledged(server: OwnServer, key: str) -> None:
    bus = Bus(server.url)
    sent: list[str] = []
    stop = threading.Event()

    def write() -> None:
        while not stop.is_set():
            sent.append(bus.append(key, {b"n": b"%d" % len(sent)}))

    writer = threading.Thread(target=write)
    writer.start()
    for _ in range(2):
        goes_on(sent)
        server.kill()
        server.start()
    goes_on(sent)
    stop.set()
    writer.join()
    there = {entry.id for entry in bus.range(key)}
    assert there.issuperset(sent)
    assert len(there) - len(sent) <= 2  # a write whose reply was lost with the server is made again
    assert bus.reconnects >= 2


def test_a_blocked_reader_outlives_the_server(server: OwnServer, key: str) -> None:
    reader, writer = Bus(server.url), Bus(server.url)
    writer.ensure_group(key, "g")
    got: list[Entry] = []
    thread = threading.Thread(target=lambda: got.extend(reader.group_read(key, "g", "a", 10, 60.0)))
    thread.start()
    wait_until(lambda: b"cmd=xreadgroup" in writer.call("CLIENT", "LIST"), 10, "the reader is blocked")
    server.kill()
    server.start()
    id = writer.append(key, {b"a": b"1"})
    thread.join(30)
    assert [entry.id for entry in got] == [id]


def test_a_flushed_server_gets_its_group_back_from_the_beginning(server: OwnServer, key: str) -> None:
    bus = Bus(server.url)
    bus.append(key, {b"n": b"old"})
    bus.group_read(key, "g", "a", 10, None)
    bus.call("FLUSHALL")
    before_the_group = bus.append(key, {b"n": b"new"})
    assert [e.id for e in bus.group_read(key, "g", "a", 10, None)] == [before_the_group]
    bus.call("FLUSHALL")
    assert bus.group_pending(key, "g", "a") == []
    assert bus.group_take_over(key, "g", "a", 0.0, 10) == []
    assert bus.groups_recreated == 3  # once at the first read, and once for each flush
    assert bus.script("return redis.call('GET', KEYS[1])")([key + "x"], []) is None


def test_a_flush_under_a_blocked_reader(server: OwnServer, key: str) -> None:
    reader, writer = Bus(server.url), Bus(server.url)
    writer.ensure_group(key, "g")
    got: list[Entry] = []
    thread = threading.Thread(target=lambda: got.extend(reader.group_read(key, "g", "a", 10, 60.0)))
    thread.start()
    wait_until(lambda: b"cmd=xreadgroup" in writer.call("CLIENT", "LIST"), 10, "the reader is blocked")
    writer.call("FLUSHALL")
    id = writer.append(key, {b"a": b"1"})
    thread.join(30)
    assert [entry.id for entry in got] == [id]


def test_scripts_survive_a_server_that_forgot_them(server: OwnServer) -> None:
    bus = Bus(server.url)
    add = bus.script("return redis.call('INCRBY', KEYS[1], ARGV[1])")
    assert add(["k"], [2]) == 2
    bus.call("SCRIPT", "FLUSH")
    assert add(["k"], [3]) == 5
    bus.call("SCRIPT", "FLUSH")
    calls = [(["k"], [1]), (["k"], [1])]
    assert bus.script_many("return redis.call('INCRBY', KEYS[1], ARGV[1])", calls) == [6, 7]


def test_a_server_that_stays_away_ends_in_a_named_error() -> None:
    bus = Bus("redis://:secret@127.0.0.1:9/0", deadline=0.3)
    began = time.monotonic()
    with pytest.raises(BusDown, match=r"redis://\.\.\.@127\.0\.0\.1:9/0 of no use for 0\.3 s") as caught:
        bus.ping()
    assert "secret" not in str(caught.value)
    assert 0.3 <= time.monotonic() - began < 5
    assert 2 <= bus.reconnects <= 4  # backs off: not a busy loop


def test_a_wrong_password_is_not_tried_for_a_minute(server: OwnServer) -> None:
    Bus(server.url).call("CONFIG", "SET", "requirepass", "right")
    with pytest.raises(BusDown, match="refuses us"):
        Bus(server.url).ping()
    assert Bus(server.url.replace("unix://", "unix://:right@")).ping()


def test_a_full_server_is_waited_for(server: OwnServer, key: str) -> None:
    bus = Bus(server.url)
    bus.set(key, b"x" * 1_000_000)
    bus.call("CONFIG", "SET", "maxmemory", "1mb")
    with pytest.raises(BusDown, match="of no use"):
        Bus(server.url, deadline=0.2).append(key + "s", {b"a": b"1"})
    free = threading.Timer(0.3, lambda: bus.call("CONFIG", "SET", "maxmemory", "0"))
    free.start()
    assert bus.append(key + "s", {b"a": b"1"})
    free.join()


@pytest.mark.parametrize("policy", ["allkeys-lru", "volatile-ttl"])
def test_a_server_that_may_evict_is_refused(policy: str) -> None:
    with own_server(maxmemory_policy=policy) as server:
        bus = Bus(server.url)
        with pytest.raises(UnsafeServer, match=f"maxmemory-policy '{policy}'.*set it to 'noeviction'"):
            bus.require_safe_server()
        bus.call("CONFIG", "SET", "maxmemory-policy", "noeviction")
        bus.require_safe_server()
