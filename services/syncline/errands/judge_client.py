"""One request to an HTTP judge: bounded in time and in size, and never an exception for what a judge may do."""

from __future__ import annotations

import asyncio
from typing import Literal

import httpx
import msgspec

_CONNECT = 5.0  # seconds to be let in, if the request's own time is not shorter


class Said(msgspec.Struct, frozen=True):
    """The judge answered, with whatever status."""

    status: int
    body: bytes
    retry_after: str | None


class Mute(msgspec.Struct, frozen=True):
    """It did not. `away`: it was not reached and has not taken the request; `broken`: it broke off; `late`."""

    kind: Literal["away", "broken", "late"]
    reason: str


class BadUrl(ValueError):
    """`reward.url` is none that can be asked."""


class JudgeClient:
    """Asks one URL. `parallel`: connections at a time; `seconds`: for a whole request; `most`: bytes of an answer."""

    def __init__(self, url: str, parallel: int, seconds: float, most: int) -> None:
        try:
            self._url = httpx.URL(url)
        except httpx.InvalidURL as error:
            raise BadUrl(f"reward.url {url!r}: {error}") from None
        if not self._url.host or (self._url.port or 0) > 65535:
            raise BadUrl(f"reward.url {url!r} names no host, or no port that there is")
        self._seconds, self._most = seconds, most
        self._client = httpx.AsyncClient(
            timeout=httpx.Timeout(None, connect=min(seconds, _CONNECT)),
            limits=httpx.Limits(max_connections=parallel, max_keepalive_connections=parallel),
            trust_env=False,
            follow_redirects=False,
            # an answer that grows when it is unpacked could not be bounded
            headers={"content-type": "application/json", "accept-encoding": "identity"},
        )

    @property
    def name(self) -> str:
        """The URL as it may be recorded: without user, password, query and fragment."""
        return str(self._url.copy_with(username=None, password=None, query=None, fragment=None))

    async def post(self, body: bytes, traceparent: str = "") -> Said | Mute:
        """Ask once. `traceparent`: of the hop that the request follows, where it follows one alone."""
        headers = {"traceparent": traceparent} if traceparent else {}
        try:
            async with (
                asyncio.timeout(self._seconds),
                self._client.stream("POST", self._url, content=body, headers=headers) as answer,
            ):
                return await self._read(answer)
        except TimeoutError:
            return Mute("late", f"no answer within {self._seconds:g} s")
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            return Mute("away", f"{type(error).__name__}: {error}"[:200])
        except httpx.TransportError as error:
            return Mute("broken", f"{type(error).__name__}: {error}"[:200])

    async def _read(self, answer: httpx.Response) -> Said | Mute:
        if answer.headers.get("content-encoding", "identity") != "identity":
            return Mute("broken", "the answer is compressed, and no answer should be")
        body = bytearray()
        async for chunk in answer.aiter_raw():
            body += chunk
            if len(body) > self._most:
                return Mute("broken", f"the answer has more than {self._most} bytes")
        return Said(answer.status_code, bytes(body), answer.headers.get("retry-after"))

    async def close(self) -> None:
        """Drop the connections."""
        await self._client.aclose()
