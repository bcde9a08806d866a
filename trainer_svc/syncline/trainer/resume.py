"""Back to where a dead trainer was: the newest whole checkpoint, then every whole segment after it, again.

A segment is on disk before its step, so an update that may have reached anybody can be repeated: same
batch, same order, same weights. What was claimed and never became a segment is given back. See "The path
of a trajectory", 8.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from syncline.contract.events import Mode
from syncline.contract.version_path import VersionId
from syncline.runtime import segments
from syncline.runtime.ledger import Ledger
from syncline.runtime.segments import Segment
from syncline.trainer.checkpoint import Checkpoints, next_epoch
from syncline.trainer.engine import TrainerEngine
from syncline.trainer.restoring import forgotten
from syncline.trainer.updating import Update, Updating

_LOG = logging.getLogger(__name__)
REMEMBERED = 32  # updates in a row that a ledger must know to be taken to know all before them


class WrongSegment(ValueError):
    """A whole segment of another job, spec, contract or update. It is refused, never adapted."""


@dataclass(frozen=True)
class Resumed:
    """Where the trainer stands after a start.

    version     of the weights now held, under this start's own epoch; not minted yet
    parent      the version that these weights were minted as before, or grew from; None at the very
                first start
    checkpoint  updates that the newest checkpoint contains, 0 without one
    repeated    updates made again from their segments, oldest first
    owed        trajectories that are trained and in no checkpoint yet
    skipped     checkpoint folders that were passed over, and why
    """

    version: VersionId
    parent: VersionId | None
    checkpoint: int
    repeated: tuple[Update, ...]
    owed: tuple[str, ...]
    skipped: dict[str, str]


class Resume:
    """Brings an engine that is awake, with its initial weights, to the job's present state."""

    def __init__(
        self,
        ledger: Ledger,
        engine: TrainerEngine,
        updating: Updating,
        checkpoints: Checkpoints,
        folder: Path,
    ) -> None:
        self._ledger, self._engine, self._updating = ledger, engine, updating
        self._checkpoints, self._folder = checkpoints, folder

    def run(self, known: Sequence[VersionId], spec_hash: str, contract: str, mode: Mode) -> Resumed:
        """Load, repeat, give back. `known`: versions that Redis remembers, oldest first.

        Raises `WrongCheckpoint`, `WrongSegment`, or `segments.BadSegment`, naming the file.
        """
        found = self._checkpoints.newest()
        for name, why in found.skipped.items():
            _LOG.warning("checkpoint %s is passed over: %s", name, why)
        number = 0
        older = [v.epoch for v in known]
        if found.path is not None and found.manifest is not None:
            self._engine.load(found.path)
            number = found.manifest.version.number
            older.append(found.manifest.version.epoch)
            self._settle(found.manifest.since, number, spec_hash, contract)
        # the epoch is taken before anything can be minted under it
        epoch = next_epoch(self._checkpoints.folder, max(older, default=-1))
        repeated = self._repeat(number, epoch, spec_hash, contract, mode)
        owed = tuple(trajectory for update in repeated for trajectory in update.trajectories)
        last = number + len(repeated)
        for update in self._ledger.claims():
            if update > last:
                self._ledger.unclaim(update)
        version = VersionId(epoch, last)
        if found.manifest is not None:
            known = [*known, found.manifest.version]
        parents = [v for v in known if v.epoch < epoch and v.number <= last]
        parent = max(parents, key=lambda v: (v.number, v.epoch), default=None)
        return Resumed(version, parent, number, repeated, owed, found.skipped)

    def _repeat(
        self, number: int, epoch: int, spec_hash: str, contract: str, mode: Mode
    ) -> tuple[Update, ...]:
        """Make the updates after `number` again, as far as their segments reach without a gap."""
        there = set(segments.updates(self._folder / "segments"))
        claims = self._ledger.claims()
        told = self._updating.told()
        repeated: list[Update] = []
        while number + 1 in there:
            number += 1
            segment = self._read(number, spec_hash, contract)
            update = self._updating.make(segment, epoch)
            if number in claims:  # the dead trainer had not come to tell of it
                self._updating.tell_scored(update)
            if number not in told:
                self._updating.tell_metrics(update, mode, expired=0, waited=0.0)
            repeated.append(update)
        return tuple(repeated)

    def _settle(self, since: int, number: int, spec_hash: str, contract: str) -> None:
        """What the checkpoint contains is trained and needs no record any more, whatever was told of it."""
        there = set(segments.updates(self._folder / "segments"))
        for update in range(self._remembered(since, there) + 1, number + 1):
            if update not in there:
                raise WrongSegment(f"the segment of update {update} is gone, a checkpoint holds its effect")
            segment = self._read(update, spec_hash, contract)
            self._updating.settle(segment)
            self._ledger.forget([row.trajectory.trajectory for row in segment.rows])

    def _remembered(self, since: int, there: set[int]) -> int:
        """An update up to `since` before which the ledger has forgotten none; 0 for a server that came back empty.

        What came back older knows what is old; of later updates, what it was told again is any of them.
        """
        oldest = update = since
        while update in there and oldest - update < REMEMBERED:
            if forgotten(self._ledger, segments.segment_path(self._folder / "segments", update)):
                oldest = update - 1
            update -= 1
        return oldest

    def _read(self, update: int, spec_hash: str, contract: str) -> Segment:
        path = segments.segment_path(self._folder / "segments", update)
        segment = segments.read(path)
        said = (segment.job, segment.update, segment.spec_hash, segment.contract)
        ours = (self._ledger.job, update, spec_hash, contract)
        if said != ours:
            raise WrongSegment(f"{path.name}: it is of {said}, expected {ours}")
        return segment
