"""The machine's memory in Redis: state, cursor and orders, written together by the one that holds the lease.

A killed scheduler's successor loads what was saved and folds the events after the cursor; an order is in `phase`
and `phases` exactly if the state that gave it was saved.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from syncline.contract.events import Phase
from syncline.contract.streams import JOB, LOCK, MACHINE, PHASE, PHASES, RATES
from syncline.runtime.bus import Bus, Value, pack
from syncline.runtime.lease import LeaseLost
from syncline.scheduler.prompts import Drawn
from syncline.scheduler.stages import State, restored
from syncline.scheduler.stages import saved as packed

SERVICE = "scheduler"


class Size(msgspec.Struct, frozen=True, kw_only=True):
    """So many rollout workers were wanted from this update on."""

    update: int
    workers: int


class Watch(msgspec.Struct, kw_only=True):
    """What the scheduler remembers of a job beside the machine's state."""

    group: int = 0  # next group to submit
    prompts: Drawn | None = None  # None: nothing was drawn yet
    plan: int = 0  # switches of the spec's plan that were taken
    deaths: dict[str, int] = {}  # process -> ends of it that were told as WorkerLost
    awaited: dict[str, float] = {}  # engine that has not reported for duty -> since when, wall-clock seconds
    up: dict[str, float] = {}  # engine -> when it last reported for duty, seconds of Redis' wall clock
    resized: float = 0.0  # when the number of workers last changed, wall-clock seconds
    resized_by: str = ""  # why it did; "": it never did
    sizes: list[Size] = []  # its newest changes


class Saved(msgspec.Struct, kw_only=True):
    """One job's memory."""

    state: State
    cursor: str = "0"  # in `events`: everything up to it is in `state`
    watch: Watch
    turn: int = 0  # rises with each save, so that a repeated one is noticed


_SAVE = """
-- KEYS: lock, machine, phase, phases, job, rates. ARGV: holder, turn, state, cursor, watch, orders, rates, packed
-- orders, fields and values of the rates, then of the job hash. 1, or 0: the lease is another's.
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return 0 end
if redis.call('HGET', KEYS[2], 'turn') == ARGV[2] then return 1 end
redis.call('HSET', KEYS[2], 'turn', ARGV[2], 'state', ARGV[3], 'cursor', ARGV[4], 'watch', ARGV[5])
local rates = 8 + tonumber(ARGV[6])
local fields = rates + 2 * tonumber(ARGV[7])
for i = 8, rates - 1 do
  redis.call('XADD', KEYS[4], '*', 'm', ARGV[i])
  redis.call('SET', KEYS[3], ARGV[i])
end
for i = rates, fields - 1, 2 do redis.call('HSET', KEYS[6], ARGV[i], ARGV[i + 1]) end
if #ARGV >= fields then redis.call('HSET', KEYS[5], unpack(ARGV, fields)) end
return 1
"""


def load(bus: Bus, job: str) -> Saved | None:
    """What was saved of the job, or None. Raises `ValueError` naming the key for what cannot be read."""
    fields = bus.hgetall(MACHINE.at(job))
    if not fields:
        return None
    try:
        return Saved(
            state=restored(fields[b"state"]),
            cursor=fields[b"cursor"].decode(),
            watch=msgspec.json.decode(fields[b"watch"], type=Watch),
            turn=int(fields[b"turn"]),
        )
    except (KeyError, msgspec.MsgspecError) as error:
        raise ValueError(f"{MACHINE.at(job)} cannot be read: {error}") from None


def save(
    bus: Bus,
    holder: str,
    job: str,
    saved: Saved,
    orders: Sequence[Phase] = (),
    fields: Mapping[str, str] = {},
    rates: Mapping[str, bytes] = {},
) -> None:
    """Write memory, orders, measured rewards and fields of the job hash in one script. Raises `LeaseLost`."""
    saved.turn += 1
    keys = [LOCK.at(SERVICE), MACHINE.at(job), PHASE.at(job), PHASES.at(job), JOB.at(job), RATES.at(job)]
    memory: list[Value] = [packed(saved.state), saved.cursor, msgspec.json.encode(saved.watch)]
    told = [part for pair in fields.items() for part in pair]
    args: list[Value] = [holder, saved.turn, *memory, len(orders), len(rates)]
    args += [*map(pack, orders), *(part for pair in rates.items() for part in pair), *told]
    if not bus.script(_SAVE)(keys, args):
        raise LeaseLost(f"the scheduler's lease is not {holder}'s any more: {job} was not written")
