"""Which samples of an evaluation count, from a real ledger: one left out is told by its own name and never wrong."""

from __future__ import annotations

from array import array
from pathlib import Path

import msgspec
import pytest

from syncline.contract.evaluation import FILE
from syncline.contract.evaluation_rules import of
from syncline.contract.evaluation_spec import EvaluationSpec
from syncline.contract.events import WorkItem
from syncline.contract.job import JobSpec
from syncline.contract.streams import GROUP_ROLLOUT, WORK
from syncline.contract.token_path import (
    Reward,
    SamplingConvention,
    Segment,
    Timing,
    Trajectory,
    VersionSpan,
    trajectory_id,
)
from syncline.contract.version_path import VersionId, VersionManifest
from syncline.runtime.bus import Bus, unpack
from syncline.runtime.evaluations import kept
from syncline.runtime.ledger import Ledger
from syncline.scheduler.counting import COUNTED, evaluation, sample_of

PINNED = VersionId(1, 3)
SPEC = of(
    JobSpec.model_validate({"name": "t", "model": {"name": "tiny-dense"}}),
    EvaluationSpec(job="j0123456789", version="1.3", prompts=3, samples=2, k=(1, 2)),
    {},
    None,
)
MANIFEST = VersionManifest(
    job="j0123456789",
    version=PINNED,
    parent=None,
    optimizer_step=3,
    contract=SPEC.contract_digest(),
    representation="bf16",
    model="",
    tensors=(),
)


def record(
    item: WorkItem, *spans: tuple[int, VersionId, str], contract: str = MANIFEST.contract
) -> Trajectory:
    edge, told = 0, []
    for tokens, version, digest in spans:
        told.append(VersionSpan(start=edge, end=edge + tokens, version=version, digest=digest, worker="w0"))
        edge += tokens
    return Trajectory(
        job=item.job,
        trajectory=item.trajectory,
        group=item.group,
        index=item.index,
        attempt=1,
        prompt=item.prompt,
        tokens=array("i", range(2 + edge)),
        segments=(Segment(kind="prompt", start=0, end=2), Segment(kind="sampled", start=2, end=2 + edge)),
        logprobs=array("f", [-0.5] * edge),
        loss_mask=b"\1" * edge,
        spans=tuple(told),
        convention=SamplingConvention(),
        finish="stop",
        contract=contract,
        text="",
        traceparent="",
        timing=Timing(started=0, queued=0, prefill=0, decode=0),
    )


def test_what_does_not_count_is_told_and_is_not_wrong(redis_url: str, job: str) -> None:
    bus, ours = Bus(redis_url), (2, PINNED, MANIFEST.digest())
    ledger = Ledger(bus, job, batch_groups=3, max_lag=1, policy="wait", max_attempts=5)
    bus.ensure_group(WORK.at(job), GROUP_ROLLOUT)
    for group in range(3):
        items = [
            WorkItem(
                job=job,
                trajectory=trajectory_id(job, group, i),
                group=group,
                index=i,
                prompt=group,
                traceparent="",
                submitted_at=0.0,
            )
            for i in range(2)
        ]
        assert ledger.submit(items, 2)
    stories = {
        (0, 0): ([ours], 1.0),
        (0, 1): ([ours], 0.0),
        (1, 0): ([ours, (1, VersionId(1, 4), "other")], 1.0),
        (1, 1): ([(2, PINNED, "another manifest")], 1.0),
        (2, 0): ([ours], None),
    }
    for entry in bus.group_read(WORK.at(job), GROUP_ROLLOUT, "w0", 10, None):
        item = unpack(entry, WorkItem)
        story = stories.get((item.group, item.index))
        if story is None:
            ledger.end(item.trajectory, "failed", "its attempts are used up")
            continue
        spans, value = story
        attempt = ledger.attempt(item.trajectory)
        assert ledger.begin(item.trajectory, attempt, "w0", PINNED) == "go"
        told = msgspec.structs.replace(record(item, *spans), attempt=attempt)
        assert ledger.publish(told, entry.id) == "published"
        reward = Reward(trajectory=item.trajectory, attempt=attempt, state="scored", value=value)
        if value is None:
            reward = msgspec.structs.replace(reward, state="unscored", reason="timeout")
        assert ledger.reward(reward)
    samples = [
        sample_of(bus, job, group, entry, MANIFEST)
        for group in range(3)
        for entry in ledger.members(group, 2)
    ]
    assert [sample.why for sample in samples] == [
        COUNTED,
        COUNTED,
        "foreign: tokens 2 to 3 are of version 1.4",
        "foreign: tokens 0 to 2 are of version 1.3",
        "unscored: timeout",
        "lost: failed: its attempts are used up",
    ]
    result = evaluation(job, "j0123456789", False, SPEC, MANIFEST, samples)
    assert (result.counted, result.correct, result.unscored, result.foreign, result.lost) == (2, 1, 1, 2, 1)
    assert result.mean_reward == 0.5
    assert result.pass_prompts == {"1": 1, "2": 1}
    one, two = result.pass_at["1"], result.pass_at["2"]
    assert one is not None
    assert two is not None
    assert (one[0], two[0]) == (0.5, 1.0)
    wrong = msgspec.structs.replace(samples[0], record=None)
    assert wrong.value == 1.0
    nothing = evaluation(job, "j0123456789", False, SPEC, MANIFEST, samples[2:])
    assert (nothing.mean_reward, nothing.pass_at) == (None, {"1": None, "2": None})
    other = msgspec.structs.replace(MANIFEST, contract="another contract")
    assert sample_of(bus, job, 0, ledger.members(0, 2)[0], other).why.startswith("foreign")
    bus.close()


@pytest.mark.parametrize("missing", ["record", "line"])
def test_a_file_of_evaluations_that_is_cut_names_its_line(missing: str, tmp_path: Path) -> None:
    assert kept(tmp_path) == []
    (tmp_path / FILE).write_bytes(b'{"job": "j0"\n' if missing == "record" else b"\n")
    with pytest.raises(ValueError, match="line 1"):
        kept(tmp_path)
