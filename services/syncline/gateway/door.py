"""The door: what a request must pass before any route sees it. Body limit, bearer token, count of answers."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import time
from typing import Any
from urllib.parse import urlsplit

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from syncline.contract.spec_text import MAX_BYTES
from syncline.gateway.errors import Refusal, problem
from syncline.gateway.numbers import NO_ROUTE, Numbers

BODY_SECONDS = 30.0  # a body must be complete by then
LINGER_SECONDS = 5.0  # for the rest of a request that was turned away; it is read and dropped
OPEN_PATHS = frozenset({"/", "/healthz", "/readyz"})  # the bare page, and what a probe asks: no token


class Door:
    """ASGI middleware. A body is read whole here, within `MAX_BYTES`, so nothing behind it can be flooded."""

    def __init__(self, app: ASGIApp, token: str | None, host: str, numbers: Numbers) -> None:
        self._app = app
        self._host = host
        self._token = None if token is None else f"Bearer {token}".encode()
        self._numbers = numbers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began = time.perf_counter()

        async def counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                seconds = time.perf_counter() - began
                self._numbers.answered(scope["method"], _route(scope), message["status"], seconds)
            await send(message)

        try:
            self._allowed(scope)
            body = await _whole_body(scope, receive)
        except Refusal as refusal:
            await _turn_away(refusal, scope, receive, counted)
            return
        await self._app(scope, _replayed(body, receive), counted)

    def _allowed(self, scope: Scope) -> None:
        """Raises `Refusal` 401 without the token; where there is none, 403 for what a strange web page sent.

        A page in a browser on this machine can reach a gateway that asks for no token: by a name of its own
        that resolves to this machine (the Host header tells), or by posting blindly (the Origin header tells).
        """
        if self._token is None:
            host, origin = _header(scope, b"host"), _header(scope, b"origin")
            if not _is_here(host, self._host) or (origin and _netloc(origin) != host):
                raise Refusal(
                    403, "forbidden", "without a token, only this machine's own pages and programs may ask"
                )
            return
        if scope["path"] in OPEN_PATHS:
            return
        given = [value for name, value in scope["headers"] if name == b"authorization"]
        if len(given) != 1 or not hmac.compare_digest(given[0], self._token):
            raise Refusal(
                401, "unauthorized", "a valid bearer token is needed", headers={"WWW-Authenticate": "Bearer"}
            )


def _header(scope: Scope, name: bytes) -> str:
    return next((value.decode("latin-1") for key, value in scope["headers"] if key == name), "")


def _is_here(host: str, bound: str) -> bool:
    """Whether a Host header names this machine by loopback, or by the address that the gateway is bound to."""
    try:
        name = urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return False
    return name in ("localhost", "::1", bound) or (
        name.startswith("127.") and name.replace(".", "").isdigit()
    )


def _netloc(origin: str) -> str:
    try:
        return urlsplit(origin).netloc
    except ValueError:
        return ""


async def _whole_body(scope: Scope, receive: Receive) -> bytes:
    """Raises `Refusal` 413, or 408 for a body that takes too long, or 400 for a client that left."""
    declared = next((value for name, value in scope["headers"] if name == b"content-length"), b"0")
    if declared.isdigit() and int(declared) > MAX_BYTES:
        raise _too_large()
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_SECONDS):
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise Refusal(400, "bad-request", "the client left")
                body += message.get("body", b"")
                if len(body) > MAX_BYTES:
                    raise _too_large()
                if not message.get("more_body", False):
                    return bytes(body)
    except TimeoutError:
        detail = f"the body was not complete after {BODY_SECONDS:g} s"
        raise Refusal(408, "request-timeout", detail, headers={"Connection": "close"}) from None


async def _turn_away(refusal: Refusal, scope: Scope, receive: Receive, send: Send) -> None:
    """Answer at once, then let the client finish speaking: who is cut off in mid-sentence hears no answer."""

    async def unfinished(message: Message) -> None:
        if message["type"] == "http.response.body":
            message = {**message, "more_body": True}
        await send(message)

    await problem(refusal)(scope, receive, unfinished)
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(LINGER_SECONDS):
            while (message := await receive())["type"] == "http.request" and message.get("more_body", False):
                pass
    await send({"type": "http.response.body", "body": b"", "more_body": False})


def _too_large() -> Refusal:
    detail = f"a body may have at most {MAX_BYTES} bytes"
    return Refusal(413, "body-too-large", detail, headers={"Connection": "close"})


def _replayed(body: bytes, receive: Receive) -> Receive:
    sent = False

    async def again() -> Message:
        nonlocal sent
        if not sent:
            sent = True
            return {"type": "http.request", "body": body, "more_body": False}
        return await receive()

    return again


def _route(scope: Scope) -> str:
    """The template of the matched route; every path without one shares a label."""
    route: Any = scope.get("route")
    return NO_ROUTE if route is None else str(route.path)
