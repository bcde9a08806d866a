"""From the ledger of an evaluation to its result: which samples count, and what they come to.

A sample counts if it has a record, every span of it names the pinned version by number and digest, its contract is the
manifest's, and its scorer could tell. All others are counted apart, each under its own name; none counts as wrong.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from statistics import fmean

import msgspec

from syncline.contract.evaluation import Evaluation
from syncline.contract.job import JobSpec
from syncline.contract.streams import REWARDS, TRAJECTORIES
from syncline.contract.token_path import BadTrajectory, Reward, Trajectory
from syncline.contract.trajectory_wire import decode
from syncline.contract.version_path import VersionManifest
from syncline.runtime.bus import Bus, unpack
from syncline.runtime.ledger import LedgerEntry
from syncline.scheduler.pass_at import estimate, mean_interval

COUNTED = "evaluated"
"""Why a trajectory that counts is filtered: it was sampled to be counted, and never to be trained on."""


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    """One sample as it ended. `why`: `COUNTED`, or why it does not count."""

    group: int
    record: Trajectory | None
    reward: Reward | None
    why: str

    @property
    def value(self) -> float | None:
        """Its reward, if it counts."""
        return self.reward.value if self.why == COUNTED and self.reward is not None else None


def sample_of(bus: Bus, job: str, group: int, entry: LedgerEntry, manifest: VersionManifest) -> Sample:
    """What became of the trajectory of `entry`. `manifest`: of the pinned version, its signature checked."""
    record = _record(bus, job, entry)
    if isinstance(record, str):
        return Sample(group=group, record=None, reward=None, why=f"lost: {record}")
    raw = bus.hget(REWARDS.at(job), entry.trajectory)
    reward = None if raw is None else unpack(raw, Reward)
    return Sample(group=group, record=record, reward=reward, why=_why(record, reward, manifest))


def _record(bus: Bus, job: str, entry: LedgerEntry) -> Trajectory | str:
    if entry.state != "buffered" or entry.stream_id is None:
        return f"{entry.state}: {entry.reason}" if entry.reason else entry.state
    found = bus.range(TRAJECTORIES.at(job), entry.stream_id, entry.stream_id)
    if not found:
        return f"its record {entry.stream_id} is gone"
    try:
        return decode(found[0].fields)
    except BadTrajectory as error:
        return str(error)


def _why(record: Trajectory, reward: Reward | None, manifest: VersionManifest) -> str:
    pinned = (manifest.version, manifest.digest())
    for span in record.spans:
        if (span.version, span.digest) != pinned:
            return f"foreign: tokens {span.start} to {span.end} are of version {span.version}"
    if record.contract != manifest.contract:
        return f"foreign: sampled under contract {record.contract}"
    if reward is None or reward.state != "scored" or reward.value is None:
        return "unscored" if reward is None or not reward.reason else f"unscored: {reward.reason}"
    return COUNTED


def evaluation(
    job: str,
    of: str,
    shared: bool,
    spec: JobSpec,
    manifest: VersionManifest,
    samples: Sequence[Sample],
) -> Evaluation:
    """What the samples come to. A prompt counts with those of its samples that count."""
    part = spec.evaluation
    assert part is not None  # job rules
    values: dict[int, list[float]] = {}
    for sample in samples:
        if sample.value is not None:
            values.setdefault(sample.group, []).append(sample.value)
    counts = [(len(found), sum(v >= part.correct for v in found)) for found in values.values()]
    means = [fmean(found) for found in values.values()]

    def other(kind: str) -> int:
        return sum(sample.why.startswith(kind) for sample in samples)

    return Evaluation(
        job=job,
        of=of,
        shared=shared,
        version=manifest.version.number,
        epoch=manifest.version.epoch,
        digest=manifest.digest(),
        contract=manifest.contract,
        model=spec.model.name,
        prompts=part.prompts,
        samples=part.samples,
        first=part.first,
        seed=spec.seeds.data,
        counted=sum(n for n, _ in counts),
        correct=sum(c for _, c in counts),
        threshold=part.correct,
        mean_reward=fmean(means) if means else None,
        reward_interval=mean_interval(means),
        pass_at={str(k): estimate(k, counts) for k in part.k},
        pass_prompts={str(k): sum(n >= k for n, _ in counts) for k in part.k},
        unscored=other("unscored"),
        lost=other("lost"),
        foreign=other("foreign"),
        sampling=spec.sampling.model_dump(mode="json"),
        when=time.time(),
    )
