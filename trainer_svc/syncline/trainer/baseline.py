"""What a contract's same-version terms amount to when a job begins, and whether they have drifted since.

Learned from the first `learn` updates at which a term was measured, beginning with base version 0: the weights are
then near the first ones, and whatever a term shows is the contract's and the engines' own. Kept in the run folder, so
that a resumed trainer compares with the same figures; a record of another contract is not used.

An update's term is out of line in either of two ways:

- beyond the baseline: `drift` times what was learned, and more than the contract allows a trained policy. A policy
  that sharpens scales its logits and their errors with them; within the contract's own band that is no fault.
- beyond the recent: `drift` squared times the median of the newest updates. The mismatch of an unmatched contract can
  fall far below what the first, random weights showed (measured: to a tenth), and other weights must still be seen.

An alarm is raised when a term is out of line twice in succession. Where activations are codes, one in some hundreds of
trajectories has a sum that rounds a code apart, and that alone lifts the mean of the few tokens that an update probes
by orders of magnitude; weights that are not the version's do so every time, and a version that is bad once is stopped
by its canaries.

The staleness term has no baseline: it follows lag and step size, and growing with them is what it is for.
"""

from __future__ import annotations

import logging
import math
import statistics
from collections import deque
from collections.abc import Mapping
from pathlib import Path

import msgspec

from syncline.contract.diagnosis import Tail
from syncline.contract.precision import PrecisionContract
from syncline.runtime.durable import write_whole

_LOG = logging.getLogger(__name__)
WATCHED = ("mismatch", "kv_cache", "noise_staleness", "noise_decode")
_OF_THE_CONTRACT = ("mismatch", "kv_cache")  # what its `expected` band speaks of
FLOOR, FLOOR_CODES = 1e-4, 1e-3
"""Nats. A mean below it is rounding, whatever its baseline: of wide activations, and of those that become codes."""


def allowances(contract: PrecisionContract) -> dict[str, float]:
    """Watched term -> the mean |difference| up to which nothing is out of line."""
    codes = contract.rollout.kv_cache != "wide" or any(f.activation is not None for f in contract.families)
    rounding = FLOOR_CODES if codes else FLOOR
    band = contract.expected.high
    return dict.fromkeys(WATCHED, rounding) | dict.fromkeys(
        _OF_THE_CONTRACT, rounding if band is None else band
    )


class _Kept(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """`baseline.json`. `means`: term -> update (as text) -> mean |difference|."""

    contract: str
    learn: int
    means: dict[str, dict[str, float]] = {}


class Baselines:
    """The baselines of one job. `path`: where they are kept; `drift`: how many times its baseline is out of line."""

    def __init__(self, path: Path, contract: PrecisionContract, learn: int, drift: float) -> None:
        self._path, self._drift = path, drift
        self._allowed = allowances(contract)
        self._rounding = self._allowed["noise_decode"]
        self._kept = _read(path, contract.digest(), learn)
        self._recent = {term: deque[float](maxlen=2 * learn) for term in WATCHED}
        self._out: set[str] = set()  # terms that the last update which measured them found out of line
        self._last = 0

    def of(self, term: str) -> float | None:
        """The term's mean |difference| as learned; None: not learned yet, or not watched."""
        means = self._kept.means.get(term, {})
        return math.fsum(means.values()) / len(means) if len(means) >= self._kept.learn else None

    def note(self, update: int, terms: Mapping[str, Tail]) -> tuple[str, ...]:
        """Take notice of an update's terms; returns, in words, those that are out of line as they were before.

        An update that is noted twice counts once.
        """
        if update == self._last:
            return ()
        self._last = update
        alarms, learned = [], False
        for term in WATCHED:
            tail = terms.get(term)
            if tail is None or tail.count == 0:
                continue
            learning = self.of(term) is None
            if learning:
                self._kept.means.setdefault(term, {})[str(update)] = tail.mean
                learned = True
            if out := "" if learning else self._out_of_line(term, tail.mean):
                if term in self._out:
                    alarms.append(f"{term}: mean {tail.mean:.3g} against {out}")
                self._out.add(term)
            else:
                self._out.discard(term)
                self._recent[term].append(tail.mean)
        if learned:
            write_whole(self._path, msgspec.json.format(msgspec.json.encode(self._kept), indent=2))
        return tuple(alarms)

    def _out_of_line(self, term: str, mean: float) -> str:
        """What `mean` is out of line with, in words; "" if with nothing."""
        baseline, allowed = self.of(term) or 0.0, self._allowed[term]
        if mean > max(allowed, self._drift * baseline):
            return f"a baseline of {baseline:.3g}"
        recent = self._recent[term]
        level = statistics.median(recent) if len(recent) >= self._kept.learn else math.inf
        if mean > max(self._rounding, self._drift**2 * level):
            return f"{level:.3g} in recent updates"
        return ""


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
