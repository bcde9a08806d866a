"""TraceQL's tree as SQL over the local span store. Pure.

A condition is 0 or 1 and never null: a field that a span lacks meets no comparison, as in Tempo (`= nil` asks for just
that). Values of the query are parameters and never part of the text.
"""

from __future__ import annotations

from typing import Any

from syncline.gateway.traceql_tree import (
    BadQuery,
    Compare,
    Condition,
    Field,
    Filter,
    Join,
    Not,
    Query,
    Spansets,
    Value,
)

Sql = tuple[str, list[Any]]
_SAME = "from spans as r where r.trace_id = spans.trace_id"
_ROOT = f"(select {{}} {_SAME} order by r.parent_id is not null, r.start_ns limit 1)"
_INTRINSICS = {
    "name": "name",
    "duration": "(end_ns - start_ns)",
    "status": "(case when json_type(attrs, '$.error') is null then 'unset' else 'error' end)",
    "statusMessage": "json_extract(attrs, '$.error')",
    "kind": "'internal'",
    "rootName": _ROOT.format("r.name"),
    "rootServiceName": _ROOT.format("r.service"),
    "traceDuration": f"(select max(r.end_ns) - min(r.start_ns) {_SAME})",
    "trace:id": "trace_id",
    "span:id": "span_id",
}
_RESOURCE = {"service.name": "service", "service.instance.id": "instance"}
_INDEXED = ("job", "trajectory", "version")  # attributes with a column of their own
_TAKES = {  # kinds of values that a field can be compared with
    "duration": ("duration", "number"),
    "traceDuration": ("duration", "number"),
    "status": ("status",),
    "kind": ("kind",),
}


def value_of(field: Field) -> Sql:
    """SQL of a field's value; null where a span lacks it."""
    if field.scope == "intrinsic":
        return _INTRINSICS[field.name], []
    if field.scope != "span" and field.name in _RESOURCE:
        return _RESOURCE[field.name], []
    if field.scope == "resource":
        return "null", []
    return "json_extract(attrs, ?)", [_path(field)]


def type_of(field: Field) -> Sql:
    """SQL of JSON's name of a field's type; null where a span lacks it."""
    if field.scope == "intrinsic":
        return ("'integer'" if field.name in ("duration", "traceDuration") else "'text'"), []
    if field.scope != "span" and field.name in _RESOURCE:
        return "'text'", []
    if field.scope == "resource":
        return "null", []
    return "json_type(attrs, ?)", [_path(field)]


def spans_where(filter: Filter) -> Sql:
    """The condition of one `{ }`. Raises `BadQuery` for a comparison that no span could ever meet by its types."""
    return _where(filter.condition)


def any_where(query: Query) -> Sql:
    """Spans that any `{ }` of the query matches."""
    parts = [spans_where(one) for one in query.filters()]
    return "(" + " or ".join(sql for sql, _ in parts) + ")", [
        value for _, values in parts for value in values
    ]


def traces_of(spans: Filter | Spansets, bounds: Sql) -> Sql:
    """A select of the ids of matching traces; `bounds`: a condition on spans' times."""
    if isinstance(spans, Filter):
        sql, values = spans_where(spans)
        return f"select trace_id from spans where {sql} and {bounds[0]}", [*values, *bounds[1]]
    word = "intersect" if spans.how == "&&" else "union"
    parts = [traces_of(part, bounds) for part in spans.parts]
    text = f" {word} ".join(f"select trace_id from ({sql})" for sql, _ in parts)
    return text, [value for _, values in parts for value in values]


def _where(condition: Condition) -> Sql:
    if isinstance(condition, bool):
        return ("1" if condition else "0"), []
    if isinstance(condition, Not):
        sql, values = _where(condition.what)
        return f"(not {sql})", values
    if isinstance(condition, Join):
        parts = [_where(part) for part in condition.parts]
        word = " and " if condition.how == "&&" else " or "
        return "(" + word.join(sql for sql, _ in parts) + ")", [v for _, values in parts for v in values]
    return _compare(condition)


def _compare(asked: Compare) -> Sql:
    field, value = asked.field, asked.value
    _require(field, value)
    type_sql, type_values = type_of(field)
    if value.kind == "nil":
        return f"({type_sql} is {'' if asked.op == '=' else 'not '}null)", type_values
    if (
        field.scope in ("any", "span")
        and field.name in _INDEXED
        and asked.op == "="
        and value.kind == "string"
    ):
        return f"({field.name} is ?)", [value.value]  # `is` uses the index, and is never null
    sql, values = value_of(field)
    kinds = {"string": "('text')", "bool": "('true', 'false')"}.get(value.kind, "('integer', 'real')")
    kinds = "('text')" if value.kind in ("status", "kind") else kinds
    guard = f"coalesce({type_sql} in {kinds}, 0)"
    if asked.op in ("=~", "!~"):
        matched = f"matches(?, {sql})"
        test = matched if asked.op == "=~" else f"not {matched}"
        return f"({guard} and {test})", [*type_values, value.value, *values]
    return f"({guard} and {sql} {asked.op} ?)", [*type_values, *values, _plain(field, value)]


def _plain(field: Field, value: Value) -> Any:
    if field.scope == "intrinsic" and value.kind in ("duration", "number"):
        assert isinstance(value.value, int | float)
        return (
            value.value * 1e9 if value.kind == "duration" else value.value
        )  # durations are kept in nanoseconds
    if value.kind == "bool":
        return int(bool(value.value))
    return value.value


def _require(field: Field, value: Value) -> None:
    """Raises `BadQuery` for a value that is not of the intrinsic's type."""
    if field.scope == "intrinsic" and value.kind != "nil":
        takes = _TAKES.get(field.name, ("string",))
        if value.kind not in takes:
            raise BadQuery(f"{field} is compared with a {' or '.join(takes)}, not with a {value.kind}")
    elif value.kind in ("status", "kind"):
        raise BadQuery(f"{field} is no status or kind: put {value.value!r} in quotes")


def _path(field: Field) -> str:
    return f'$."{field.name}"'
