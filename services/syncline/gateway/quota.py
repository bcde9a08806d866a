"""What a tenant may use: requests by a token bucket in Redis, jobs by counts taken where the job is made."""

from __future__ import annotations

import math

from syncline.contract.streams import RATE
from syncline.gateway.errors import Refusal
from syncline.runtime.bus import Bus
from syncline.runtime.tokens import Who

_TAKE = """
-- KEYS: bucket. ARGV: rate (per second), burst. Returns 0, or the milliseconds after which there is a token.
local clock = redis.call('TIME')
local now = clock[1] * 1000 + math.floor(clock[2] / 1000)
local rate, burst = tonumber(ARGV[1]), tonumber(ARGV[2])
local bucket = redis.call('HMGET', KEYS[1], 'left', 'at')
local left, at = tonumber(bucket[1] or burst), tonumber(bucket[2] or now)
left = math.min(burst, left + math.max(0, now - at) * rate / 1000)
local wait = 0
if left >= 1 then left = left - 1 else wait = math.ceil((1 - left) * 1000 / rate) end
redis.call('HSET', KEYS[1], 'left', tostring(left), 'at', now)
redis.call('PEXPIRE', KEYS[1], math.ceil(burst * 1000 / rate) + 1000)
return wait
"""

STORED, RUNNING = "quota stored", "quota running"
"""What the script that makes a job answers when the tenant has all it may have."""


def take(bus: Bus, who: Who) -> None:
    """Take one request from the tenant's bucket. Raises `Refusal` 429 when it is empty."""
    if who.limits is None:
        return
    limits = who.limits
    wait: int = bus.script(_TAKE)([RATE.at(who.tenant)], [repr(limits.rate), limits.burst])
    if wait:
        told = f"{limits.rate:g} requests per second, {limits.burst} at once: that is this tenant's limit"
        raise Refusal(429, "too-many-requests", told, headers={"Retry-After": str(math.ceil(wait / 1000))})


def exhausted(who: Who, what: str) -> Refusal:
    """429: the tenant has as many jobs as it may have."""
    assert who.limits is not None, "who has no limits cannot reach them"
    running, stored = who.limits.running, who.limits.stored
    if what == RUNNING:
        detail = f"{running} jobs of this tenant are not over, which is the most: wait for one, or cancel one"
        return Refusal(429, "quota-running", detail, headers={"Retry-After": "60"})
    detail = f"{stored} jobs of this tenant are in history, which is the most: the operator removes old ones"
    return Refusal(429, "quota-stored", detail, headers={"Retry-After": "3600"})
