"""`Evidence`: all that a job left behind and that its summary and report are made from. Shapes only."""

from __future__ import annotations

from typing import Literal

import msgspec

from syncline.contract.diagnosis import Diagnostics
from syncline.contract.drawn import PromptAccount
from syncline.contract.evaluation import Evaluation
from syncline.contract.events import JobState, LedgerSample, Phase, UpdateMetrics
from syncline.contract.version_path import VersionRecord

LedgerState = Literal["running", "buffered", "trained", "filtered", "failed", "expired"]
STATES: tuple[LedgerState, ...] = ("running", "buffered", "trained", "filtered", "failed", "expired")
OPEN_STATES = frozenset({"running", "buffered"})
LEFT_OVER = frozenset({"job ended", "cancelled"})  # reasons of an expiry that is not the lag policy's


class LedgerLine(msgspec.Struct, frozen=True, array_like=True):
    """One trajectory of the ledger. `tokens`: sampled tokens, None when it was never published."""

    trajectory: str
    state: LedgerState
    reason: str = ""
    tokens: int | None = None


class SegmentFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What one update consumed, read from its segment file."""

    update: int
    trajectories: tuple[str, ...]
    tokens: tuple[int, ...]  # sampled tokens of each, same order
    spans: int = 0  # version spans in all of them


class SampleText(msgspec.Struct, frozen=True, kw_only=True):
    """One trained trajectory as text, for people."""

    update: int
    trajectory: str
    prompt: str  # "" when the record holds no text of the prompt
    text: str
    reward: float | None


class Evidence(msgspec.Struct, frozen=True, kw_only=True):
    """All that a report is made from. Times are wall-clock unix seconds; None: has not happened."""

    job: str
    name: str
    spec_hash: str
    state: JobState
    reason: str
    created: float | None
    started: float | None
    ended: float | None
    max_lag: int
    lag_policy: str
    metrics: tuple[UpdateMetrics, ...]
    samples: tuple[LedgerSample, ...]
    phases: tuple[Phase, ...]
    versions: tuple[VersionRecord, ...]
    counts: dict[str, int]
    ledger: tuple[LedgerLine, ...]
    segments: tuple[SegmentFacts, ...]
    texts: tuple[SampleText, ...] = ()
    diagnostics: tuple[Diagnostics, ...] = ()
    evaluations: tuple[Evaluation, ...] = ()
    prompts: PromptAccount = PromptAccount()
