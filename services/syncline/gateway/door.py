"""The door: what a request must pass before any route sees it: who asks, how often, how much. Answers are counted."""

from __future__ import annotations

import time
from typing import Any

import anyio.to_thread
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from syncline.contract.spec_text import MAX_BYTES
from syncline.gateway import bodies
from syncline.gateway.admission import Admission, within_rights
from syncline.gateway.audit import Audit
from syncline.gateway.errors import Refusal, problem, redis_away
from syncline.gateway.numbers import NO_ROUTE, Numbers
from syncline.gateway.quota import take
from syncline.runtime.bus import Bus, BusDown
from syncline.runtime.tokens import NOBODY

BODY_SECONDS = 30.0  # a body must be complete by then
WHO = "syncline.who"  # where the request's scope says who asks
_NOT_READ = {400: "bad-request", 408: "request-timeout", 413: "body-too-large"}


class Door:
    """ASGI middleware. A body is read whole here, within `MAX_BYTES`, so nothing behind it can be flooded."""

    def __init__(self, app: ASGIApp, admission: Admission, bus: Bus, audit: Audit, numbers: Numbers) -> None:
        self._app, self._admission, self._bus = app, admission, bus
        self._audit, self._numbers = audit, numbers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began = time.perf_counter()
        scope[WHO] = NOBODY

        async def counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                seconds = time.perf_counter() - began
                self._numbers.answered(scope["method"], _route(scope), message["status"], seconds)
                self._audit.told(scope[WHO], scope, _route(scope), message["status"], _made(message))
            await send(message)

        try:
            who = scope[WHO] = self._admission.who(scope)
            within_rights(who, scope)
            if who.limits is not None:
                await anyio.to_thread.run_sync(take, self._bus, who)
            body = await _whole_body(scope, receive)
        except Refusal as refusal:
            await _turn_away(refusal, scope, receive, counted)
            return
        except BusDown as error:
            await _turn_away(redis_away(error), scope, receive, counted)
            return
        await self._app(scope, _replayed(body, receive), counted)


async def _whole_body(scope: Scope, receive: Receive) -> bytes:
    """Raises `Refusal` 413, or 408 for a body that takes too long, or 400 for a client that left."""
    try:
        return await bodies.whole(scope, receive, MAX_BYTES, BODY_SECONDS)
    except bodies.NotRead as error:
        headers = None if error.status == 400 else {"Connection": "close"}
        raise Refusal(error.status, _NOT_READ[error.status], str(error), headers=headers) from None


async def _turn_away(refusal: Refusal, scope: Scope, receive: Receive, send: Send) -> None:
    """Answer at once, then let the client finish speaking: who is cut off in mid-sentence hears no answer."""

    async def unfinished(message: Message) -> None:
        if message["type"] == "http.response.body":
            message = {**message, "more_body": True}
        await send(message)

    await problem(refusal)(scope, receive, unfinished)
    await bodies.dropped(receive)
    await send({"type": "http.response.body", "body": b"", "more_body": False})


def _replayed(body: bytes, receive: Receive) -> Receive:
    sent = False

    async def again() -> Message:
        nonlocal sent
        if not sent:
            sent = True
            return {"type": "http.request", "body": body, "more_body": False}
        return await receive()

    return again


def _made(message: Message) -> str:
    """The job that the answer says was made, or ""."""
    if message["status"] != 201:
        return ""
    headers: list[tuple[bytes, bytes]] = message.get("headers", [])
    place = next((value for name, value in headers if name.lower() == b"location"), b"")
    return place.decode("latin-1").removeprefix("/v1/jobs/")


def _route(scope: Scope) -> str:
    """The template of the matched route; every path without one shares a label."""
    route: Any = scope.get("route")
    return NO_ROUTE if route is None else str(route.path)
