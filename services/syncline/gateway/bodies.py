"""A request's body read whole within bounds, and the rest of one that was turned away read and dropped."""

from __future__ import annotations

import asyncio
import contextlib

from starlette.types import Receive, Scope

LINGER_SECONDS = 5.0  # for the rest of a request that was turned away


class NotRead(Exception):
    """A body that is not taken: the status to answer with, and why."""

    def __init__(self, status: int, why: str) -> None:
        super().__init__(why)
        self.status = status


async def whole(scope: Scope, receive: Receive, most: int, seconds: float) -> bytes:
    """Raises `NotRead` 413 beyond `most` bytes, 408 after `seconds`, 400 for a client that left."""
    declared = next((value for name, value in scope["headers"] if name == b"content-length"), b"0")
    if declared.isdigit() and int(declared) > most:
        raise _too_large(most)
    body = bytearray()
    try:
        async with asyncio.timeout(seconds):
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise NotRead(400, "the client left")
                body += message.get("body", b"")
                if len(body) > most:
                    raise _too_large(most)
                if not message.get("more_body", False):
                    return bytes(body)
    except TimeoutError:
        raise NotRead(408, f"the body was not complete after {seconds:g} s") from None


async def dropped(receive: Receive) -> None:
    """Let the client finish speaking: who is cut off in mid-sentence hears no answer."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(LINGER_SECONDS):
            while (message := await receive())["type"] == "http.request" and message.get("more_body", False):
                pass


def _too_large(most: int) -> NotRead:
    return NotRead(413, f"a body may have at most {most} bytes")
