"""The gateway's REST API as the command line needs it. Knows problem+json; knows nothing of terminals."""

from __future__ import annotations

import ssl
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import msgspec

TIMEOUT = 30.0
_HERE = ("127.0.0.1", "localhost", "::1")


class Fault(msgspec.Struct, frozen=True):
    """One wrong place of a request, as the gateway names it."""

    path: str
    message: str
    hint: str = ""


class ProblemDetails(msgspec.Struct, frozen=True):
    """problem+json (RFC 9457) as the gateway sends it."""

    title: str
    status: int
    detail: str = ""
    errors: tuple[Fault, ...] = ()


class Refused(Exception):
    """The gateway refused a request. `problem` says why; `bad_input`: the request itself was wrong."""

    def __init__(self, problem: ProblemDetails) -> None:
        super().__init__(problem.detail or problem.title)
        self.problem = problem

    @property
    def bad_input(self) -> bool:
        return self.problem.status in (400, 404, 405, 413, 415, 422)


class Unreachable(Exception):
    """No gateway answers at the URL."""


class Client:
    """Speaks to one gateway. Answers are decoded JSON.

    url      such as http://127.0.0.1:8400
    token    bearer token, None: the gateway asks for none
    moved    tells where the gateway is now, None: nowhere; without it the URL stays
    trusted  a certificate that is trusted besides the system's, as the gateway's own on this machine
    """

    def __init__(
        self,
        url: str,
        token: str | None = None,
        moved: Callable[[], str | None] = lambda: None,
        trusted: Path | None = None,
    ) -> None:
        self.url = url
        self._moved = moved
        headers = {} if token is None else {"authorization": f"Bearer {token}"}
        self._http = httpx.Client(base_url=url, timeout=TIMEOUT, headers=headers, verify=_trust(url, trusted))

    def get(self, path: str, **params: str | int) -> Any:
        """JSON of GET `path`. Raises `Refused`, `Unreachable`."""
        return msgspec.json.decode(self._send("GET", path, params=params).content)

    def text(self, path: str) -> str:
        """Body of GET `path`."""
        return self._send("GET", path).text

    def post(self, path: str, body: Any = None, headers: Mapping[str, str] | None = None) -> Any:
        """JSON of POST `path`; None for an empty answer. `body`: JSON-able, or bytes sent as they are."""
        content = body if isinstance(body, bytes | None) else msgspec.json.encode(body)
        given = {"content-type": "application/json", **(headers or {})} if content is not None else headers
        answer = self._send("POST", path, content=content, headers=given)
        return msgspec.json.decode(answer.content) if answer.content else None

    def delete(self, path: str) -> Any:
        """JSON of DELETE `path`."""
        return msgspec.json.decode(self._send("DELETE", path).content)

    def chunks(self, path: str, start: int = 0) -> Iterator[bytes]:
        """Body of GET `path` from byte `start` on, as it comes. Raises `Refused`, `Unreachable`."""
        headers = {"range": f"bytes={start}-"} if start else {}
        try:
            with self._http.stream("GET", path, headers=headers) as answer:
                if answer.status_code >= 400:
                    answer.read()
                    raise Refused(_problem(answer))
                yield from answer.iter_bytes(1 << 20)
        except httpx.TransportError as error:
            raise Unreachable(f"{self.url} broke off: {error}") from None

    def await_ready(self, seconds: float) -> str:
        """Wait until `/readyz` says yes. Returns "", or after `seconds` what it said last."""
        end = time.monotonic() + seconds
        while True:
            try:
                answer = self._http.get("/readyz")
                said = "" if answer.status_code == 200 else answer.text.strip()[:500]
            except httpx.TransportError as error:
                said = f"no answer at {self.url} ({error})"
            if not said or time.monotonic() > end:
                return said
            time.sleep(0.1)

    def find_again(self) -> None:
        """Speak to where the gateway is now: services that were stopped come back at another port."""
        url = self._moved()
        if url is not None and url != self.url:
            self.url = url
            self._http.base_url = httpx.URL(url)

    def close(self) -> None:
        self._http.close()

    def _send(self, method: str, path: str, **request: Any) -> httpx.Response:
        try:
            answer = self._http.request(method, path, **request)
        except httpx.TransportError as error:
            raise Unreachable(f"no gateway answers at {self.url}: {error}") from None
        if answer.status_code >= 400:
            raise Refused(_problem(answer))
        return answer


def _trust(url: str, trusted: Path | None) -> ssl.SSLContext | bool:
    """How a certificate is judged. On this machine, which one seldom names, it must be `trusted` itself.

    Raises `ValueError` for a file that holds no certificate.
    """
    if trusted is None or urlsplit(url).scheme != "https":
        return True
    context = ssl.create_default_context()
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN  # the gateway's own may stand without its issuer
    try:
        if urlsplit(url).hostname in _HERE:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            context.check_hostname = False
            context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
        context.load_verify_locations(trusted)
    except (OSError, ssl.SSLError) as error:
        raise ValueError(f"SYNCLINE_TLS_CERT {trusted}: {error}") from None
    return context


def _problem(answer: httpx.Response) -> ProblemDetails:
    if "json" in answer.headers.get("content-type", ""):
        try:
            return msgspec.json.decode(answer.content, type=ProblemDetails)
        except msgspec.MsgspecError:
            pass  # something between us and the gateway answered: shown as it is
    return ProblemDetails(
        title=answer.reason_phrase,
        status=answer.status_code,
        detail=f"HTTP {answer.status_code} from {answer.url}",
    )
