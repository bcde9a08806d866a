"""Commands on the wire: in one piece or in many they are the same bytes, and a slow reader gets all of them."""

from __future__ import annotations

import socket
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from syncline.contract.streams import PREFIX
from syncline.runtime import resp
from syncline.runtime.bus import Bus, CommandRefused

_SMALL = st.lists(
    st.one_of(st.binary(max_size=40), st.text(max_size=20), st.integers(), st.just(1.5)), min_size=1
)
ECHO = "return {#KEYS, KEYS[1], #ARGV, ARGV[1], ARGV[#ARGV]}"


@given(_SMALL, st.lists(st.binary(max_size=5000), max_size=8))
def test_large_arguments_are_packed_as_small_ones_are(
    small: list[bytes | str | int | float], large: list[bytes]
) -> None:
    assert b"".join(resp.packed_large(small, large)) == b"".join(resp.packed([[*small, *large]]))


def test_an_argument_that_is_no_value_is_refused() -> None:
    with pytest.raises(TypeError):
        resp.packed([("SET", "k", None)])  # type: ignore[list-item]


def test_a_slow_reader_gets_every_byte() -> None:
    """More pieces than one call of the system takes, and more bytes than the socket holds."""
    pieces = [bytes([n % 251]) * (n * 7 % 4096) for n in range(3000)]
    here, there = socket.socketpair()
    here.settimeout(20.0)
    got = bytearray()

    def read() -> None:
        while part := there.recv(4099):
            got.extend(part)

    reader = threading.Thread(target=read)
    reader.start()
    resp.send(here, pieces)
    here.close()
    reader.join(20.0)
    there.close()
    assert bytes(got) == b"".join(pieces)


def test_a_script_of_large_arguments(redis_url: str, job: str) -> None:
    bus, key = Bus(redis_url), f"{PREFIX}:{{{job}}}:resp"
    parts = [bytes([n]) * 70_000 for n in range(64)]
    answer = [1, key.encode(), 64, parts[0], parts[-1]]
    text = f"{ECHO} -- {job}"  # the server does not know it yet
    assert bus.script_large(text, [key], parts) == answer
    assert bus.script_large(text, [key], parts) == answer
    assert bus.script_large(text, [key], parts[:1]) == [1, key.encode(), 1, parts[0], parts[0]]
    with pytest.raises(CommandRefused, match="no such thing"):
        bus.script_large("return redis.error_reply('ERR no such thing')", [key], parts)
    assert bus.ping()
    bus.close()
