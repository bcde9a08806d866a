"""What a contract's same-version terms amount to when a job begins, and whether they have drifted since.

Learned from the first `learn` updates at which a term was measured, beginning with base version 0: the weights are
then near the first ones, and whatever a term shows is the contract's and the engines' own. Kept in the run folder, so
that a resumed trainer compares with the same figures; a record of another contract is not used.

The staleness term has no baseline: it follows lag and step size, and growing with them is what it is for.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from pathlib import Path

import msgspec

from syncline.contract.diagnosis import Tail
from syncline.runtime.durable import write_whole

_LOG = logging.getLogger(__name__)
WATCHED = ("mismatch", "kv_cache", "noise_staleness", "noise_decode")
FLOOR = 1e-4
"""Nats. A mean below it is no drift, whatever its baseline: matched executions stay below, other weights do not."""


class _Kept(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """`baseline.json`. `means`: term -> update (as text) -> mean |difference|."""

    contract: str
    learn: int
    means: dict[str, dict[str, float]] = {}


class Baselines:
    """The baselines of one job. `path`: where they are kept; `drift`: how many times its baseline is an alarm."""

    def __init__(self, path: Path, contract: str, learn: int, drift: float) -> None:
        self._path, self._drift = path, drift
        self._kept = _read(path, contract, learn)

    def of(self, term: str) -> float | None:
        """The term's mean |difference| as learned; None: not learned yet, or not watched."""
        means = self._kept.means.get(term, {})
        return math.fsum(means.values()) / len(means) if len(means) >= self._kept.learn else None

    def note(self, update: int, terms: Mapping[str, Tail]) -> tuple[str, ...]:
        """Take notice of an update's terms; returns, in words, those that have drifted from what is learned.

        An update that is noted twice counts once.
        """
        alarms, learned = [], False
        for term in WATCHED:
            tail = terms.get(term)
            if tail is None or tail.count == 0:
                continue
            baseline = self.of(term)
            if baseline is None:
                self._kept.means.setdefault(term, {})[str(update)] = tail.mean
                learned = True
            elif tail.mean > max(FLOOR, self._drift * baseline):
                alarms.append(f"{term}: mean {tail.mean:.3g} against a baseline of {baseline:.3g}")
        if learned:
            write_whole(self._path, msgspec.json.format(msgspec.json.encode(self._kept), indent=2))
        return tuple(alarms)


def _read(path: Path, contract: str, learn: int) -> _Kept:
    fresh = _Kept(contract=contract, learn=learn)
    if not path.is_file():
        return fresh
    try:
        kept = msgspec.json.decode(path.read_bytes(), type=_Kept)
    except msgspec.MsgspecError as error:
        _LOG.warning("%s is learned anew: %s", path.name, error)
        return fresh
    return kept if (kept.contract, kept.learn) == (contract, learn) else fresh
