"""Searches in the local span store: bounded in results, in time and in how many run at once.

Patterns run on RE2, as Tempo's do, so no pattern takes more than linear time.
"""

from __future__ import annotations

import sqlite3
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.compute as pc

from syncline.gateway import tempo_sql
from syncline.gateway.traceql_tree import BadQuery, Field, Filter, Query, compares
from syncline.runtime.trace_store import BUSY_SECONDS, SpanRecord, record_of

SECONDS = 5.0  # one search may take
AT_ONCE = 4  # searches that run; others wait as long as one may take
MOST_SPANS = 50_000  # of one trace
EXAMINED = 20_000  # newest spans in which the values of a tag are looked for
PATTERN = 256  # characters
_COLUMNS = "trace_id, span_id, parent_id, name, service, instance, start_ns, end_ns, attrs, links"
_STEPS = 10_000  # of SQLite's machine, between two looks at the clock


class TooLong(Exception):
    """A search that took more than `SECONDS`, or found no place among `AT_ONCE`."""


class Bounds(msgspec.Struct, frozen=True):
    """Spans that touch [start, end], unix seconds, None: open; of these jobs, None: of all."""

    start: float | None = None
    end: float | None = None
    jobs: tuple[str, ...] | None = None

    def sql(self) -> tempo_sql.Sql:
        """The condition."""
        parts: list[str] = ["1"]
        values: list[Any] = []
        if self.start is not None:
            parts.append("end_ns >= ?")
            values.append(int(self.start * 1e9))
        if self.end is not None:
            parts.append("start_ns <= ?")
            values.append(int(self.end * 1e9))
        if self.jobs is not None:
            parts.append("job in (select value from json_each(?))")
            values.append(msgspec.json.encode(self.jobs).decode())
        return " and ".join(parts), values


class Found(msgspec.Struct, frozen=True):
    """One trace of a search. `matched`: spans that match, of which `spans` are the first. `fields`: of each span, in
    the query's order."""

    trace_id: str
    root_service: str
    root_name: str
    start_ns: int
    end_ns: int
    matched: int
    spans: list[tuple[str, str, int, int, list[Any]]]  # id, name, start, end, values


class TempoStore:
    """The store at `path`, which need not be there yet."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._places = threading.BoundedSemaphore(AT_ONCE)

    def trace(self, trace_id: str, bounds: Bounds) -> list[SpanRecord]:
        """All spans of a trace, earliest first; empty: there is none."""
        where, values = bounds.sql()
        sql = (
            f"select {_COLUMNS} from spans where trace_id = ? and {where} order by start_ns, span_id limit ?"
        )
        with self._open() as (db, _):
            return [record_of(row) for row in db.execute(sql, [trace_id, *values, MOST_SPANS])]

    def search(self, query: Query, bounds: Bounds, limit: int, spans: int) -> list[Found]:
        """Newest first. Raises `BadQuery` or `TooLong`."""
        chosen, values = tempo_sql.traces_of(query.spans, bounds.sql())
        where, where_values = tempo_sql.any_where(query)
        counts = "".join(f" and count(*) {op} ?" for op, _ in query.counts)
        sql = (
            f"select trace_id, count(*) from spans where trace_id in ({chosen}) and {where} "
            f"group by trace_id having 1{counts} order by max(start_ns) desc, trace_id limit ?"
        )
        numbers = [number for _, number in query.counts]
        with self._open() as (db, patterns):
            patterns.learn(db, query.filters(), bounds)
            rows = db.execute(sql, [*values, *where_values, *numbers, limit]).fetchall()
            return [self._found(db, query, trace, matched, spans) for trace, matched in rows]

    def values(self, field: Field, filter: Filter, bounds: Bounds, limit: int) -> list[tuple[str, Any]]:
        """(JSON type, value) that a field has among the newest spans that the filter matches."""
        where, values = tempo_sql.spans_where(filter)
        (type_sql, types), (value_sql, own) = tempo_sql.type_of(field), tempo_sql.value_of(field)
        times, time_values = bounds.sql()
        sql = (
            f"select distinct {type_sql}, {value_sql} from (select * from spans where {where} and {times} "
            f"order by start_ns desc limit {EXAMINED}) as spans where {value_sql} is not null order by 1, 2 limit ?"
        )
        with self._open() as (db, patterns):
            patterns.learn(db, [filter], bounds)
            rows = db.execute(sql, [*types, *own, *values, *time_values, *own, limit]).fetchall()
        return [(kind, value) for kind, value in rows if kind in ("text", "integer", "real", "true", "false")]

    # ---- one search ----------------------------------------------------------------------------------------
    def _found(self, db: sqlite3.Connection, query: Query, trace: str, matched: int, spans: int) -> Found:
        where, values = tempo_sql.any_where(query)
        fields = [tempo_sql.value_of(field) for field in query.fields()]
        shown = "".join(f", {sql}" for sql, _ in fields)
        sql = (
            f"select span_id, name, start_ns, end_ns{shown} from spans where trace_id = ? and {where} "
            "order by start_ns, span_id limit ?"
        )
        asked = [value for _, own in fields for value in own]
        rows = db.execute(sql, [*asked, trace, *values, spans]).fetchall()
        root = "select service, name from spans where trace_id = ? order by parent_id is not null, start_ns limit 1"
        service, name = db.execute(root, [trace]).fetchone()
        whole = "select min(start_ns), max(end_ns) from spans where trace_id = ?"
        start, end = db.execute(whole, [trace]).fetchone()
        told = [(row[0], row[1], row[2], row[3], list(row[4:])) for row in rows]
        return Found(trace, service, name, start, end, matched, told)

    @contextmanager
    def _open(self) -> Iterator[tuple[sqlite3.Connection, _Patterns]]:
        if not self._places.acquire(timeout=SECONDS):
            raise TooLong(f"{AT_ONCE} searches run already")
        try:
            with _connected(self._path) as found:
                yield found
        finally:
            self._places.release()


@contextmanager
def _connected(path: Path) -> Iterator[tuple[sqlite3.Connection, _Patterns]]:
    """A connection that cannot write, ends a search that takes too long, and knows `matches(pattern, text)`."""
    if not path.exists():
        path = Path(":memory:")
    db = sqlite3.connect(path, timeout=BUSY_SECONDS, isolation_level=None)
    pattern = _Patterns()
    try:
        if str(path) == ":memory:":
            db.execute(f"create table spans ({_COLUMNS}, job, trajectory, version)")
        db.execute("pragma query_only = 1")
        db.create_function("matches", 2, pattern.matches, deterministic=True)
        end = time.monotonic() + SECONDS
        db.set_progress_handler(lambda: time.monotonic() > end, _STEPS)
        yield db, pattern
    except sqlite3.OperationalError as error:
        if pattern.bad:
            raise BadQuery(pattern.bad) from None
        if "interrupt" in str(error):
            raise TooLong(f"the search took more than {SECONDS:g} s: ask for less time, or by job") from None
        raise
    finally:
        db.close()


class _Patterns:
    """Whole-text matches by RE2, each text once.

    A call of RE2 costs more than a match, so the texts are matched all at once before SQLite asks for them one by one.
    """

    def __init__(self) -> None:
        self.bad = ""
        self._known: dict[tuple[str, str], bool] = {}

    def learn(self, db: sqlite3.Connection, filters: Sequence[Filter], bounds: Bounds) -> None:
        """Match every text that the filters' patterns will meet. Raises `BadQuery`."""
        times, values = bounds.sql()
        for asked in (one for filter in filters for one in compares(filter.condition)):
            if asked.op in ("=~", "!~"):
                value_sql, own = tempo_sql.value_of(asked.field)
                sql = f"select distinct {value_sql} from spans where {times} and {value_sql} is not null"
                texts = [str(text) for (text,) in db.execute(sql, [*own, *values, *own])]
                self._match(str(asked.value.value), texts)

    def matches(self, pattern: str, text: str | None) -> int:
        """1 or 0. A bad pattern ends the search."""
        if text is None:
            return 0
        key = (pattern, str(text))
        if key not in self._known:  # written since `learn`
            self._match(pattern, [str(text)])
        return int(self._known[key])

    def _match(self, pattern: str, texts: list[str]) -> None:
        if len(pattern) > PATTERN:
            self.bad = f"a pattern has at most {PATTERN} characters"
            raise BadQuery(self.bad)
        try:
            found = pc.match_substring_regex(pa.array(texts, pa.string()), f"^(?s:{pattern})$")
        except pa.ArrowInvalid as error:
            self.bad = f"{pattern!r} is no pattern: {str(error).partition(chr(10))[0]}"
            raise BadQuery(self.bad) from None
        self._known |= dict(zip(((pattern, text) for text in texts), found.to_pylist(), strict=True))
