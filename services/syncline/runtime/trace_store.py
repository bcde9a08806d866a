"""The local span store: one SQLite file per run root, written by all processes, read by CLI and gateway.

Many processes append at once, so the file is in WAL mode and a writer waits for another one. The store knows
rows and nothing of OpenTelemetry: `tracing.py` turns spans into `SpanRecord`s.
"""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

Attribute = str | int | float | bool | None | list[str | int | float | bool]

BUSY_SECONDS = 20.0
_JSON = msgspec.json.Encoder()
_TRACEPARENT = re.compile("00-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})")
# rows lie in the order of their writing: by random ids each would be in a page of its own, and every page is written
_SCHEMA = """
create table if not exists spans (
  trace_id   text not null,
  span_id    text not null primary key,
  parent_id  text,
  name       text not null,
  service    text not null,
  instance   text not null,
  start_ns   integer not null,
  end_ns     integer not null,
  attrs      text not null,
  links      text not null,
  job        text,
  trajectory text,
  version    text
);
create index if not exists spans_trace on spans (trace_id, start_ns);
create index if not exists spans_trajectory on spans (trajectory, start_ns) where trajectory is not null;
create index if not exists spans_version on spans (job, version, start_ns) where version is not null;
create index if not exists spans_job on spans (job, start_ns);
create index if not exists spans_start on spans (start_ns);
"""


_INSERT = f"insert or ignore into spans values ({', '.join('?' * 13)})"
Row = tuple[Any, ...]
"""A span in the order of the table's columns."""


class SpanRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One finished span. Times are wall-clock unix nanoseconds; `links` are W3C traceparents."""

    trace_id: str  # 32 hex digits
    span_id: str  # 16 hex digits
    parent_id: str | None  # None: the root of its trace
    name: str
    service: str
    instance: str
    start_ns: int
    end_ns: int
    attributes: dict[str, Attribute]
    links: tuple[str, ...] = ()

    @property
    def start(self) -> float:
        """Wall-clock unix seconds."""
        return self.start_ns / 1e9

    @property
    def seconds(self) -> float:
        """Duration."""
        return (self.end_ns - self.start_ns) / 1e9


class TraceStore:
    """One process's connection to the store. The caller keeps it from forks and from two threads at once."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._db = sqlite3.connect(path, timeout=BUSY_SECONDS, check_same_thread=False, isolation_level=None)
        self._db.execute("pragma journal_mode = wal")
        self._db.execute("pragma synchronous = normal")
        self._db.executescript(_SCHEMA)

    def write(self, spans: Iterable[SpanRecord]) -> None:
        """Append all of them or none; one that is there already stays as it is. Raises `sqlite3.Error`."""
        self.write_rows([_row(span) for span in spans])

    def write_rows(self, rows: Sequence[Row]) -> None:
        """`write` of what `row_of` has made."""
        self._db.execute("begin immediate")
        try:
            self._db.executemany(_INSERT, rows)
            self._db.execute("commit")
        except BaseException:
            self._db.execute("rollback")
            raise

    def close(self) -> None:
        """Close the file."""
        self._db.close()


def read_trace(store: Path, trace_id: str) -> list[SpanRecord]:
    """All spans of one trace, earliest start first; empty if there are none or no store yet."""
    return _select(store, "trace_id = ?", [trace_id])


def spans_of(
    store: Path,
    *,
    trajectory: str | None = None,
    version: str | None = None,
    job: str | None = None,
    names: Sequence[str] = (),
    limit: int = 100_000,
) -> list[SpanRecord]:
    """Spans with these attributes, earliest start first. `names`: only these hops; empty: all.

    Raises `ValueError` if none of trajectory, version and job is given.
    """
    asked = {"trajectory": trajectory, "version": version, "job": job}
    given = {column: value for column, value in asked.items() if value is not None}
    if not given:
        raise ValueError("spans_of needs a trajectory, a version or a job")
    # a "+" keeps SQLite from an index: it takes that of a job, of maybe a million spans, for as good as a trajectory's
    few = trajectory is not None
    where = " and ".join(f"+{column} = ?" if few and column == "job" else f"{column} = ?" for column in given)
    if names:
        where += f" and name in ({', '.join('?' * len(names))})"
    return _select(store, where, [*given.values(), *names], limit)


def parse_traceparent(text: str) -> tuple[int, int, int]:
    """(trace id, span id, flags) of a W3C traceparent. Raises `ValueError` showing the legal form."""
    found = _TRACEPARENT.fullmatch(text)
    if found is None or not int(found[1], 16) or not int(found[2], 16):
        raise ValueError(
            f"traceparent {text!r} is not of the form 00-<32 hex>-<16 hex>-<2 hex>, ids not zero"
        )
    return int(found[1], 16), int(found[2], 16), int(found[3], 16)


def traceparent_of(trace: int, span: int, flags: int) -> str:
    """The W3C form: inverse of `parse_traceparent`."""
    return f"00-{trace:032x}-{span:016x}-{flags:02x}"


def row_of(
    trace_id: str,
    span_id: str,
    parent_id: str | None,
    name: str,
    service: str,
    instance: str,
    start_ns: int,
    end_ns: int,
    attributes: Mapping[str, Any],
    links: Sequence[str],
) -> Row:
    """The row of a span; arguments as in `SpanRecord`."""
    job, trajectory, version = map(attributes.get, ("job", "trajectory", "version"))
    return (
        trace_id,
        span_id,
        parent_id,
        name,
        service,
        instance,
        start_ns,
        end_ns,
        _JSON.encode(attributes).decode(),
        _JSON.encode(links).decode() if links else "[]",
        None if job is None else str(job),
        None if trajectory is None else str(trajectory),
        None if version is None else str(version),
    )


def _row(span: SpanRecord) -> Row:
    return row_of(*(getattr(span, name) for name in SpanRecord.__struct_fields__))


def _select(store: Path, where: str, values: Sequence[str], limit: int = 100_000) -> list[SpanRecord]:
    if not store.exists():
        return []
    db = sqlite3.connect(store, timeout=BUSY_SECONDS, isolation_level=None)
    try:
        rows = db.execute(
            "select trace_id, span_id, parent_id, name, service, instance, start_ns, end_ns, attrs, links "
            f"from spans where {where} order by start_ns, span_id limit {int(limit)}",
            list(values),
        ).fetchall()
    except sqlite3.OperationalError as error:
        if "no such table" in str(error):  # made a moment ago by a process that has not written its schema
            return []
        raise
    finally:
        db.close()
    return [record_of(row) for row in rows]


def record_of(row: tuple[Any, ...]) -> SpanRecord:
    """The span of a row: its columns in the table's order, up to `links`."""
    trace_id, span_id, parent_id, name, service, instance, start_ns, end_ns, attrs, links = row
    return SpanRecord(
        trace_id=trace_id,
        span_id=span_id,
        parent_id=parent_id,
        name=name,
        service=service,
        instance=instance,
        start_ns=start_ns,
        end_ns=end_ns,
        attributes=msgspec.json.decode(attrs, type=dict[str, Attribute]),
        links=msgspec.json.decode(links, type=tuple[str, ...]),
    )
