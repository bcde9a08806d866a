"""Versions of a job: from Redis while it knows them, else put together from spans. And each one's own path.

Pure but for `version_spans` and what has `recorded` in its name, which fetch. The record is the truth; spans add how
long each hop took, and hops that only the record knows are told without a duration.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from syncline.contract.streams import VERSIONS
from syncline.contract.version_path import (
    VERSION_PATH,
    VersionId,
    VersionRecord,
    WorkerPath,
    parse_version,
)
from syncline.gateway.shapes import HopView, VersionView
from syncline.runtime.bus import BadMessage, Bus
from syncline.runtime.tracing import SpanRecord, spans_of

_LATEST = b"latest"
_HOPS = tuple(hop.name for hop in VERSION_PATH)
_PER_WORKER = ("version.staged", "version.verified", "version.active")


def recorded(bus: Bus, job: str) -> tuple[dict[VersionId, VersionRecord], VersionId | None]:
    """All versions that Redis knows, oldest first, and the newest published one."""
    fields = bus.hgetall(VERSIONS.at(job))
    latest = fields.pop(_LATEST, None)
    records = [_decoded(job, name.decode(), text) for name, text in fields.items()]
    found = {record.version: record for record in records}
    return dict(sorted(found.items())), parse_version(latest.decode()) if latest else None


def names_recorded(bus: Bus, job: str) -> list[VersionId]:
    """The versions that Redis knows, oldest first. A long job has thousands: their records are not fetched."""
    names = bus.call("HKEYS", VERSIONS.at(job))
    return sorted(parse_version(name.decode()) for name in names if name != _LATEST)


def some_recorded(
    bus: Bus, job: str, names: Sequence[VersionId]
) -> tuple[dict[VersionId, VersionRecord], VersionId | None]:
    """`recorded`, of `names` alone and in their order; one that Redis no longer knows is left out."""
    *texts, latest = bus.hmget(VERSIONS.at(job), [*map(str, names), _LATEST])
    told = zip(names, texts, strict=True)
    found = {name: _decoded(job, str(name), text) for name, text in told if text is not None}
    return found, None if latest is None else parse_version(latest.decode())


def epochs_recorded(bus: Bus, job: str, number: int) -> list[VersionId]:
    """The versions of that number that Redis knows."""
    end = f".{number}".encode()
    names = bus.call("HKEYS", VERSIONS.at(job))
    return [parse_version(name.decode()) for name in names if name.endswith(end)]


def one_recorded(bus: Bus, job: str, version: VersionId) -> VersionRecord | None:
    """A version that Redis knows, or None."""
    text = bus.hget(VERSIONS.at(job), str(version))
    return None if text is None else _decoded(job, str(version), text)


def _decoded(job: str, name: str, text: bytes) -> VersionRecord:
    try:
        return msgspec.json.decode(text, type=VersionRecord)
    except msgspec.MsgspecError as error:
        raise BadMessage(f"{VERSIONS.at(job)} {name}: {error}") from None


def version_spans(traces: Path, job: str, version: VersionId | None = None) -> list[SpanRecord]:
    """Spans of the version path: of one version, or of all."""
    which = None if version is None else str(version)
    return spans_of(traces, job=job, version=which, names=_HOPS)


def from_spans(spans: Iterable[SpanRecord]) -> dict[VersionId, VersionRecord]:
    """Versions as their spans tell of them, oldest first."""
    by_version: dict[VersionId, list[SpanRecord]] = {}
    for span in spans:
        by_version.setdefault(parse_version(str(span.attributes["version"])), []).append(span)
    return {version: _rebuilt(version, passed) for version, passed in sorted(by_version.items())}


def _rebuilt(version: VersionId, spans: Sequence[SpanRecord]) -> VersionRecord:
    record = VersionRecord(
        version=version, parent=None, optimizer_step=version.number, contract="", state="minted"
    )
    for span in spans:
        _TELLS[span.name](record, span)
    return record


def _minted(record: VersionRecord, span: SpanRecord) -> None:
    parent = span.attributes["parent"]
    record.parent = None if parent in (None, "none") else parse_version(str(parent))
    record.optimizer_step = int(str(span.attributes["optimizer_step"]))
    record.minted, record.state = _end(span), "minted"


def _converted(record: VersionRecord, span: SpanRecord) -> None:
    record.representation = str(span.attributes["representation"])
    record.nbytes = int(str(span.attributes["bytes"]))
    record.new_bytes = int(str(span.attributes["new_bytes"]))
    record.converted, record.state = _end(span), "converted"


def _published(record: VersionRecord, span: SpanRecord) -> None:
    record.digest = str(span.attributes["digest"])
    record.published, record.state = _end(span), "published"


def _worker(record: VersionRecord, span: SpanRecord) -> WorkerPath:
    return record.workers.setdefault(str(span.attributes["worker"]), WorkerPath())


def _staged(record: VersionRecord, span: SpanRecord) -> None:
    _worker(record, span).staged = _end(span)


def _verified(record: VersionRecord, span: SpanRecord) -> None:
    worker, gap = _worker(record, span), span.attributes["canary_gap"]
    worker.verified, worker.verdict = _end(span), str(span.attributes["verdict"])
    worker.loaded_digest = str(span.attributes["loaded_digest"])
    worker.canary_gap = float(gap) if isinstance(gap, int | float) else None


def _active(record: VersionRecord, span: SpanRecord) -> None:
    worker, pause = _worker(record, span), span.attributes["pause_ms"]
    worker.active, worker.policy = _end(span), str(span.attributes["policy"])
    worker.pause_ms = float(pause) if isinstance(pause, int | float) else None
    if record.active is None:
        record.active = worker.active
    record.state = "active"


def _retired(record: VersionRecord, span: SpanRecord) -> None:
    record.retired, record.state = _end(span), "retired"


_TELLS: Mapping[str, Callable[[VersionRecord, SpanRecord], None]] = dict(
    zip(_HOPS, (_minted, _converted, _published, _staged, _verified, _active, _retired), strict=True)
)


def _end(span: SpanRecord) -> float:
    return span.end_ns / 1e9


# ---- the path ---------------------------------------------------------------------------------------------
def version_view(record: VersionRecord, spans: Sequence[SpanRecord]) -> VersionView:
    """The version's path in the order of `VERSION_PATH`; within a hop by worker, then by time."""
    told = [hop_view(span) for span in spans]
    known = {(hop.hop, hop.attributes.get("worker")) for hop in told}
    told += [hop for hop in _from_record(record) if (hop.hop, hop.attributes.get("worker")) not in known]
    told.sort(key=lambda hop: (_HOPS.index(hop.hop), str(hop.attributes.get("worker", "")), hop.at or 0.0))
    return VersionView(record=record, path=told)


def hop_view(span: SpanRecord) -> HopView:
    """A hop as its span tells of it."""
    attributes = {name: value for name, value in span.attributes.items() if name != "job"}
    return HopView(
        hop=span.name,
        source="span",
        at=span.start,
        seconds=span.seconds,
        service=span.service,
        instance=span.instance,
        attributes=attributes,
    )


def _from_record(record: VersionRecord) -> list[HopView]:
    services = {hop.name: hop.done_by for hop in VERSION_PATH}

    def told(hop: str, at: float | None, **attributes: Any) -> list[HopView]:
        if at is None:
            return []
        named = {"version": str(record.version), **attributes}
        service = services[hop]
        instance = str(attributes.get("worker", service))
        return [
            HopView(
                hop=hop,
                source="record",
                at=at,
                seconds=None,
                service=service,
                instance=instance,
                attributes=named,
            )
        ]

    found = [
        *told("version.minted", record.minted, optimizer_step=record.optimizer_step),
        *told(
            "version.converted", record.converted, representation=record.representation, bytes=record.nbytes
        ),
        *told("version.published", record.published, digest=record.digest),
        *told("version.retired", record.retired),
    ]
    for worker, path in record.workers.items():
        times = (path.staged, path.verified, path.active)
        for hop, at in zip(_PER_WORKER, times, strict=True):
            found += told(hop, at, worker=worker, digest=record.digest)
    return found
