"""A job's diagnostics as people see them: in pages, of one token, and added up for the summary. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable

import msgspec

from syncline.contract.diagnosis import TERMS, Diagnostics


class DiagnosticsPage(msgspec.Struct, frozen=True, kw_only=True):
    """The decomposition of each measured update, in the order recorded."""

    items: list[Diagnostics]
    next: str | None


class Decomposition(msgspec.Struct, frozen=True, kw_only=True):
    """One probed token's gap taken apart: trainer minus sampled log-prob = `mismatch` + `staleness`, in nats."""

    worker: str  # that scored the token again
    rollout_logprob: float  # under the version being updated
    total: float
    mismatch: float
    staleness: float
    kv_cache: float | None  # None: the contract's KV cache is wide


class TermSummary(msgspec.Struct, frozen=True, kw_only=True):
    """One term of the decomposition over all measured updates, |difference| in nats."""

    tokens: int
    mean: float
    p99: float  # the largest of an update
    max: float


class DiagnosticsSummary(msgspec.Struct, frozen=True, kw_only=True):
    """Mismatch and staleness as measured. `unmeasured`: term -> why the newest update does not have it."""

    updates: int  # measured
    terms: dict[str, TermSummary]
    unmeasured: dict[str, str]
    baseline: float | None  # of the mean |mismatch|; None: not learned
    alarms: tuple[str, ...]


def summarise_diagnostics(found: Iterable[Diagnostics]) -> DiagnosticsSummary:
    """Of all records of a job."""
    records = last_of_each(found)
    terms = {}
    for name in TERMS:
        tails = [r.terms[name] for r in records if name in r.terms]
        tokens = sum(tail.count for tail in tails)
        if tokens:
            terms[name] = TermSummary(
                tokens=tokens,
                mean=math.fsum(tail.mean * tail.count for tail in tails) / tokens,
                p99=max(tail.p99 for tail in tails),
                max=max(tail.max for tail in tails),
            )
    return DiagnosticsSummary(
        updates=sum(1 for r in records if r.terms),
        terms=terms,
        unmeasured=records[-1].unmeasured if records else dict.fromkeys(TERMS, "no update was measured"),
        baseline=next((r.baseline for r in reversed(records) if r.baseline is not None), None),
        alarms=tuple(f"update {r.update}: {alarm}" for r in records for alarm in r.alarms),
    )


def last_of_each(found: Iterable[Diagnostics]) -> list[Diagnostics]:
    """One record per update, in order; of an update that was told twice the later."""
    last = {record.update: record for record in found}
    return [last[update] for update in sorted(last)]
