"""A spec is stored, shown and exported: what is secret has no place in it, and is refused where it can be told."""

from __future__ import annotations

import re
from collections.abc import Iterator
from urllib.parse import parse_qsl, urlsplit

from syncline.contract.job import JobSpec, Problem

_NAMES = re.compile(
    r"(^|[_-])(api[_-]?keys?|access[_-]?keys?|token|secrets?|password|passwd|credentials?)$", re.IGNORECASE
)
_HINT = "a spec is stored and shown: let the server know its callers by the network, or by a proxy beside it"


def addresses(spec: JobSpec) -> Iterator[tuple[str, str]]:
    """Every text in task and reward that is a URL, with its key."""
    if spec.reward.url is not None:
        yield "reward.url", spec.reward.url
    for key, text in _options(spec):
        if "://" in text:
            yield key, text


def problems(spec: JobSpec) -> Iterator[Problem]:
    """URLs with a password or a key in them, and options that are named as secrets are."""
    for key, url in addresses(spec):
        try:
            parts = urlsplit(url)
            named = [name for name, value in parse_qsl(parts.query) if value and _NAMES.search(name)]
            if parts.username is not None or parts.password is not None:
                yield Problem(path=key, message="has a user or a password in it", hint=_HINT)
            elif named:
                yield Problem(path=key, message=f"has a secret in it: {named[0]}", hint=_HINT)
        except ValueError as error:
            if key != "reward.url":  # `job_rules` tells of that one: it names no host
                yield Problem(path=key, message=f"is no URL: {error}", hint="http://host:port/path")
    for key, text in _options(spec):
        if text and _NAMES.search(key.rpartition(".")[2]):
            yield Problem(path=key, message="is named as a secret is", hint=_HINT)


def _options(spec: JobSpec) -> Iterator[tuple[str, str]]:
    """Every text among the options of the task and its parts."""
    given = [("task.options", spec.task.options)]
    given += [(f"task.parts.{number}.options", part.options) for number, part in enumerate(spec.task.parts)]
    for path, options in given:
        for name, value in options.items():
            for text in value if isinstance(value, list) else [value]:
                if isinstance(text, str):
                    yield f"{path}.{name}", text
