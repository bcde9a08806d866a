"""From claimed groups to a training batch: who trains, with which advantage and mask, and who does not
and why.

Pure. The rules:

* a record that cannot be trained (other contract, a convention that cannot be scored again, no token
left in the
  loss) leaves the batch, and so does a member that has no finite reward; each with its reason;
* a group with a missing member trains with the members that are left, at least two of them scored, or is
  dropped whole (`batch.incomplete`); its missing members are named in the reason;
* all scored members make the baseline, also one whose tokens are all too old to be in the loss;
* `mask_old_tokens` takes tokens out of the loss whose version is more than `max_lag` behind.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence

from syncline.contract.job import JobSpec
from syncline.contract.token_path import Reward, Trajectory
from syncline.reference.routes import RecordedRoutes
from syncline.runtime.ledger import Claim, ClaimedGroup
from syncline.runtime.segments import SegmentRow
from syncline.trainer.advantage import group_advantages
from syncline.trainer.engine import Sample


def decide(
    claim: Claim,
    records: Mapping[str, Trajectory],
    rewards: Mapping[str, Reward],
    spec: JobSpec,
    contract: str,
) -> tuple[SegmentRow, ...]:
    """One row per claimed trajectory that has a record, in the claim's order.

    records    by trajectory; a claimed one that is absent counts as a missing member of its group
    rewards    by trajectory; an absent one counts as unscored
    contract   digest of the job's precision contract
    """
    rows: list[SegmentRow] = []
    for group in claim.groups:
        rows += _group(group, records, rewards, claim.version, spec, contract)
    return tuple(rows)


def samples_of(rows: Sequence[SegmentRow]) -> list[Sample]:
    """What the engine trains on, in order."""
    return [sample_of(row.trajectory, row.used_mask, row.advantage) for row in rows]


def sample_of(t: Trajectory, loss_mask: bytes, advantage: float) -> Sample:
    """A record as the engine sees it."""
    return Sample(
        trajectory=t.trajectory,
        tokens=t.tokens,
        positions=_positions(t),
        behaviour=t.logprobs,
        loss_mask=loss_mask,
        advantage=advantage,
        temperature=t.convention.temperature,
        routes=_routes(t),
        mask=t.mask,
    )


def _routes(t: Trajectory) -> RecordedRoutes | None:
    if t.expert_ids is None or t.expert_shape is None or t.expert_dtype is None:
        return None
    return RecordedRoutes(t.expert_ids, t.expert_shape, t.expert_dtype)


def _positions(t: Trajectory) -> array[int]:
    """Where in the record's tokens the sampled ones lie, array('i') [S]."""
    out: array[int] = array("i")
    for segment in t.segments:
        if segment.kind == "sampled":
            out.extend(range(segment.start, segment.end))
    return out


def used_mask(t: Trajectory, version: int, spec: JobSpec) -> bytes:
    """The record's loss mask after the lag policy, bytes [S]."""
    if spec.schedule.lag_policy != "mask_old_tokens":
        return t.loss_mask
    mask = bytearray(t.loss_mask)
    for span in t.spans:
        if span.version.number < version - spec.schedule.max_lag:
            mask[span.start : span.end] = bytes(span.end - span.start)
    return bytes(mask)


def _group(
    group: ClaimedGroup,
    records: Mapping[str, Trajectory],
    rewards: Mapping[str, Reward],
    version: int,
    spec: JobSpec,
    contract: str,
) -> list[SegmentRow]:
    present = [records[id] for id in group.trajectories if id in records]
    missing = [*group.missing, *(id for id in group.trajectories if id not in records)]
    unfit = [_unfit(t, spec, contract) or _unscored(rewards.get(t.trajectory)) for t in present]
    values = [
        None if why or t.trajectory not in rewards else rewards[t.trajectory].value
        for t, why in zip(present, unfit, strict=True)
    ]
    left_out = [*missing, *(t.trajectory for t, why in zip(present, unfit, strict=True) if why)]
    dropped = ""
    advantages = group_advantages(values, spec.loss.advantage)
    if left_out and spec.batch.incomplete == "drop":
        dropped = f"group {group.group} is incomplete: without {', '.join(left_out)}"
    elif advantages is None:
        dropped = f"group {group.group} has fewer than two scored members: without {', '.join(left_out)}"
    rows = []
    for i, t in enumerate(present):
        mask = used_mask(t, version, spec)
        why = unfit[i] or dropped or _nothing_left(t, mask)
        advantage = None if advantages is None or why else advantages[i]
        rows.append(
            SegmentRow(
                trajectory=t,
                reward=rewards.get(t.trajectory),
                use="train" if advantage is not None else "filtered",
                why=why,
                lag=version - t.oldest.number,
                advantage=0.0 if advantage is None else advantage,
                used_mask=bytes(len(mask)) if why else mask,
            )
        )
    return rows


def _unfit(t: Trajectory, spec: JobSpec, contract: str) -> str:
    """Why the record cannot be trained on at all; "": it can."""
    if t.contract != contract:
        return f"sampled under precision contract {t.contract[:12]}, the job has {contract[:12]}"
    cut = t.convention.top_p < 1 or t.convention.top_k > 0
    if t.convention.logprob == "processed" and cut and t.mask is None:
        return "its log-probs are those of a cut distribution, and the cut is not recorded"
    if spec.trainer.router_replay and t.expert_ids is None:
        return "it has no expert ids, and trainer.router_replay replays every trajectory"
    return ""


def _unscored(reward: Reward | None) -> str:
    if reward is None:
        return "it has no reward"
    if reward.state != "scored" or reward.value is None:
        return f"reward {reward.state}: {reward.reason}" if reward.reason else f"reward {reward.state}"
    return ""


def _nothing_left(t: Trajectory, mask: bytes) -> str:
    if any(mask):
        return ""
    return "every token is over the lag bound" if any(t.loss_mask) else "no token of it is in the loss"
