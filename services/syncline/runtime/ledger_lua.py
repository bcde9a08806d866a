"""The ledger's transitions as Lua: each runs atomically on the server, and a second run changes nothing.

`ledger.py` holds the calling contract; nobody else loads these. The scripts are in `lua/`; each is put together
from `prelude`, what it needs of `outcome`, `groups` and `breach`, and its own file, whose first lines say what ARGV
holds and what comes back. All share KEYS, in the order of the prelude's first line. Stored shapes, msgpack arrays (a
number is -1 and a string empty where there is none):

  entry  state, attempt, worker, version number and epoch begun, group, index, prompt, update, work item id,
         record id, reason, reward state, token of the last retry
  group  size, members accounted (rewarded or ended), members ended, oldest version number begun by a living
         member, phase (open, ready, claimed), update it is claimed for, demand ('': any group may be claimed;
         'signal': one whose rewards all agree ends as filtered instead; 'whole': so does an incomplete one)
  claim  version, claimed version before, groups as (group, living trajectories, ended ones)

COUNTS also keeps `oldest:V`: how many unclaimed groups have V as their oldest version. The lag decisions need
those sums alone, so their cost does not grow with the number of groups.
"""

from __future__ import annotations

from importlib.resources import files

from syncline.contract.streams import (
    CLAIMS,
    COUNTS,
    DEAD,
    ENTRIES,
    GROUPS,
    HELD,
    OUTCOMES,
    READY,
    REWARDS,
    TRAJECTORIES,
    WORK,
)

KEYS = (HELD, ENTRIES, COUNTS, GROUPS, READY, REWARDS, CLAIMS, WORK, TRAJECTORIES, DEAD, OUTCOMES)
_FOLDER = files("syncline.runtime").joinpath("lua")


def _script(*parts: str) -> str:
    return "".join(
        _FOLDER.joinpath(f"{part}.lua").read_text(encoding="utf-8") for part in ("prelude", *parts)
    )


SUBMIT = _script("submit")
BEGIN = _script("outcome", "groups", "breach", "begin")
PUBLISH = _script("publish")
RETRY = _script("outcome", "groups", "retry")
RESUBMIT = _script("outcome", "groups", "resubmit")
REWARD = _script("outcome", "groups", "reward")
CLAIM = _script("outcome", "groups", "breach", "claim")
UNCLAIM = _script("outcome", "groups", "unclaim")
TRAINED = _script("outcome", "trained")
END = _script("outcome", "groups", "end")
FORGET = _script("forget")
RESTORE = _script("outcome", "groups", "restore")
