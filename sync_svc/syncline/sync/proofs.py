"""Versions that must pass level 6 of the validation ladder before they are active: what is asked of the validator.

Nothing is remembered that is not in the stream, so a sync that takes over asks for nothing twice and hears of all.
"""

from __future__ import annotations

from collections.abc import Sequence

from syncline.contract import events
from syncline.contract.job import JobSpec
from syncline.contract.streams import PROOFS
from syncline.contract.validation import Proof, Wanted
from syncline.contract.version_path import Minted, VersionId
from syncline.runtime.bus import Bus, unpack
from syncline.sync.state import Ended, Proved, State

CAP = 10_000  # entries kept of `proofs`


class Proofs:
    """The `proofs` stream of one job. `needed`: its spec demands level 6 of each version."""

    def __init__(self, bus: Bus, job: str, spec: JobSpec) -> None:
        self._bus, self._key = bus, PROOFS.at(job)
        self.needed = bool(spec.validation.before_active)
        self._max_lag = spec.schedule.max_lag
        self._cursor = "0"
        self._asked: set[tuple[VersionId, str]] = set()
        self._told: list[Proof] = []

    def want(self, minted: Minted, digest: str, tolerance: float, state: State) -> None:
        """Ask for a proof of a version that was just published, unless it was asked for before."""
        self._read()
        if (minted.version, digest) in self._asked:
            return
        wanted = Wanted(
            version=minted.version,
            digest=digest,
            before=_good(state, minted.version),
            canaries=minted.canaries,
            tolerance=tolerance,
            traceparent=minted.traceparent,
        )
        self._bus.append(self._key, wanted, cap=CAP)

    def next(self, state: State) -> tuple[VersionId, ...]:
        """Minted versions to publish now: none while one is proved, which the newer would take the place of.

        A fleet that is not brought to a version as soon as it holds has none to go on with if the next one is refused.
        """
        undecided = any(offer.proof == "wanted" and not offer.ended for offer in state.offers.values())
        return () if undecided else state.pending

    def told(self) -> list[Proved]:
        """What the validator has said since the last call."""
        if not self.needed:
            return []
        self._read()
        told, self._told = self._told, []
        return [Proved(version=p.version, digest=p.digest, holds=p.holds, reason=p.reason) for p in told]

    def event(self, ended: Ended, state: State) -> events.Event | None:
        """What the scheduler hears of a version's end; None: of one that a newer took the place of, nothing."""
        match ended.how:
            case "active":
                return events.Active(version=ended.version, workers=ended.workers)
            case "failed":
                return events.SyncFailed(version=ended.version, reason=ended.reason)
            case "refused":
                return self._refusal(ended.version, ended.reason, state)
            case "superseded":
                return None

    def _refusal(self, version: VersionId, reason: str, state: State) -> events.Event:
        """Whether the job can go on until the next version."""
        serving = active(state)
        if serving is None:
            return events.SyncFailed(version=version, reason=f"{reason}; no version is active to go on with")
        if version.number - serving.number > self._max_lag:
            lag = f"version {serving} is active, and schedule.max_lag is {self._max_lag}"
            return events.SyncFailed(version=version, reason=f"{reason}; nothing newer can be sampled: {lag}")
        return events.VersionRefused(version=version, active=serving, reason=reason)

    def _read(self) -> None:
        while True:
            entries = self._bus.read({self._key: self._cursor}, None).get(self._key, [])
            if not entries:
                return
            self._cursor = entries[-1].id
            self._take([unpack(entry, Wanted | Proof) for entry in entries])

    def _take(self, messages: Sequence[Wanted | Proof]) -> None:
        for message in messages:
            if isinstance(message, Proof):
                self._told.append(message)
            else:
                self._asked.add((message.version, message.digest))


def _good(state: State, below: VersionId) -> VersionId | None:
    """The newest version below this one that workers serve or are about to; None: there is none."""
    offers = [offer for version, offer in state.offers.items() if version < below]
    return max((o.version for o in offers if o.ended == "active" or o.proof == "holds"), default=None)


def active(state: State) -> VersionId | None:
    """The newest version whose scope was complete; None: none was."""
    return max((version for version, offer in state.offers.items() if offer.ended == "active"), default=None)
