"""What a finished job left behind, as the figures need it: phases, events, metrics, versions, spans."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import msgspec
from stack import Stack
from timeline import Interval

from syncline.contract import token_path, version_path
from syncline.contract.hops import Hop
from syncline.runtime.trace_store import SpanRecord, spans_of


class Ordered(msgspec.Struct, frozen=True):
    """A phase with its end: when the next one was ordered."""

    seq: int
    name: str
    rollout: str
    trainer: str
    start: float
    end: float

    @property
    def when(self) -> Interval:
        return self.start, self.end


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """One job. All times are wall-clock unix seconds of one machine."""

    workers: tuple[str, ...]
    phases: list[Ordered]
    events: list[tuple[float, dict[str, Any]]]
    metrics: list[dict[str, Any]]
    versions: list[dict[str, Any]]
    spans: dict[str, list[SpanRecord]]  # by hop

    def of(self, hop: Hop) -> list[SpanRecord]:
        return self.spans[hop.name]

    def times(self, hop: Hop, **attributes: str) -> list[Interval]:
        """When the hop was passed, by spans with these attributes."""
        wanted = attributes.items()
        return [
            (s.start, s.start + s.seconds)
            for s in self.of(hop)
            if all(s.attributes[name] == value for name, value in wanted)
        ]

    def told(self, kind: str, who: str = "") -> list[tuple[float, dict[str, Any]]]:
        """Events of a kind, of one process or of all."""
        return [
            (at, event)
            for at, event in self.events
            if event["type"] == kind and who in ("", event.get("who"))
        ]

    def ordered(self, name: str) -> list[Ordered]:
        return [phase for phase in self.phases if phase.name == name]

    def awake(self, phases: list[Ordered], side: str) -> list[Interval]:
        """The parts of `phases` in which `side` ("rollout", "trainer") is ordered awake."""
        return [
            phase.when
            for phase in phases
            if (phase.rollout if side == "rollout" else phase.trainer) == "awake"
        ]


def read(stack: Stack, job: str) -> Record:
    """The record of an ended job."""
    path = f"/v1/jobs/{job}"
    rows = stack.pages(f"{path}/phases")
    ends = [row["at"] for row in rows[1:]] + [rows[-1]["at"]]
    names = [hop.name for hop in (*token_path.TOKEN_PATH, *version_path.VERSION_PATH)]
    spans: dict[str, list[SpanRecord]] = defaultdict(list)
    for span in spans_of(stack.runs / "traces.sqlite", job=job, names=names, limit=1_000_000):
        spans[span.name].append(span)
    sampled = spans[token_path.SAMPLED.name]
    return Record(
        workers=tuple(sorted({str(span.attributes["worker"]) for span in sampled})),
        phases=[
            Ordered(row["seq"], row["phase"], row["rollout"], row["trainer"], row["at"], end)
            for row, end in zip(rows, ends, strict=True)
        ],
        events=stack.events(job),
        metrics=stack.pages(f"{path}/metrics"),
        versions=stack.pages(f"{path}/versions"),
        spans=spans,
    )
