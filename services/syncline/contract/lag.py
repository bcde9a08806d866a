"""The lag bound, as pure decisions. `runtime/ledger.py` makes the same ones atomically, and a test holds it to these.

Lag is the version being updated minus the version of the trajectory's oldest sampled token. An update at version
v makes v + 1. A group whose oldest token is of version s is *due* by the update at version s + max_lag: trained
there, its lag is exactly max_lag; any later it would be over. Groups train whole, so all counts are of groups.

A claim of the `batch` groups with the earliest deadline at version v keeps the bound if afterwards, for every
j >= 0, at most j * batch of the remaining open groups are due by the update at version v + j (the j updates
v + 1 .. v + j can take no more). A group may start sampling under version s while the claim at version v is the
last one made if the same holds with it counted. Credits bound volume only: see `credits`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence


def due(oldest: int, max_lag: int) -> int:
    """The last version at which a group whose oldest token has version `oldest` may be claimed."""
    return oldest + max_lag


def first_breach(open_oldest: Iterable[int], claimed: int, batch: int, max_lag: int) -> int | None:
    """The first version by which more groups are due than updates can take, or None.

    open_oldest   oldest versions of the open groups that have started, without those claimed for `claimed`
    claimed       the version whose update was claimed last (updates `claimed + 1`, ... are still to come);
                  -1 before the first claim
    """
    dues = sorted(due(oldest, max_lag) for oldest in open_oldest)
    for count, version in enumerate(dues, start=1):
        if count > max(0, version - claimed) * batch:
            return version
    return None


def may_start(version: int, open_oldest: Iterable[int], claimed: int, batch: int, max_lag: int) -> bool:
    """Whether a new group may begin under `version`. A group that has begun under an older one always goes on."""
    return first_breach([*open_oldest, version], claimed, batch, max_lag) is None


def claim(
    ready: Sequence[tuple[int, int]], open_oldest: Mapping[int, int], version: int, batch: int, max_lag: int
) -> list[int] | None:
    """The groups to claim for the update at `version`, earliest deadline first, or None: wait.

    ready         (group, oldest version) of groups that can be claimed
    open_oldest   group -> oldest version of every open group that has started, the ready ones included
    """
    if len(ready) < batch:
        return None
    chosen = [group for group, _ in sorted(ready, key=lambda pair: (pair[1], pair[0]))[:batch]]
    rest = [oldest for group, oldest in open_oldest.items() if group not in set(chosen)]
    return chosen if first_breach(rest, version, batch, max_lag) is None else None


def overdue(open_oldest: Mapping[int, int], version: int, max_lag: int) -> list[int]:
    """Open groups that may no longer be trained at `version` (their lag would exceed `max_lag`)."""
    return sorted(group for group, oldest in open_oldest.items() if due(oldest, max_lag) < version)


def unusable(
    open_oldest: Mapping[int, int], ready: Collection[int], claimed: int, batch: int, max_lag: int
) -> list[int]:
    """The fewest groups without which the updates after `claimed` can take the others within the bound.

    None while every `may_start` and `claim` knew all that went before it; a Redis that came back older did not. Of
    groups that are due by the same version, those that are not `ready` are left out first.
    """
    kept, without = 0, list[int]()
    for group in sorted(open_oldest, key=lambda one: (due(open_oldest[one], max_lag), one not in ready, one)):
        if kept < max(0, due(open_oldest[group], max_lag) - claimed) * batch:
            kept += 1
        else:
            without.append(group)
    return sorted(without)


def credits(max_lag: int, batch: int, open_groups: int) -> int:
    """How many more groups may be submitted now.

    open_groups counts groups running, buffered, or claimed and not yet minted.
    """
    return max(0, (max_lag + 1) * batch - open_groups)
