"""What a TraceQL query is: its tree, its fields and its tokens. Pure; `traceql.py` parses."""

from __future__ import annotations

import re
from typing import Literal

import msgspec

MOST_CHARACTERS, MOST_CONDITIONS, MOST_DEPTH = 4096, 64, 24
INTRINSICS = (
    "name",
    "duration",
    "status",
    "statusMessage",
    "kind",
    "rootName",
    "rootServiceName",
    "traceDuration",
    "trace:id",
    "span:id",
)
ALIASES = {
    "span:name": "name",
    "span:duration": "duration",
    "span:status": "status",
    "span:statusMessage": "statusMessage",
    "span:kind": "kind",
    "trace:rootName": "rootName",
    "trace:rootService": "rootServiceName",
    "trace:duration": "traceDuration",
}
STATUSES = ("error", "ok", "unset")
KINDS = ("unspecified", "internal", "server", "client", "producer", "consumer")
Op = Literal["=", "!=", ">", ">=", "<", "<=", "=~", "!~"]
FLIPPED: dict[str, Op] = {"=": "=", "!=": "!=", ">": "<", ">=": "<=", "<": ">", "<=": ">="}
SECONDS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_TOKEN = re.compile(
    r"""\s*(?:
      (?P<string>"(?:[^"\\]|\\.)*"|`[^`]*`)
    | (?P<duration>[0-9]+(?:\.[0-9]+)?(?:ns|us|µs|ms|s|m|h)\b)
    | (?P<number>-?[0-9]+(?:\.[0-9]+)?(?![\w.]))
    | (?P<field>(?:[A-Za-z]\w*)?\.(?:"(?:[^"\\]|\\.)+"|[A-Za-z0-9_][\w.\-/]*))
    | (?P<word>[A-Za-z]\w*(?::[A-Za-z]\w*)?)
    | (?P<sign>&&|\|\||=~|!~|!=|>=|<=|>>|<<|[{}()=<>!|,&~+*/^%-])
    )""",
    re.VERBOSE,
)


class BadQuery(ValueError):
    """A query that is no TraceQL, or more of it than the store answers. The message shows where and what."""


class Field(msgspec.Struct, frozen=True):
    """`scope` any: `.name`, which looks at the span and then at its process."""

    scope: Literal["any", "span", "resource", "intrinsic"]
    name: str

    def __str__(self) -> str:
        return self.name if self.scope == "intrinsic" else f"{self.scope}.{self.name}".removeprefix("any")


class Value(msgspec.Struct, frozen=True):
    """A literal; a duration is in seconds. `nil` has no value."""

    kind: Literal["string", "number", "duration", "bool", "status", "kind", "nil"]
    value: str | int | float | bool | None


class Compare(msgspec.Struct, frozen=True):
    """A condition on one field."""

    field: Field
    op: Op
    value: Value


class Not(msgspec.Struct, frozen=True):
    """The other spans."""

    what: Condition


class Join(msgspec.Struct, frozen=True):
    """`how` && or ||, of at least two."""

    how: Literal["&&", "||"]
    parts: tuple[Condition, ...]


Condition = Compare | Not | Join | bool


class Filter(msgspec.Struct, frozen=True):
    """`{ condition }`: spans. `{ }` has the condition True."""

    condition: Condition


class Spansets(msgspec.Struct, frozen=True):
    """`&&`: traces with a span of each; `||`: of any. Their spans are all that match."""

    how: Literal["&&", "||"]
    parts: tuple[Filter | Spansets, ...]


class Query(msgspec.Struct, frozen=True):
    """`counts`: (op, number) that a trace's matching spans must meet. `select`: attributes to show besides those asked
    for."""

    spans: Filter | Spansets
    counts: tuple[tuple[Op, float], ...] = ()
    select: tuple[Field, ...] = ()

    def filters(self) -> list[Filter]:
        """All `{ }` of the query."""
        return _filters(self.spans)

    def fields(self) -> list[Field]:
        """Every field that the query names, once, in order."""
        found = [asked.field for one in self.filters() for asked in compares(one.condition)]
        return list(dict.fromkeys([*found, *self.select]))


# ---- tokens -----------------------------------------------------------------------------------------------
class Token(msgspec.Struct, frozen=True):
    kind: str
    text: str
    at: int


def tokens_of(text: str) -> list[Token]:
    found, at, end = [], 0, len(text.rstrip())
    while at < end:
        match = _TOKEN.match(text, at)
        if match is None:
            raise BadQuery(f"at character {at + 1}: {text[at : at + 20]!r} is no TraceQL")
        kind = str(match.lastgroup)
        found.append(Token(kind, match[kind], match.start(kind)))
        at = match.end()
    return [*found, Token("end", "", end)]


def _filters(spans: Filter | Spansets) -> list[Filter]:
    return [spans] if isinstance(spans, Filter) else [one for part in spans.parts for one in _filters(part)]


def compares(condition: Condition) -> list[Compare]:
    """Every comparison of a condition, in order."""
    if isinstance(condition, Compare):
        return [condition]
    if isinstance(condition, Not):
        return compares(condition.what)
    return [] if isinstance(condition, bool) else [one for part in condition.parts for one in compares(part)]
