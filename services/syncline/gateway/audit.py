"""The audit log: who did what to which job. JSON lines, appended and never rewritten, without any body or secret.

Written: every request that may change something, every one that was turned away (401, 403, 404 on a job, 429), and what
an admin reads of another tenant's jobs. One file per host, so that two gateways of an installation do not rotate each
other's; rotated at `BYTES`, and `FILES` old ones are kept.
"""

from __future__ import annotations

import io
import logging
import logging.handlers
import os
import re
import time
from pathlib import Path

import msgspec
from starlette.types import Scope

from syncline.runtime.tokens import NOBODY, Who

BYTES, FILES = 32 * 1024 * 1024, 10
_READS = ("GET", "HEAD", "OPTIONS")
_DENIED = (401, 403, 429)
_JOB = re.compile(r"j[0-9a-f]{10}")
_HOST = re.compile(r"[^A-Za-z0-9._-]")


class Line(msgspec.Struct, frozen=True, kw_only=True):
    """One line. `route` is a template and never the path as sent, which may hold anything; `token`: its id."""

    at: float
    tenant: str
    role: str
    token: str
    client: str
    method: str
    route: str
    job: str
    status: int


class Audit:
    """Appends to `<runs>/audit/<host>.jsonl`, mode 0600. Opened when there is something to write."""

    def __init__(self, runs: Path) -> None:
        name = _HOST.sub("_", os.uname().nodename) or "gateway"
        self.path = runs / "audit" / f"{name}.jsonl"
        self._log: logging.Logger | None = None

    def told(self, who: Who, scope: Scope, route: str, status: int, made: str) -> None:
        """Write a line if this answer is of the kinds that are kept. `made`: the job that the request made, or ""."""
        job = made or _job_of(scope)
        wants = scope["method"] not in _READS or status in _DENIED or (status == 404 and job != "")
        if not wants and not scope.get("syncline.foreign", False):
            return
        client = scope.get("client")
        line = Line(
            at=time.time(),
            tenant=who.tenant,
            role=who.role if who != NOBODY else "",
            token=who.token,
            client=client[0] if client else "",
            method=scope["method"] if scope["method"].isalpha() else "?",
            route=route,
            job=job,
            status=status,
        )
        self._opened().info(msgspec.json.encode(line).decode())

    def _opened(self) -> logging.Logger:
        if self._log is None:
            self.path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            handler = _Private(self.path, maxBytes=BYTES, backupCount=FILES)
            handler.setFormatter(logging.Formatter("%(message)s"))
            self._log = logging.Logger(
                "syncline.audit", logging.INFO
            )  # of its own: it reaches no other handler
            self._log.addHandler(handler)
        return self._log


class _Private(logging.handlers.RotatingFileHandler):
    """Each new file with mode 0600."""

    def _open(self) -> io.TextIOWrapper:
        made = open(self.baseFilename, self.mode, encoding="utf-8", opener=lambda p, f: os.open(p, f, 0o600))  # noqa: SIM115
        assert isinstance(made, io.TextIOWrapper)
        return made


def _job_of(scope: Scope) -> str:
    found = _JOB.search(scope["path"])
    return found[0] if found else ""
