"""Commands as Redis's protocol has them, and sockets that send without copying. For `bus.py` alone.

hiredis packs small commands. A command of large arguments is sent from where they lie: packing one copies all of it
twice into new memory, half a megabyte for a batch of records, and its pages cost more than the copying.
"""

from __future__ import annotations

import socket
import ssl
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import hiredis

from syncline.runtime.messages import Value

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer as Buffer

_PLAIN = (str, bytes)
_AT_ONCE = 1000  # pieces of one call; the system takes 1024


def packed(commands: Iterable[Sequence[Value]]) -> list[bytes]:
    """The commands' bytes, in one piece. Raises `TypeError` for an argument that is no `Value`."""
    return [b"".join([_packed(command) for command in commands])]


def packed_large(small: Sequence[Value], large: Sequence[bytes]) -> list[bytes]:
    """One command of the arguments `small` and then `large`, which are pieces of their own."""
    count = len(small) + len(large)
    head = _packed(small)
    pieces = [b"*%d\r\n%b" % (count, head[head.index(b"\n") + 1 : -2])]
    for part in large:
        pieces += (b"\r\n$%d\r\n" % len(part), part)
    pieces.append(b"\r\n")
    return pieces


def send(to: socket.socket, pieces: Sequence[bytes]) -> None:
    """Send all of them, in order. Raises `OSError`, and nobody knows how much has gone then."""
    if isinstance(to, ssl.SSLSocket):  # it knows no sendmsg
        return to.sendall(b"".join(pieces))
    at, skip = 0, 0  # what has gone: pieces, and bytes of the next
    while at < len(pieces):
        some: list[Buffer] = [memoryview(pieces[at])[skip:], *pieces[at + 1 : at + _AT_ONCE]]
        skip += to.sendmsg(some)
        while at < len(pieces) and skip >= len(pieces[at]):
            skip -= len(pieces[at])
            at += 1
    return None


def _packed(command: Sequence[Value]) -> bytes:
    # hiredis makes texts of numbers itself, and a signal handler that raises just then (Celery's time limit) ends the
    # process: it goes on without the text
    texts = tuple([one if one.__class__ in _PLAIN else _text(one) for one in command])
    return hiredis.pack_command(texts)  # type: ignore[arg-type, no-any-return]  # its stub: tuples of one


def _text(one: Value) -> bytes | str:
    if isinstance(one, str | bytes):
        return one
    if isinstance(one, int | float):
        return str(one)
    raise TypeError(
        f"an argument of a command is of {type(one).__name__}, and must be bytes, text or a number"
    )
