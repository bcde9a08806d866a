"""A job enters: its spec is judged, its record and the request to the scheduler are written in one script."""

from __future__ import annotations

import hashlib
import re
import secrets
import time
from typing import Literal

import msgspec

from syncline.contract.events import TERMINAL_JOB_STATES, Mode, Request
from syncline.contract.job import JobSpec
from syncline.contract.spec_text import SpecError, parse_json, parse_toml
from syncline.contract.streams import IDEMPOTENCY, JOB, JOBS, OWNED, REQUESTS, UNENDED
from syncline.environments.environment import validate
from syncline.gateway import model_root, precision_plan, server_fit, trainer_fit
from syncline.gateway.access import Gateway
from syncline.gateway.errors import Refusal
from syncline.gateway.quota import RUNNING, STORED, exhausted
from syncline.gateway.tracking import missing_extras
from syncline.runtime.bus import Bus, pack
from syncline.runtime.settings import Settings
from syncline.runtime.tokens import Who

_KEY = re.compile(r"[\x21-\x7e]{1,255}")
_KEPT = 24 * 3600  # seconds for which an idempotency key is remembered

_SUBMIT = """
-- KEYS: job, jobs, requests, the idempotency key if there is one; the tenant's two.
-- ARGV: job id, spec hash, spec, name, created, request, seconds to remember the key, tenant, most jobs that are not
--       over ('' for any number), most jobs in history, the JOB key with %s for the job, the terminal states.
-- Returns "<job> <spec hash>" of the job that this key stands for: the new one, or an earlier one; or "quota running"
-- or "quota stored" when the tenant has no room.
local mine = ARGV[1] .. ' ' .. ARGV[2]
local owned, unended = KEYS[#KEYS - 1], KEYS[#KEYS]
if #KEYS == 6 then
  local earlier = redis.call('GET', KEYS[4])
  if earlier then return earlier end
end
if redis.call('EXISTS', KEYS[1]) == 1 then return mine end
if ARGV[9] ~= '' then
  for _, job in ipairs(redis.call('SMEMBERS', unended)) do
    local state = redis.call('HGET', string.format(ARGV[11], job), 'state')
    local over = not state
    for i = 12, #ARGV do over = over or state == ARGV[i] end
    if over then redis.call('SREM', unended, job) end
  end
  if redis.call('SCARD', unended) >= tonumber(ARGV[9]) then return 'quota running' end
  if redis.call('ZCARD', owned) >= tonumber(ARGV[10]) then return 'quota stored' end
  redis.call('SADD', unended, ARGV[1])
end
redis.call('ZADD', owned, ARGV[5], ARGV[1])
redis.call('HSET', KEYS[1], 'spec', ARGV[3], 'spec_hash', ARGV[2], 'name', ARGV[4], 'state', 'queued',
           'reason', '', 'waits', '[]', 'created', ARGV[5], 'tenant', ARGV[8])
redis.call('ZADD', KEYS[2], ARGV[5], ARGV[1])
redis.call('XADD', KEYS[3], '*', 'm', ARGV[6])
if #KEYS == 6 then redis.call('SET', KEYS[4], mine, 'EX', ARGV[7]) end
return mine
"""

_ASK = """
-- KEYS: job, requests. ARGV: request, the terminal states. Returns {asked, state}; state '' for no such job.
local state = redis.call('HGET', KEYS[1], 'state')
if not state then return {0, ''} end
for i = 2, #ARGV do
  if state == ARGV[i] then return {0, state} end
end
redis.call('XADD', KEYS[2], '*', 'm', ARGV[1])
return {1, state}
"""


class Submitted(msgspec.Struct, frozen=True):
    """The job that a submission stands for. `new`: it was made by this call."""

    job: str
    new: bool


def read_spec(body: bytes, content_type: str, settings: Settings) -> JobSpec:
    """The spec in a request's body, fully judged. Raises `SpecError`, or `Refusal` 415 for another type."""
    kind = content_type.partition(";")[0].strip().lower()
    if kind == "application/json":
        spec = parse_json(body)
    elif kind == "application/toml":
        spec = parse_toml(body)
    else:
        raise Refusal(
            415, "unsupported-media-type", "send a job spec as application/json or application/toml"
        )
    return judged(_with_defaults(spec, settings), settings)


def _with_defaults(spec: JobSpec, settings: Settings) -> JobSpec:
    """`spec` with what the installation says where the spec does not: a load takes as long as models are large."""
    if settings.worker_start is None or "worker_start" in spec.limits.model_fields_set:
        return spec
    limits = spec.limits.model_copy(update={"worker_start": settings.worker_start})
    return spec.model_copy(update={"limits": limits})


def judged(spec: JobSpec, settings: Settings) -> JobSpec:
    """`spec`, which agrees with itself, if this installation can run it. Raises `SpecError`."""
    found = [
        *validate(spec.task, spec.reward),
        *model_root.problems(settings.models, spec.model),
        *model_root.length_problems(settings.models, spec.model, spec.sampling),
        *precision_plan.problems(settings.models, spec),
        *precision_plan.machine_problems(settings.models, spec),
        *trainer_fit.problems(settings.models, spec),
        *server_fit.problems(settings.models, spec),
        *missing_extras(spec),
    ]
    if found:
        raise SpecError(found)
    return spec


def submit(here: Gateway, who: Who, spec: JobSpec, key: str | None) -> Submitted:
    """Make the job, or find the one that the tenant's idempotency key `key` stands for already.

    Raises `Refusal`: 400 for a key that is no header-safe text, 409 for one that stands for another spec, 429 for a
    tenant that has all the jobs it may have.
    """
    if key is not None and not _KEY.fullmatch(key):
        raise Refusal(
            400, "idempotency-key-refused", "Idempotency-Key must be 1 to 255 printable ASCII characters"
        )
    job, digest, now = f"j{secrets.token_hex(5)}", spec.hash(), time.time()
    keys = [JOB.at(job), JOBS.at(), REQUESTS.at()]
    if key is not None:  # a tenant's keys are its own
        keys.append(IDEMPOTENCY.at(hashlib.sha256(f"{who.tenant}\n{key}".encode()).hexdigest()))
    keys += [OWNED.at(who.tenant), UNENDED.at(who.tenant)]
    request = pack(Request(verb="submit", job=job, at=now))
    running, stored = ("", "") if who.limits is None else (who.limits.running, who.limits.stored)
    bounds = [who.tenant, running, stored, JOB.at("%s"), *sorted(TERMINAL_JOB_STATES)]
    values = [job, digest, spec.canonical(), spec.name, repr(now), request, _KEPT, *bounds]
    here.history.enter(job, who.tenant)
    made: str = here.bus.script(_SUBMIT)(keys, values).decode()
    if made == STORED and here.history.sweep(who.tenant):  # folders that the operator has removed make room
        made = here.bus.script(_SUBMIT)(keys, values).decode()
    owner, _, earlier = made.partition(" ")
    if owner != job:
        here.history.leave(job)
    if made in (RUNNING, STORED):
        raise exhausted(who, made)
    if earlier != digest:
        raise Refusal(
            409, "idempotency-key-taken", f"this Idempotency-Key stands for job {owner} with another spec"
        )
    return Submitted(owner, owner == job)


def ask(
    bus: Bus,
    job: str,
    verb: Literal["cancel", "pause", "resume", "switch", "scale"],
    mode: Mode | None = None,
    workers: int | None = None,
) -> str:
    """Hand a request to the scheduler; returns the job's state. Raises `Refusal` 409 for an ended job."""
    request = pack(Request(verb=verb, job=job, mode=mode, workers=workers, at=time.time()))
    asked, state = bus.script(_ASK)([JOB.at(job), REQUESTS.at()], [request, *sorted(TERMINAL_JOB_STATES)])
    if not asked:
        raise ended(state.decode() or "unrecorded")
    return str(state.decode())


def ended(state: str) -> Refusal:
    """409: nothing can be asked of a job in this state."""
    return Refusal(409, "job-ended", f"the job is {state}", state=state)
