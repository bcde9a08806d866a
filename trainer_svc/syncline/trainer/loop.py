"""The trainer's loop.

consumes     phases; claims of rewarded groups (records and rewards of the ledger); `probed`
produces     segments, scores, checkpoints; versions into `minted`; `Woke`, `Slept`, `Minted`,
             `Finished`, `Alarm`; metrics; `probes` and `diagnostics`, for which nothing waits
waits for    "device" (memory of the shared device), "batch" (enough rewarded groups, within the lag bound)
unblocked by the scheduler's next phase, and the errand that rewards the last member of a group
"""

from __future__ import annotations

import time

from syncline.contract import events
from syncline.contract.events import Phase
from syncline.contract.version_path import VersionId
from syncline.runtime import segments
from syncline.runtime.ledger import Claim, LagBroken, LedgerBroken
from syncline.runtime.service import ServiceContext
from syncline.trainer.assembly import Parts, assemble, resident
from syncline.trainer.intake import ClaimForgotten
from syncline.trainer.restoring import forgotten
from syncline.trainer.resume import REMEMBERED
from syncline.trainer.scored import Scored
from syncline.trainer.updating import Update
from syncline.trainer.waiting import BatchOverdue, Waiting, what_is_missing

POLL = 0.05  # seconds between looks for a batch: the claim is one script
IDLE = 1.0  # seconds between looks at an unchanged phase, in case its announcement was lost


def main(ctx: ServiceContext) -> None:
    """The trainer of one job, until it is told to stop."""
    parts = assemble(ctx)  # before the lease: a dead trainer's runs out meanwhile
    ctx.lease("trainer")
    trainer = Trainer(ctx, parts)
    ctx.emit(events.WorkerUp(who=ctx.name, incarnation=ctx.incarnation))
    ctx.ready(True)
    run(trainer)


def run(trainer: Trainer) -> None:
    """Obey the newest phase; make an update when it is allowed and there is a batch; wait otherwise."""
    while not trainer.ctx.stop_requested():
        trainer.parts.probing.collect()
        if trainer.ctx.bus.replaced():
            trainer.remind()
        phase = trainer.parts.phases.newest()
        if phase is None or not trainer.obey(phase):
            trainer.parts.phases.wait(IDLE if phase is None or not trainer.wants_device else POLL)
        elif not trainer.may_update(phase):
            trainer.waiting.stop()
            trainer.parts.phases.wait(IDLE)
        elif (claim := trainer.claim()) is None:
            trainer.parts.phases.wait(POLL)
        else:
            trainer.update(claim, phase)
    trainer.parts.probing.settle()


class Trainer:
    """What the loop knows between its turns.

    version   of the weights held, minted; None before the first wake
    spent     a version was minted in the present `train` phase, which allows one
    owed      trajectories trained since the last checkpoint: their records stay in the stream until the next
    """

    def __init__(self, ctx: ServiceContext, parts: Parts) -> None:
        self.ctx, self.parts = ctx, parts
        self.version: VersionId | None = None
        self.waiting = Waiting()
        self.wants_device = False
        self._spent = False
        self._owed: list[str] = []
        self._saved = 0  # updates that the newest checkpoint contains
        self._expired = 0
        self._answered = 0  # newest Phase.seq that was answered
        self._scored = Scored(parts.spec.schedule.updates, 0)
        self._older = True  # Redis may have come back older; until a claim shows that the bound can be kept
        self._made: dict[str, int] = {}  # trajectory -> update, of the last `REMEMBERED` updates
        self._segments = parts.folder / "segments"

    # ---- phases -----------------------------------------------------------------------------------------
    def obey(self, phase: Phase) -> bool:
        """Sleep or wake as ordered, and answer each order once. True: awake, to do what the phase allows."""
        if phase.trainer == "asleep":
            self._spent = False
            self.wants_device = False
            self._sleep(phase)
            return False
        if phase.phase != "train":
            self._spent = False
        return self._wake(phase)

    def may_update(self, phase: Phase) -> bool:
        """Whether the phase allows an update: one per `train`, any number in `flow`, none after the last."""
        if self.version is None or self.version.number >= self.parts.spec.schedule.updates:
            return False
        return phase.phase == "flow" or (phase.phase == "train" and not self._spent)

    def _sleep(self, phase: Phase) -> None:
        engine = self.parts.engine
        self.waiting.stop()
        if engine.awake:
            engine.sleep()
        self.parts.device.release()
        if phase.seq > self._answered:
            self._answered = phase.seq
            now, baseline = resident(), self.parts.baseline
            self.ctx.emit(events.Slept(who=self.ctx.name, seq=phase.seq, resident=now, baseline=baseline))
        self.ctx.ready(True)

    def _wake(self, phase: Phase) -> bool:
        began = time.monotonic()
        first = self.version is None
        if not self.parts.engine.awake:
            why = self.parts.device.take(phase.mode, self.parts.engine.memory)
            self.wants_device = why != ""
            self.ctx.ready(why == "", why)
            if self.wants_device:
                return False
            self.parts.engine.wake()
            if first:
                self._start(phase)
        if phase.seq > self._answered:
            self._answered = phase.seq
            self.ctx.emit(
                events.Woke(
                    who=self.ctx.name,
                    seq=phase.seq,
                    version=self.version,
                    resident=resident(),
                    seconds=time.monotonic() - began,
                )
            )
        return True

    def _start(self, phase: Phase) -> None:
        """The first wake: where a dead trainer was, or the very beginning; then mint what is held."""
        parts = self.parts
        resumed = parts.resume.run(
            parts.mint.known(), parts.spec_hash, parts.spec.contract_digest(), phase.mode
        )
        parts.probing.recover()
        last = resumed.repeated[-1] if resumed.repeated else None
        self._owed, self._saved = list(resumed.owed), resumed.checkpoint
        for made in resumed.repeated:
            self._remember(made)
        trace = parts.mint.mint(
            parts.engine,
            resumed.version,
            resumed.parent,
            last.traces if last else (),
            len(last.trajectories) if last else 0,
        )
        if last is not None:
            parts.updating.tell_trained(last, resumed.version, trace)
        self.version, self._spent = resumed.version, True
        self._scored = Scored(parts.spec.schedule.updates, resumed.version.number)
        self.ctx.log.info(
            "holds version %s: checkpoint %d, %d repeated", self.version, self._saved, len(resumed.repeated)
        )
        self._save_if_due()

    # ---- updates ----------------------------------------------------------------------------------------
    def claim(self) -> Claim | None:
        """The next update's groups, or None. Raises `BatchOverdue` when there should long have been some."""
        assert self.version is not None
        number = self.version.number
        waited = self.waiting.go()
        self._expired += self.parts.intake.expire_overdue(number)
        try:
            claim = self.parts.ledger.claim(number + 1, number)
        except LagBroken:
            if self.ctx.bus.replaced():
                self.remind()  # an older Redis offers what was trained long ago
            elif not self._older:
                raise
            claim = None
        if claim is None and self._older:
            self._expired += self.parts.intake.expire_unusable(number)
        if claim is None and waited > self.parts.spec.limits.batch_wait:
            missing = what_is_missing(self.parts.ledger, number)
            raise BatchOverdue(f"no batch for update {number + 1} within {waited:.0f} s: {missing}")
        if claim is not None and (again := self._made_before(claim)):
            self.ctx.log.error("Redis forgot that updates %s were made; telling it again", again)
            self.parts.ledger.unclaim(claim.update)
            for update in again:
                self.parts.updating.settle(segments.read(segments.segment_path(self._segments, update)))
            return None
        self._older = self._older and claim is None
        return claim

    def remind(self) -> None:
        """Another Redis answers: tell it again what this trainer has made, as far as it has forgotten."""
        if self.version is None:
            return
        self._older = True
        first = max(1, self.version.number - REMEMBERED + 1)
        for update in range(first, self.version.number + 1):
            path = segments.segment_path(self._segments, update)
            if forgotten(self.parts.ledger, path):
                self.parts.updating.settle(segments.read(path))
        self.parts.mint.remind(self.version)
        if self.version.number == self.parts.spec.schedule.updates:
            self.ctx.emit(events.Finished(updates=self.version.number))

    def _forget(self) -> None:
        """Records and rewards whose effect a checkpoint holds are not needed any more."""
        try:
            self.parts.ledger.forget(self._owed)
        except LedgerBroken as error:  # it has lost what became of them, in the middle of this update
            self.ctx.log.warning("%s", error)
            self.remind()
            self.parts.ledger.forget(self._owed)
        self._owed = []

    def _made_before(self, claim: Claim) -> list[int]:
        """Updates that trained one of these trajectories already: a rolled-back ledger offers them once more."""
        return sorted({self._made[id] for id in claim.trajectories if id in self._made})

    def update(self, claim: Claim, phase: Phase) -> None:
        """From the claim to the minted version, and a checkpoint when one is due."""
        assert self.version is not None
        parts, waited = self.parts, self.waiting.stop()
        try:
            segment = parts.intake.segment(claim, self.version)
        except ClaimForgotten as error:  # the next turn tells the older Redis what it has forgotten
            self.ctx.log.error("%s", error)
            return
        parts.updating.keep(segment)
        parts.probing.ask(segment)
        made = parts.updating.make(segment, self.version.epoch)
        parts.probing.scored(made.result)
        parts.updating.tell_scored(made)
        minted = VersionId(self.version.epoch, claim.update)
        trace = parts.mint.mint(parts.engine, minted, self.version, made.traces, len(made.trajectories))
        parts.updating.tell_trained(made, minted, trace)
        parts.updating.tell_metrics(made, phase.mode, self._expired, waited)
        if made.result.non_finite:
            self.ctx.log.error("update %d skipped: %s", claim.update, ", ".join(made.result.non_finite))
        self.version, self._spent, self._expired = minted, phase.phase == "train", 0
        self._owed += made.trajectories
        self._remember(made)
        self._scored.note(segment)
        self._save_if_due()

    def _remember(self, made: Update) -> None:
        self._made |= dict.fromkeys(made.trajectories, made.segment.update)
        oldest = made.segment.update - REMEMBERED
        self._made = {id: update for id, update in self._made.items() if update > oldest}

    def _save_if_due(self) -> None:
        """A checkpoint every so many updates and after the last, which also ends the job's training."""
        assert self.version is not None
        parts, number = self.parts, self.version.number
        last = number == parts.spec.schedule.updates
        if number > self._saved and (last or number % parts.spec.checkpoint.every == 0):
            name = parts.engine.describe().name
            parts.checkpoints.save(parts.engine.save, self.version, name, self._saved, parts.intake.cursor)
            self._saved = number
            self._forget()
        if last:
            self.ctx.emit(events.Finished(updates=number))
