"""Who gets in: the bearer token of a request, or without tokens its origin on this machine. Before any route runs."""

from __future__ import annotations

import hmac
from urllib.parse import urlsplit

from starlette.types import Scope

from syncline.gateway.errors import Refusal
from syncline.gateway.ui import OPEN_PREFIX
from syncline.runtime.settings import Settings
from syncline.runtime.tokens import (
    NOBODY,
    OPERATOR,
    SCRAPER,
    THIS_MACHINE,
    TokenStore,
    TokensUnreadable,
    Who,
)

OPEN_PATHS = frozenset({"/", "/ui", "/healthz", "/readyz"})  # the bare page, and what a probe asks: no token
_LOOPBACK = ("127.", "localhost", "::1")
_NUMBERS = "/metrics"
_LONGEST = 512  # bytes of an Authorization header that is looked at


class Admission:
    """Raises `ValueError` at start for an open host without tokens, an empty token, one token for two rights, or a
    store that cannot be read."""

    def __init__(self, settings: Settings, tokens: TokenStore) -> None:
        self._host, self._tokens = settings.host, tokens
        self._operator = None if settings.token is None else settings.token.encode()
        self._scraper = None if settings.metrics_token is None else settings.metrics_token.encode()
        if settings.metrics_token == "":
            raise ValueError("SYNCLINE_METRICS_TOKEN is empty: give a token, or unset it")
        if self._scraper is not None and self._scraper == self._operator:
            raise ValueError(
                "SYNCLINE_METRICS_TOKEN is SYNCLINE_TOKEN: a scraper would be the operator; make another"
            )
        if settings.token == "":
            raise ValueError("SYNCLINE_TOKEN is empty: give a token, or unset it to serve this machine alone")
        known = tokens.read()
        if settings.token is None and not known.tokens and not settings.host.startswith(_LOOPBACK):
            raise ValueError(
                f"SYNCLINE_HOST {settings.host!r} is open to other machines: set SYNCLINE_TOKEN, or use 127.0.0.1, "
                "or make tokens with `syncline token add`"
            )

    def who(self, scope: Scope) -> Who:
        """Who asks. Raises `Refusal` 401 without a valid token; where none is asked for, 403 for a strange web page.

        A page in a browser on this machine can reach a gateway that asks for no token: by a name of its own
        that resolves to this machine (the Host header tells), or by posting blindly (the Origin header tells).
        """
        opened = scope["path"] in OPEN_PATHS or scope["path"].startswith(OPEN_PREFIX)
        if self._operator is None and not self._tokens.exists():
            host, origin = _header(scope, b"host"), _header(scope, b"origin")
            if not _is_here(host, self._host) or (origin and _netloc(origin) != host):
                raise Refusal(
                    403, "forbidden", "without a token, only this machine's own pages and programs may ask"
                )
            return NOBODY if opened else THIS_MACHINE
        return NOBODY if opened else self._named(scope)

    def _named(self, scope: Scope) -> Who:
        given = [value for name, value in scope["headers"] if name == b"authorization"]
        if len(given) == 1 and given[0].startswith(b"Bearer ") and len(given[0]) <= _LONGEST:
            token = given[0].removeprefix(b"Bearer ")
            if self._operator is not None and hmac.compare_digest(token, self._operator):
                return OPERATOR
            if self._scraper is not None and hmac.compare_digest(token, self._scraper):
                return SCRAPER
            try:
                who = self._tokens.who(token.decode("latin-1"))
            except TokensUnreadable as error:
                raise Refusal(503, "tokens-unreadable", str(error), headers={"Retry-After": "5"}) from None
            if who is not None:
                return who
        raise Refusal(
            401, "unauthorized", "a valid bearer token is needed", headers={"WWW-Authenticate": "Bearer"}
        )


def within_rights(who: Who, scope: Scope) -> None:
    """Raises `Refusal` 403 for the scrape token anywhere but where the numbers are."""
    if who == SCRAPER and scope["path"] != _NUMBERS:
        raise Refusal(403, "forbidden", "this token reads /metrics and nothing else")


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
