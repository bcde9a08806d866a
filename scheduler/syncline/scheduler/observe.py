"""What the ledger's state means to the machine, as pure decisions: events it calls for, how much to submit.

Level-triggered: the same view gives the same events until the machine has taken them, so an event that was
lost with a killed scheduler is simply seen again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec

from syncline.contract import events as e
from syncline.contract import lag
from syncline.runtime.ledger_shapes import LedgerEntry, OpenGroup
from syncline.scheduler.stages import TRAINER, State, heard


class Seen(msgspec.Struct, frozen=True, kw_only=True):
    """The ledger as the scheduler sees it at one moment. All counts are of groups but `in_flight`."""

    in_flight: int  # trajectories begun and not published, or published and not rewarded
    ready: int  # groups whose every member is rewarded or ended
    claimable: bool  # a batch of them may be claimed at the present version within the lag bound
    claimed: bool  # a claim is open
    open: int  # groups running, buffered, or claimed and not yet trained
    unclaimed: int  # the same without the claimed ones
    updates_claimed: int  # updates for which a batch was claimed, made or not


def ledger_events(state: State, view: Seen) -> list[e.Event]:
    """The events that `view` calls for and that `state` does not know of yet."""
    found: list[e.Event] = []
    if state.stage in ("sample", "drain") and view.claimable and not state.batch:
        found.append(e.BatchReady(groups=view.ready, seq=state.seq))
    if state.stage == "drain" and view.in_flight == 0 and heard(state) and not state.drained:
        found.append(e.Drained(seq=state.seq))
    more = state.minted is not None and state.minted.number < state.updates
    trains = state.stage == "train" and state.engines[TRAINER].woke >= state.trainer_since
    if trains and more and not view.claimed and not view.claimable:
        found.append(e.BatchShort(groups=view.ready, seq=state.seq))
    return found


def room(state: State, view: Seen, batch: int, max_lag: int, extra: int = 0, policy: str = "wait") -> int:
    """How many groups may be submitted now.

    In colocated mode nothing overlaps, so one batch, and the `extra` groups of `prompts.oversample`, is all that is of
    use at a time. Never more than what the updates without a batch can use; a group that ended before it was claimed
    is replaced.
    """
    more = extra if view.updates_claimed < state.updates else 0
    volume = lag.credits(max_lag if state.mode == "disjoint" else 0, batch, view.open - more)
    if policy == "wait":  # more could not begin within the bound
        volume = min(volume, lag.credits(max_lag, batch, view.open))
    useful = (state.updates - view.updates_claimed) * batch + more - view.unclaimed
    return max(0, min(volume, useful))


def seen(
    groups: Mapping[int, OpenGroup],
    members: Iterable[LedgerEntry],
    claimed_version: int,
    version: int,
    batch: int,
    max_lag: int,
    policy: str,
) -> Seen:
    """The ledger at one moment.

    groups            all open groups
    members           lines of their members; may be empty where `in_flight` is not asked for
    claimed_version   the version whose update was claimed last; -1: none
    version           the newest version's number; -1: none
    """
    free = {name: group for name, group in groups.items() if group.phase != "claimed"}
    begun = {name: group.oldest for name, group in free.items() if group.oldest >= 0}
    ready = [(name, group.oldest) for name, group in free.items() if group.phase == "ready"]
    return Seen(
        in_flight=sum(_in_flight(entry) for entry in members),
        ready=len(ready),
        claimable=version >= 0 and _claimable(ready, begun, version, batch, max_lag, policy),
        claimed=len(free) < len(groups),
        open=len(groups),
        unclaimed=len(free),
        updates_claimed=claimed_version + 1,
    )


def _in_flight(entry: LedgerEntry) -> bool:
    sampled = entry.state == "running" and entry.worker is not None
    return sampled or (entry.state == "buffered" and entry.reward is None)


def _claimable(
    ready: list[tuple[int, int]],
    begun: Mapping[int, int],
    version: int,
    batch: int,
    max_lag: int,
    policy: str,
) -> bool:
    if policy == "wait":
        return lag.claim(ready, begun, version, batch, max_lag) is not None
    oldest = version - max_lag if policy == "expire" else 0
    return sum(begun_under >= oldest for _, begun_under in ready) >= batch
