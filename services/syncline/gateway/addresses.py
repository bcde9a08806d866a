"""Addresses in a tenant's spec: judges and environments are asked from inside the installation's network.

A URL there could name what only the installation may reach: Redis, an engine, a cloud's metadata. So a tenant's specs
may name the hosts that the operator has listed for it, and no others; the operator's own may name any.
"""

from __future__ import annotations

from fnmatch import fnmatchcase
from urllib.parse import urlsplit

from syncline.contract.job import JobSpec, Problem
from syncline.contract.secrets_rules import addresses
from syncline.contract.spec_text import SpecError
from syncline.runtime.tokens import Who


def check(who: Who, spec: JobSpec) -> None:
    """Raises `SpecError` naming each key whose host the tenant may not name."""
    if who.limits is None:
        return
    allowed = who.limits.hosts
    found = []
    for path, url in addresses(spec):
        host = _host(url)
        if not any(fnmatchcase(host, pattern.lower()) for pattern in allowed):
            hint = (
                f"allowed: {', '.join(allowed)}"
                if allowed
                else "the operator allows hosts by `syncline token limits`"
            )
            found.append(Problem(path=path, message=f"this tenant's jobs may not reach {host!r}", hint=hint))
    if "*" not in allowed:
        found += [
            Problem(path=path, message="this tenant's code may not reach the network", hint="leave it out")
            for path, wanted in (("task.network", spec.task.network), ("reward.network", spec.reward.network))
            if wanted
        ]
    if found:
        raise SpecError(found)


def _host(url: str) -> str:
    """The host of a URL, lower case; "" for one that has none, or that two readers would read differently."""
    try:
        parts = urlsplit(url)
        if parts.username is not None or "\\" in url or any(ord(mark) <= 32 for mark in url):
            return ""
        return parts.hostname or ""
    except ValueError:
        return ""
