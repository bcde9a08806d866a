"""Who may ask the gateway: tenants, their limits, and the digests of their tokens, in one file.

The file holds no token, only SHA-256 digests: a token has 256 random bits, so there is nothing to guess that a slow
hash would protect (docs/decisions/0020-tenants.md). It is written whole under a lock and has mode 0600.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import hmac
import os
import re
import secrets
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal

import msgspec

from syncline.runtime.durable import sync_folder

DEFAULT = "default"
"""The operator's tenant: of `SYNCLINE_TOKEN`, of a gateway without tokens, and of jobs that nobody else owns."""

Role = Literal["member", "admin"]
TENANT = re.compile(r"[a-z0-9][a-z0-9-]{0,31}")
_TOKEN = re.compile(r"sl_([0-9a-f]{8})_[A-Za-z0-9_-]{43}")
_NEVER = "0" * 64  # the digest of no token that anybody could find
Count = Annotated[int, msgspec.Meta(ge=1)]


class TenantLimits(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What one tenant may use.

    running   jobs that are not over
    stored    jobs in history
    rate      requests per second, on average
    burst     requests at once
    streams   event streams at once, on one gateway
    hosts     hosts that its specs may name in URLs (`judge.example.org`, or `*.example.org`); empty: none
    """

    running: Count = 8
    stored: Count = 10_000
    rate: Annotated[float, msgspec.Meta(gt=0)] = 50.0
    burst: Count = 100
    streams: Count = 16
    hosts: tuple[str, ...] = ()


class Token(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One token at rest. `id` is not secret, and is what the audit log names; `made`: wall-clock second."""

    id: str
    tenant: str
    role: Role
    sha256: Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{64}$")]
    made: float


class Tokens(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The file."""

    tenants: dict[str, TenantLimits] = {}
    tokens: tuple[Token, ...] = ()


class Who(msgspec.Struct, frozen=True, kw_only=True):
    """Who asks. `token`: the token's id, or how they came in without one. `limits` None: none."""

    tenant: str
    role: Role
    token: str
    limits: TenantLimits | None = None

    @property
    def admin(self) -> bool:
        """Whether all tenants' jobs are theirs to see."""
        return self.role == "admin"


OPERATOR = Who(tenant=DEFAULT, role="admin", token="SYNCLINE_TOKEN")
SCRAPER = Who(tenant="", role="member", token="SYNCLINE_METRICS_TOKEN")
"""Prometheus: reads `/metrics`, and is turned away everywhere else."""
THIS_MACHINE = Who(tenant=DEFAULT, role="admin", token="this machine")
NOBODY = Who(tenant="", role="member", token="")


class TokensUnreadable(ValueError):
    """The token file is there and cannot be read: nobody gets in. The message names it."""


class TokenStore:
    """The file at `path`, read again whenever it has changed. Safe for threads."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = threading.Lock()
        self._stamp: tuple[int, int, int] | None = None
        self._found = Tokens()
        self._by_id: dict[str, Token] = {}

    def exists(self) -> bool:
        """Whether tokens are asked for: the file is there, whatever is in it."""
        return self.path.exists()

    def who(self, text: str) -> Who | None:
        """Whose token `text` is, None: nobody's. Raises `TokensUnreadable`."""
        found = self.read()
        shape = _TOKEN.fullmatch(text)
        token = self._by_id.get(shape[1]) if shape else None
        fits = hmac.compare_digest(_digest(text), _NEVER if token is None else token.sha256)
        if token is None or not fits:
            return None
        limits = found.tenants.get(token.tenant, TenantLimits())
        admin = token.role == "admin"
        return Who(tenant=token.tenant, role=token.role, token=token.id, limits=None if admin else limits)

    def read(self) -> Tokens:
        """What the file says now. Raises `TokensUnreadable`; a file that is not there says nothing."""
        with self._lock:
            try:
                stat = self.path.stat()
                stamp = (stat.st_mtime_ns, stat.st_size, stat.st_ino)
                if stamp != self._stamp:
                    self._found = msgspec.json.decode(self.path.read_bytes(), type=Tokens)
                    self._by_id = {token.id: token for token in self._found.tokens}
                    self._stamp = stamp
            except FileNotFoundError:
                self._found, self._by_id, self._stamp = Tokens(), {}, None
            except (OSError, msgspec.MsgspecError) as error:
                self._stamp = None
                raise TokensUnreadable(f"the token file {self.path.name} cannot be read: {error}") from None
            return self._found

    # ---- what `syncline token` does
    def add(self, tenant: str, role: Role) -> tuple[Token, str]:
        """A new token, and its text, which is kept nowhere. Raises `ValueError` for a tenant that cannot be."""
        if not TENANT.fullmatch(tenant):
            raise ValueError(f"tenant {tenant!r} must be 1 to 32 of a-z, 0-9 and -, and not begin with -")
        if tenant == DEFAULT and role == "member":
            raise ValueError(f"tenant {DEFAULT!r} is the operator's and has no members: use another name")
        with self._changing() as found:
            name = secrets.token_hex(4)
            text = f"sl_{name}_{secrets.token_urlsafe(32)}"
            token = Token(id=name, tenant=tenant, role=role, sha256=_digest(text), made=time.time())
            tenants = {tenant: TenantLimits()} | found.tenants
            self._write(Tokens(tenants=tenants, tokens=(*found.tokens, token)))
        return token, text

    def revoke(self, name: str) -> Token:
        """Forget the token with this id. Raises `ValueError` if there is none."""
        with self._changing() as found:
            gone = next((token for token in found.tokens if token.id == name), None)
            if gone is None:
                raise ValueError(f"there is no token {name!r}")
            kept = tuple(token for token in found.tokens if token.id != name)
            self._write(Tokens(tenants=found.tenants, tokens=kept))
        return gone

    def limit(self, tenant: str, **changed: object) -> TenantLimits:
        """Change limits of a tenant. Raises `ValueError` for one that is not there, or a limit that cannot be."""
        with self._changing() as found:
            if tenant not in found.tenants:
                raise ValueError(
                    f"there is no tenant {tenant!r}; there are: {', '.join(found.tenants) or 'none'}"
                )
            given = msgspec.to_builtins(found.tenants[tenant]) | changed
            try:
                limits = msgspec.convert(given, TenantLimits)
            except msgspec.ValidationError as error:
                raise ValueError(f"limits of {tenant}: {error}") from None
            self._write(Tokens(tenants=found.tenants | {tenant: limits}, tokens=found.tokens))
        return limits

    @contextlib.contextmanager
    def _changing(self) -> Iterator[Tokens]:
        """The file's content while nobody else changes it. Raises `ValueError` where it cannot be written."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            lock = os.open(self.path.with_name(f".{self.path.name}.lock"), os.O_RDWR | os.O_CREAT, 0o600)
        except OSError as error:
            raise ValueError(
                f"the token file {self.path} cannot be changed from here ({error.strerror}): where it is a mounted "
                "secret, change a copy (SYNCLINE_TOKENS names it) and put that into the secret"
            ) from None
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield self.read()
        finally:
            os.close(lock)

    def _write(self, tokens: Tokens) -> None:
        beside = self.path.with_name(f".{self.path.name}.new")
        with contextlib.suppress(FileNotFoundError):
            beside.unlink()
        with open(os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(msgspec.json.format(msgspec.json.encode(tokens), indent=1) + b"\n")
            file.flush()
            os.fsync(file.fileno())
        beside.replace(self.path)
        sync_folder(self.path.parent)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()
