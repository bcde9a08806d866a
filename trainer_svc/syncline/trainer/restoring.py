"""Giving back to Redis what it has forgotten and the disk knows: what each update decided."""

from __future__ import annotations

from pathlib import Path

from syncline.contract.token_path import parse_trajectory_id
from syncline.runtime import segments
from syncline.runtime.ledger import Decided, Ledger
from syncline.runtime.segments import Segment


def restore(ledger: Ledger, segment: Segment, group_size: int) -> int:
    """Write into the ledger what `segment` decided; how many of its lines that changed.

    Claims of this update and of later ones are undone first: a server that lost its memory may have given the same
    groups to other updates, none of which has a segment yet.
    """
    for update in ledger.claims():
        if update >= segment.update:
            ledger.unclaim(update)
    return sum(
        ledger.restore(segment.update, segment.base.number, group, group_size, members)
        for group, members in decided(segment).items()
    )


def forgotten(ledger: Ledger, path: Path) -> bool:
    """Whether the ledger does not say of every member of the segment at `path` what that decided. Reads no record."""
    wanted = {name: "trained" if use == "train" else "filtered" for name, use in segments.members(path)}
    found = ledger.entries(wanted)
    return any(name not in found or found[name].state != state for name, state in wanted.items())


def decided(segment: Segment) -> dict[int, list[Decided]]:
    """What the segment says of each member that it names, by group."""
    groups: dict[int, list[Decided]] = {}
    for row in segment.members:
        t = row.trajectory
        groups.setdefault(t.group, []).append(
            Decided(
                index=t.index,
                prompt=t.prompt,
                state="trained" if row.use == "train" else "filtered",
                reason="" if row.use == "train" else row.why,
                attempt=t.attempt,
                version=t.oldest,
                tokens=t.sampled,
            )
        )
    for trajectory, why in segment.lost.items():
        _, group, index = parse_trajectory_id(trajectory)
        known = groups.setdefault(group, [])
        prompt = known[0].prompt if known else -1
        known.append(
            Decided(
                index=index, prompt=prompt, state="failed", reason=why, attempt=1, version=None, tokens=-1
            )
        )
    return groups
