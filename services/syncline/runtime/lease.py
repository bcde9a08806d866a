"""Leases: the single writer of a job's service, and the memory of a device.

A process that was frozen and wakes must not act on what it knew. `Lease` makes it stop itself, and
`Lease.transact` writes only while the lease is held, checked by the server. `Devices` keeps the budget of a
device's memory.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Any

import msgspec

from syncline.contract.events import Heartbeat
from syncline.contract.streams import DEVICES, HEARTBEAT, LOCK
from syncline.runtime.bus import Bus, Value, unpack

SECONDS = 10.0  # a lease runs out this long after its last renewal
SILENCE = (
    5.0  # seconds without a heartbeat, as seen by one waiter, after which a device's holder counts as dead
)


class LeaseLost(Exception):
    """Another process holds the lease that this one lived by: this one must not write any more."""


class LeaseNotGiven(Exception):
    """The process was told to stop before the lease came free."""


class Lease:
    """The single-writer lease `name` (job/service): one holder, until `seconds` after its last renewal."""

    def __init__(self, bus: Bus, name: str, holder: str, seconds: float = SECONDS) -> None:
        self.name, self.holder, self.seconds = name, holder, seconds
        self.key = LOCK.at(name)
        self._bus = bus
        self._renew = bus.script(_RENEW)
        self._release = bus.script(_RELEASE)
        self._transact = bus.script(_TRANSACT)

    def try_acquire(self) -> bool:
        """Take the lease if it is free or ours already."""
        return bool(self._renew([self.key], [self.holder, int(self.seconds * 1000), "1"]))

    def acquire(self, stopping: threading.Event) -> None:
        """Wait until the lease is ours. Raises `LeaseNotGiven` if `stopping` is set first."""
        while not self.try_acquire():
            if stopping.wait(min(0.25, self.seconds / 10)):
                raise LeaseNotGiven(f"lease {self.name} was not free before the process was told to stop")

    def renew(self) -> None:
        """Extend. Raises `LeaseLost` if the lease ran out or someone else holds it."""
        if not self._renew([self.key], [self.holder, int(self.seconds * 1000), "0"]):
            raise self.lost()

    def transact(self, commands: Sequence[Sequence[Value]]) -> list[Any]:
        """Run raw commands atomically if the lease is ours. Raises `LeaseLost`, and nothing was done."""
        flat = [part for command in commands for part in (len(command), *command)]
        reply = self._transact([self.key], [self.holder, *flat])
        if reply is None:
            raise self.lost()
        return list(reply)

    def renew_until(self, ended: threading.Event) -> None:
        """Renew three times per lease until `ended`. Raises `LeaseLost`."""
        while not ended.wait(self.seconds / 3):
            self.renew()

    def lost(self) -> LeaseLost:
        """What to raise by a process that has found another one at its work."""
        other = self._bus.get(self.key)
        return LeaseLost(
            f"lease {self.name} of {self.holder} is held by {other.decode() if other else 'nobody'}: "
            "this process was silent for too long and must not write any more"
        )

    def held(self) -> bool:
        """Whether the lease is ours now."""
        return self._bus.get(self.key) == self.holder.encode()

    def require(self) -> None:
        """Raises `LeaseLost` unless the lease is ours now: asked before what a server cannot check, such as a file."""
        if not self.held():
            raise self.lost()

    def release(self) -> None:
        """Give it back, if it is still ours."""
        self._release([self.key], [self.holder])


class DeviceLease(msgspec.Struct, frozen=True, array_like=True):
    """One holder's memory on a device."""

    nbytes: int
    heartbeat: str  # heartbeat key of the holder's process; the lease ends when that incarnation is gone
    incarnation: str


class Devices:
    """Memory leases of shared devices: the sum of what holders have never exceeds the budget.

    heartbeat     key under which this process's heartbeat lies (`ServiceContext.heartbeat_key`)
    incarnation   this process's incarnation, as in its heartbeat
    """

    def __init__(self, bus: Bus, heartbeat: str, incarnation: str) -> None:
        if not heartbeat.startswith(HEARTBEAT.at("x").removesuffix("x")):
            raise ValueError(f"{heartbeat!r} is no heartbeat key: a waiter would take this holder for dead")
        self._bus = bus
        self._heartbeat, self._incarnation = heartbeat, incarnation
        self._acquire = bus.script(_ACQUIRE_DEVICE)
        self._drop = bus.script(_DROP_HOLDER)
        self._silent: dict[
            tuple[str, bytes], float
        ] = {}  # (device, lease) -> since when no heartbeat was seen

    def acquire(self, device: str, holder: str, nbytes: int, budget: int) -> bool:
        """Lease `nbytes` of `device` for `holder`, replacing what it had. False: others leave too little.

        Holders whose process was replaced or has gone are dropped first.
        Raises `ValueError` if `nbytes` alone is over the budget: waiting would never end.
        """
        if nbytes > budget:
            raise ValueError(f"device {device}: {holder} asks for {nbytes} bytes of a budget of {budget}")
        self._drop_dead(device)
        lease = msgspec.json.encode(DeviceLease(nbytes, self._heartbeat, self._incarnation))
        return bool(self._acquire([DEVICES.at(device)], [holder, nbytes, budget, lease]))

    def release(self, device: str, holder: str) -> bool:
        """Give the memory back. False: there was no such lease."""
        return bool(self._bus.hdel(DEVICES.at(device), holder))

    def holders(self, device: str) -> dict[str, DeviceLease]:
        """Leases now on the device, those of dead processes included until somebody acquires."""
        return {name.decode(): _lease(value) for name, value in self._fields(device).items()}

    def _fields(self, device: str) -> dict[bytes, bytes]:
        fields = self._bus.hgetall(DEVICES.at(device))
        fields.pop(b"budget", None)
        return fields

    def _drop_dead(self, device: str) -> None:
        """Drop leases whose process was replaced, or silent for `SILENCE` beyond its heartbeat's own life.

        One missing heartbeat proves nothing: a busy process beats late, and it does hold the memory.
        """
        for holder, raw in self._fields(device).items():
            beat = self._bus.get(_lease(raw).heartbeat)
            if beat is None:
                since = self._silent.setdefault((device, raw), time.monotonic())
                dead = time.monotonic() - since >= SILENCE
            else:
                self._silent.pop((device, raw), None)
                dead = unpack(beat, Heartbeat).incarnation != _lease(raw).incarnation
            if dead:
                self._drop([DEVICES.at(device)], [holder, raw])
                self._silent.pop((device, raw), None)


def _lease(raw: bytes) -> DeviceLease:
    return msgspec.json.decode(raw, type=DeviceLease)


_RENEW = """
-- KEYS: lock. ARGV: holder, milliseconds, '1' to take it if it is free. 1: ours now; 0: not.
local now = redis.call('GET', KEYS[1])
if now == ARGV[1] then
  redis.call('PEXPIRE', KEYS[1], ARGV[2])
  return 1
end
if now or ARGV[3] ~= '1' then return 0 end
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
return 1
"""

_RELEASE = """
-- KEYS: lock. ARGV: holder.
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return 0 end
return redis.call('DEL', KEYS[1])
"""

_TRANSACT = """
-- KEYS: lock. ARGV: holder, then each command as its length and its parts (the server's msgpack knows no bytes).
-- nil: the lease is not ours and nothing was done.
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return false end
local replies, at = {}, 2
while at <= #ARGV do
  local size = tonumber(ARGV[at])
  replies[#replies + 1] = redis.call(unpack(ARGV, at + 1, at + size))
  at = at + size + 1
end
return replies
"""

_ACQUIRE_DEVICE = """
-- KEYS: device. ARGV: holder, bytes, budget, lease as JSON. 1: given; 0: the others leave too little.
local used = 0
local fields = redis.call('HGETALL', KEYS[1])
for i = 1, #fields, 2 do
  if fields[i] ~= 'budget' and fields[i] ~= ARGV[1] then used = used + cjson.decode(fields[i + 1])[1] end
end
if used + tonumber(ARGV[2]) > tonumber(ARGV[3]) then return 0 end
redis.call('HSET', KEYS[1], 'budget', ARGV[3], ARGV[1], ARGV[4])
return 1
"""

_DROP_HOLDER = """
-- KEYS: device. ARGV: holder, its lease as it was read. Drops it unless it has changed since.
if redis.call('HGET', KEYS[1], ARGV[1]) ~= ARGV[2] then return 0 end
return redis.call('HDEL', KEYS[1], ARGV[1])
"""
