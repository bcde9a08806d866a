"""One request of an environment to its server, and what the server's answers mean."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

if TYPE_CHECKING:
    import httpx

S = TypeVar("S")
_JSON = {"content-type": "application/json"}
_LATER = (408, 425, 429)  # HTTP statuses, beside 5xx, that mean "later"


def client(timeout: float) -> httpx.Client:
    """Made once, where certificates are read; a process that is forked later opens its own connection with it."""
    import httpx  # large: only if used

    return httpx.Client(timeout=timeout, trust_env=False, follow_redirects=False)


def post(client: httpx.Client, url: str, asked: dict[str, Any], shape: type[S]) -> S:
    """The server's answer. Raises `ConnectionError` for trouble of the moment, `ValueError` for a fault of its own."""
    import httpx

    try:
        answer = client.post(url, content=msgspec.json.encode(asked), headers=_JSON)
    except httpx.TransportError as error:
        raise ConnectionError(f"{url}: {type(error).__name__}: {error}") from error
    if answer.status_code >= 500 or answer.status_code in _LATER:
        raise ConnectionError(f"{url}: HTTP {answer.status_code}")
    if answer.status_code != 200:
        raise ValueError(f"{url}: HTTP {answer.status_code}")
    try:
        return msgspec.json.decode(answer.content, type=shape)
    except msgspec.MsgspecError as error:
        raise ValueError(f"{url}: {error}") from None
