"""Stand-ins for the services of a job: real processes that speak the loop's protocol, without engines.

`python peers.py rollout|trainer|sync|scheduler`. Sampling takes a few milliseconds, a reward is given at once by the
rollout stand-in, a version is a number. `VERSIONS` holds what the stand-ins tell one another.
"""

from __future__ import annotations

import sys
from array import array
from functools import partial
from pathlib import Path

from syncline.contract import events as e
from syncline.contract.job import JobSpec
from syncline.contract.streams import GROUP_ROLLOUT, JOB, PHASE, PHASES, VERSIONS, WORK
from syncline.contract.token_path import (
    Reward,
    SamplingConvention,
    Segment,
    Timing,
    Trajectory,
    VersionSpan,
)
from syncline.contract.version_path import VersionId, parse_version
from syncline.runtime.bus import unpack
from syncline.runtime.ledger import Ledger
from syncline.runtime.service import ServiceContext, run
from syncline.scheduler import loop

COMMANDS = {
    name: (sys.executable, str(Path(__file__).resolve()), name) for name in ("rollout", "trainer", "sync")
} | {"validation": (sys.executable, str(Path(__file__).with_name("climber.py").resolve()))}


class Peer:
    """What every stand-in knows: its spec, the newest phase, the ledger."""

    def __init__(self, ctx: ServiceContext) -> None:
        self.ctx, self.bus, self.job = ctx, ctx.bus, ctx.job
        text = ctx.bus.hget(JOB.at(self.job), "spec")
        assert text is not None
        self.spec = JobSpec.model_validate_json(text)
        self.ledger = Ledger(
            ctx.bus,
            self.job,
            batch_groups=self.spec.batch.groups,
            max_lag=self.spec.schedule.max_lag,
            policy=self.spec.schedule.lag_policy,
            max_attempts=self.spec.limits.attempts,
        )
        self.acknowledged = 0
        self.phase: e.Phase | None = None
        self.cursor = ctx.bus.last_id(PHASES.at(self.job))

    def look(self, block: float | None) -> e.Phase | None:
        """The newest phase, after at most `block` seconds of waiting for a newer one."""
        for entries in self.bus.read({PHASES.at(self.job): self.cursor}, block).values():
            self.cursor = entries[-1].id
        raw = self.bus.get(PHASE.at(self.job))
        self.phase = None if raw is None else unpack(raw, e.Phase)
        return self.phase

    def acknowledge(self, phase: e.Phase, awake: bool, version: VersionId | None = None) -> None:
        if phase.seq <= self.acknowledged:
            return
        self.acknowledged = phase.seq
        if awake:
            self.ctx.emit(e.Woke(who=self.ctx.name, seq=phase.seq, version=version, resident=2, seconds=0.0))
        else:
            self.ctx.emit(e.Slept(who=self.ctx.name, seq=phase.seq, resident=1, baseline=1))

    def version(self, name: str) -> VersionId | None:
        raw = self.bus.hget(VERSIONS.at(self.job), name)
        return None if raw is None else parse_version(raw.decode())

    def up(self) -> None:
        self.ctx.emit(e.WorkerUp(who=self.ctx.name, incarnation=self.ctx.incarnation))
        self.ctx.ready(True)


def rollout(ctx: ServiceContext) -> None:
    """Takes work while the gate is open; each trajectory is published and rewarded at once. One that leaves ends it."""
    peer = Peer(ctx)
    key, name = WORK.at(peer.job), ctx.name
    held: dict[str, e.WorkItem] = {}
    said = 0  # the order under which it last said that it holds nothing
    peer.up()
    for entry in peer.bus.group_pending(key, GROUP_ROLLOUT, name):
        item = unpack(entry, e.WorkItem)
        if peer.ledger.retry(item.trajectory, entry.id, "its worker restarted") is not None:
            held[entry.id] = item
    while not ctx.stop_requested():
        phase = peer.look(block=None if held else 0.02)
        if phase is None:
            continue
        peer.acknowledge(phase, phase.rollout == "awake", peer.version("active"))
        version = peer.version("active")
        leaves = 0 < phase.workers <= int(name[1:])
        if leaves and not held and phase.seq > said:
            said = phase.seq
            ctx.emit(e.Emptied(who=name, seq=phase.seq))
        if phase.rollout == "asleep" or phase.gate == "shut" or version is None:
            ctx.stopping.wait(0.01)
            continue
        if len(held) < 8 and not leaves:
            for entry in peer.bus.group_read(key, GROUP_ROLLOUT, name, 4, 0.02):
                held[entry.id] = unpack(entry, e.WorkItem)
        for work_id, item in list(held.items()):
            if _sample(peer, work_id, item, version):
                del held[work_id]


def _sample(peer: Peer, work_id: str, item: e.WorkItem, version: VersionId) -> bool:
    if peer.spec.name == "barren":
        return peer.ledger.end(item.trajectory, "failed", "its prompt cannot be made")
    attempt = peer.ledger.attempt(item.trajectory)
    answer = peer.ledger.begin(item.trajectory, attempt, peer.ctx.name, version)
    if answer == "wait":
        return False
    if answer == "go":
        peer.ledger.publish(record(item, attempt, version, peer.ctx.name), work_id)
        dull = peer.spec.name == "dull" and item.prompt % 3 == 0
        value = 0.0 if dull else float(item.index % 2)
        peer.ledger.reward(Reward(trajectory=item.trajectory, attempt=attempt, state="scored", value=value))
    return True


def record(item: e.WorkItem, attempt: int, version: VersionId, worker: str) -> Trajectory:
    """A small whole record: two prompt tokens, two sampled ones."""
    return Trajectory(
        job=item.job,
        trajectory=item.trajectory,
        group=item.group,
        index=item.index,
        attempt=attempt,
        prompt=item.prompt,
        tokens=array("i", [1, 2, 3, 4]),
        segments=(Segment(kind="prompt", start=0, end=2), Segment(kind="sampled", start=2, end=4)),
        logprobs=array("f", [-1.0, -1.0]),
        loss_mask=b"\1\1",
        spans=(VersionSpan(start=0, end=2, version=version, digest="d", worker=worker),),
        convention=SamplingConvention(),
        finish="stop",
        contract="c",
        text="ab",
        traceparent=item.traceparent,
        timing=Timing(started=0.0, queued=0.0, prefill=0.0, decode=0.0),
    )


def trainer(ctx: ServiceContext) -> None:
    """Claims, counts as trained, mints. One update per `train` phase."""
    peer = Peer(ctx)
    made = peer.version("minted")
    epoch = 0 if made is None else made.epoch + 1
    peer.up()
    version: VersionId | None = None
    spent = False
    for update in peer.ledger.claims():
        peer.ledger.unclaim(update)
    while not ctx.stop_requested():
        phase = peer.look(block=0.02)
        if phase is None:
            continue
        if phase.trainer == "asleep":
            spent = False
            peer.acknowledge(phase, awake=False)
            continue
        peer.acknowledge(phase, awake=True, version=version)
        if version is None:
            version, spent = _mint(peer, VersionId(epoch, 0 if made is None else made.number)), True
            continue
        spent = spent and phase.phase == "train"
        if version.number >= peer.spec.schedule.updates or spent or phase.phase not in ("train", "flow"):
            continue
        claim = peer.ledger.claim(version.number + 1, version.number)
        if claim is not None:
            peer.ledger.trained(claim.update, claim.trajectories)
            version, spent = _mint(peer, VersionId(epoch, claim.update)), phase.phase == "train"


def _mint(peer: Peer, version: VersionId) -> VersionId:
    peer.bus.hset(VERSIONS.at(peer.job), "minted", str(version))
    peer.ctx.emit(e.Minted(version=version))
    if version.number >= peer.spec.schedule.updates:
        peer.ctx.emit(e.Finished(updates=version.number))
    return version


def sync(ctx: ServiceContext) -> None:
    """Makes the newest version active as soon as rollout is awake."""
    peer = Peer(ctx)
    ctx.ready(True)
    while not ctx.stop_requested():
        phase = peer.look(block=0.02)
        minted, active = peer.version("minted"), peer.version("active")
        if phase is None or minted is None or phase.rollout == "asleep" or minted == active:
            continue
        peer.bus.hset(VERSIONS.at(peer.job), "active", str(minted))
        ctx.emit(e.Active(version=minted, workers=tuple(f"w{i}" for i in range(peer.spec.rollout.workers))))


if __name__ == "__main__":
    services = {"rollout": rollout, "trainer": trainer, "sync": sync}
    which = sys.argv[1]
    run(which, partial(loop.main, commands=COMMANDS) if which == "scheduler" else services[which])
