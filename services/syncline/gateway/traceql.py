"""TraceQL, the subset that the local store answers: text to a tree. Pure.

    { name = "token.sampled" && span.trajectory = "j0123456789-4-1" }
    { span.lag > 1 } && { resource.service.name =~ "roll.*" } | count() > 2 | select(span.version, span.worker)

Spansets join by `&&` and `||`, conditions by `&&`, `||`, `!` and parentheses. What TraceQL has beyond that (structure
operators, aggregates but `count`, metrics, scopes other than span and resource) is refused with a message.
"""

from __future__ import annotations

import re

from syncline.gateway.traceql_tree import (
    ALIASES,
    FLIPPED,
    INTRINSICS,
    KINDS,
    MOST_CHARACTERS,
    MOST_CONDITIONS,
    MOST_DEPTH,
    SECONDS,
    STATUSES,
    BadQuery,
    Compare,
    Condition,
    Field,
    Filter,
    Join,
    Not,
    Op,
    Query,
    Spansets,
    Token,
    Value,
    tokens_of,
)

__all__ = ["BadQuery", "field_of", "parse"]


def parse(text: str) -> Query:
    """The tree of `text`; empty text is `{ }`. Raises `BadQuery`."""
    if len(text) > MOST_CHARACTERS:
        raise BadQuery(f"a query has at most {MOST_CHARACTERS} characters, this one {len(text)}")
    return _Parser(tokens_of(text)).query() if text.strip() else Query(Filter(True))


def field_of(text: str) -> Field:
    """A single field, as tags are named: "span.trajectory", "resource.service.name", ".job". Raises `BadQuery`."""
    tokens = tokens_of(text)
    parser = _Parser(tokens)
    found = parser.field()
    parser.take_end()
    return found


# ---- grammar ----------------------------------------------------------------------------------------------
class _Parser:
    def __init__(self, tokens: list[Token]) -> None:
        self._tokens, self._next, self._conditions = tokens, 0, 0

    def query(self) -> Query:
        spans = self._spansets(0)
        counts: list[tuple[Op, float]] = []
        select: list[Field] = []
        while self._skip("|"):
            self._stage(counts, select)
        self.take_end()
        return Query(spans, tuple(counts), tuple(select))

    def field(self) -> Field:
        token = self._take()
        if token.kind == "field":
            return self._attribute(token)
        name = ALIASES.get(token.text, token.text)
        if token.kind == "word" and name in INTRINSICS:
            return Field("intrinsic", name)
        raise self._unfit(token, "a field, such as span.trajectory, .job or name, was expected")

    def take_end(self) -> None:
        if (token := self._take()).kind != "end":
            raise self._unfit(token, "nothing may follow here")

    def _stage(self, counts: list[tuple[Op, float]], select: list[Field]) -> None:
        token = self._take()
        if token.text not in ("count", "select"):
            raise self._unfit(token, "the local store knows `| count() > N` and `| select(...)` alone")
        self._expect("(")
        if token.text == "select":
            select.append(self.field())
            while self._skip(","):
                select.append(self.field())
            self._expect(")")
            return
        self._expect(")")
        op, number = self._op(), self._take()
        if number.kind != "number" or op in ("=~", "!~"):
            raise self._unfit(number, "count() is compared with a number")
        counts.append((op, float(number.text)))

    def _spansets(self, depth: int) -> Filter | Spansets:
        either = [self._both(depth)]
        while self._skip("||"):
            either.append(self._both(depth))
        return either[0] if len(either) == 1 else Spansets("||", tuple(either))

    def _both(self, depth: int) -> Filter | Spansets:
        both = [self._spanset(depth)]
        while self._skip("&&"):
            both.append(self._spanset(depth))
        if (token := self._peek()).text in (">", ">>", "<", "<<", "~", "!", "&", "="):
            raise self._unfit(token, "structure operators are not answered by the local store")
        return both[0] if len(both) == 1 else Spansets("&&", tuple(both))

    def _spanset(self, depth: int) -> Filter | Spansets:
        self._check_depth(depth)
        if self._skip("("):
            inner = self._spansets(depth + 1)
            self._expect(")")
            return inner
        self._expect("{")
        if self._skip("}"):
            return Filter(True)
        condition = self._any_of(depth + 1)
        self._expect("}")
        return Filter(condition)

    def _any_of(self, depth: int) -> Condition:
        parts = [self._all_of(depth)]
        while self._skip("||"):
            parts.append(self._all_of(depth))
        return parts[0] if len(parts) == 1 else Join("||", tuple(parts))

    def _all_of(self, depth: int) -> Condition:
        parts = [self._condition(depth)]
        while self._skip("&&"):
            parts.append(self._condition(depth))
        return parts[0] if len(parts) == 1 else Join("&&", tuple(parts))

    def _condition(self, depth: int) -> Condition:
        self._check_depth(depth)
        if self._skip("("):
            inner = self._any_of(depth + 1)
            self._expect(")")
            return inner
        if self._skip("!"):
            return Not(self._condition(depth + 1))
        self._conditions += 1
        if self._conditions > MOST_CONDITIONS:
            raise BadQuery(f"a query has at most {MOST_CONDITIONS} conditions")
        if self._peek().text in ("true", "false") and self._peek(1).text in ("}", ")", "&&", "||"):
            return self._take().text == "true"
        return self._compare()

    def _compare(self) -> Condition:
        if self._is_field():
            field, at, op = self.field(), self._peek(), self._op()
            return _checked(Compare(field, op, self._value()), at)
        value, at, op = self._value(), self._peek(), self._op()
        if op not in FLIPPED:
            raise self._unfit(at, "a pattern stands on the right")
        return _checked(Compare(self.field(), FLIPPED[op], value), at)

    def _is_field(self) -> bool:
        token = self._peek()
        return token.kind == "field" or ALIASES.get(token.text, token.text) in INTRINSICS

    def _op(self) -> Op:
        token = self._take()
        for op in ("=", "!=", ">", ">=", "<", "<=", "=~", "!~"):
            if token.text == op and token.kind == "sign":
                return op
        raise self._unfit(token, "one of = != > >= < <= =~ !~ was expected")

    def _value(self) -> Value:
        token = self._take()
        if token.kind == "string":
            return Value("string", _unquoted(token.text))
        if token.kind == "duration":
            return Value("duration", _seconds(token.text))
        if token.kind == "number":
            return Value("number", float(token.text) if "." in token.text else int(token.text))
        if token.text in ("true", "false"):
            return Value("bool", token.text == "true")
        if token.text == "nil":
            return Value("nil", None)
        if token.text in STATUSES:
            return Value("status", token.text)
        if token.text in KINDS:
            return Value("kind", token.text)
        raise self._unfit(
            token, "a value was expected: a string in quotes, a number, a duration, true, false, nil"
        )

    def _attribute(self, token: Token) -> Field:
        scope, _, name = token.text.partition(".")
        name = _unquoted(name) if name.startswith('"') else name
        if re.search(r'["\\\x00-\x1f]', name) or len(name) > 256:
            raise self._unfit(token, "an attribute's name has no quotes, backslashes or control characters")
        if scope == "":
            return Field("any", name)
        if scope in ("span", "resource"):
            return Field("span" if scope == "span" else "resource", name)
        raise self._unfit(token, "scopes are span. and resource.; a leading dot looks in both")

    # ---- steps
    def _peek(self, ahead: int = 0) -> Token:
        return self._tokens[min(self._next + ahead, len(self._tokens) - 1)]

    def _take(self) -> Token:
        token = self._peek()
        self._next += 1
        return token

    def _skip(self, sign: str) -> bool:
        if self._peek().kind == "sign" and self._peek().text == sign:
            self._next += 1
            return True
        return False

    def _expect(self, sign: str) -> None:
        if not self._skip(sign):
            raise self._unfit(self._peek(), f"{sign!r} was expected")

    def _check_depth(self, depth: int) -> None:
        if depth > MOST_DEPTH:
            raise BadQuery(f"a query nests at most {MOST_DEPTH} deep")

    def _unfit(self, token: Token, why: str) -> BadQuery:
        return BadQuery(f"at character {token.at + 1}, {token.text or 'the end'!r}: {why}")


def _checked(found: Compare, at: Token) -> Compare:
    """Raises `BadQuery` for an operator that the value cannot take."""
    kind, op = found.value.kind, found.op
    if op in ("=~", "!~") and kind != "string":
        raise BadQuery(f"at character {at.at + 1}: {op} takes a pattern in quotes")
    if kind in ("bool", "status", "kind", "nil") and op not in ("=", "!="):
        raise BadQuery(f"at character {at.at + 1}: {op} orders strings, numbers and durations alone")
    return found


def _unquoted(text: str) -> str:
    if text.startswith("`"):
        return text[1:-1]
    return re.sub(
        r"\\(.)", lambda found: {"n": "\n", "t": "\t"}.get(found[1], found[1]), text[1:-1], flags=re.S
    )


def _seconds(text: str) -> float:
    unit = re.sub(r"[0-9.]", "", text)
    return float(text.removesuffix(unit)) * SECONDS[unit]
