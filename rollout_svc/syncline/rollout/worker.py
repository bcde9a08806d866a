"""The parts of a rollout worker, put together from the job's spec."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from syncline.contract.diagnosis import Probe
from syncline.contract.events import Phase
from syncline.contract.job import JobSpec
from syncline.contract.streams import JOB, PHASES, SYNC, WORK
from syncline.contract.token_path import Trajectory
from syncline.contract.version_path import SyncOrder, VersionId
from syncline.environments.environment import load, scores_many
from syncline.reference.model import TextCodec, model_folder
from syncline.rollout.engine import CommitPolicy, RolloutEngine
from syncline.rollout.engines.reference import ReferenceEngine
from syncline.rollout.engines.sglang.local import local_engine
from syncline.rollout.guests import Guests
from syncline.rollout.intake import Held, Intake
from syncline.rollout.orders import Orders
from syncline.rollout.probes import Probes
from syncline.rollout.prompts import Prompter, convention_of
from syncline.rollout.publishing import Gathering, Publisher
from syncline.rollout.residence import Residence
from syncline.rollout.sessions import Sessions
from syncline.rollout.status import Pace, Teller
from syncline.rollout.tools import Tools
from syncline.runtime.bus import Bus, unpack
from syncline.runtime.lease import Devices
from syncline.runtime.ledger import Ledger
from syncline.runtime.service import ServiceContext
from syncline.transport.kinds import pulling

_POLL = 0.02  # seconds between two looks at the streams while tokens are sampled
_SOON = 0.02  # seconds to block while a version is being staged
_LATER = 0.1  # seconds to block while items wait for the ledger
_IDLE = 0.25  # seconds to block with nothing to do


class Inbox:
    """Phases, sync orders and probes as they come; new work ends a wait and is left in its stream."""

    def __init__(self, bus: Bus, job: str, residence: Residence, orders: Orders, probes: Probes) -> None:
        self._bus, self._residence, self._orders, self._probes = bus, residence, orders, probes
        self._phases, self._sync, self._work = PHASES.at(job), SYNC.at(job), WORK.at(job)
        self._cursors = {key: bus.last_id(key) for key in (self._phases, self._sync, self._work)}
        self._cursors[probes.key] = probes.cursor
        self._read_at = float("-inf")
        residence.look()

    def read(self, block: float | None) -> None:
        """Take what came. `block`: seconds to wait for something; None: look, at most each `_POLL` seconds."""
        now = time.monotonic()
        if block is None and now < self._read_at + _POLL:
            return
        self._read_at = now
        for key, entries in self._bus.read(self._cursors, block).items():
            self._cursors[key] = entries[-1].id
            for entry in entries:
                if key == self._phases:
                    self._residence.want(unpack(entry, Phase))
                elif key == self._sync:
                    self._orders.take(unpack(entry, SyncOrder))
                elif key == self._probes.key:
                    self._probes.take(unpack(entry, Probe))


@dataclass(frozen=True)
class Worker:
    """All parts of one worker."""

    engine: RolloutEngine
    intake: Intake
    orders: Orders
    residence: Residence
    probes: Probes
    sessions: Sessions
    tools: Tools
    publisher: Publisher
    prompter: Prompter
    teller: Teller
    pace: Pace
    inbox: Inbox
    guests: Guests
    gathering: Gathering = field(default_factory=Gathering)

    @property
    def room(self) -> int:
        """Requests that may begin now, with a place left for each session between two turns."""
        return max(0, self.engine.room - self.sessions.between)

    def submit(self, held: Held) -> None:
        """Give an item to the engine. Raises `ValueError` if it cannot be sampled by any worker."""
        request = self.prompter.request(held.item, held.attempt)
        self.engine.submit(self.sessions.drawn(request))
        self.sessions.begin(request, held.item.prompt, held.why)

    def fail(self, trajectory: str, why: str) -> None:
        """End a trajectory that cannot go on, in the ledger that it is of."""
        visit = self.guests.of(trajectory)
        (self.intake if visit is None else visit.intake).fail(trajectory, why)

    def publish(self, last: bool = False) -> list[Trajectory]:
        """Publish what has ended, each into the streams that it is of; returns the job's own records.

        last   nothing will be sampled any more
        """
        if not self.gathering.over(self.sessions.ended, self.engine.running > 0 and not last):
            return []
        return self.publisher.publish(self.guests.publish(self.sessions.closed()))

    def idle_for(self) -> float | None:
        """How long the loop may wait for messages now; None: not at all."""
        if self.engine.running or self.probes.ready:
            return None
        if self.orders.busy or self.sessions.between:
            return _SOON
        later = self.intake.waiting or self.guests.waiting or self.residence.waits_for_device
        return _LATER if later else _IDLE


def assemble(context: ServiceContext) -> Worker:
    """Read the job's spec and build the worker. Raises `ValueError` naming what is missing or wrong."""
    bus, job, name = context.bus, context.job, context.name
    raw = bus.hget(JOB.at(job), "spec")
    if raw is None:
        raise ValueError(f"job {job} has no spec")
    spec = JobSpec.model_validate_json(raw)
    of = spec.versions_of(job)
    folder = context.settings.job_dir(of)
    key = (folder / "key").read_bytes()
    bytes_of = pulling(spec.transfer, folder / "store", context.settings.own_dir(job, name), of, name, key)
    model = model_folder(context.settings.models, spec.model.name)
    codec = TextCodec(model.path)
    engine = make_engine(spec, context, of, key)
    probes = Probes(bus, engine, spec, job, name)
    orders = Orders(
        bus, engine, bytes_of, job, name, context.incarnation, policy_of(spec), probes.before_commit
    )
    devices = Devices(bus, context.heartbeat_key, context.incarnation)
    residence = Residence(bus, engine, orders, bytes_of.store, devices, spec, job, name, context.emit)
    make = partial(parts_of, bus, spec, name, codec, orders.contexts)
    intake, publisher = make(job)
    environment = load(spec.task, spec.seeds.data)
    tools = Tools(spec, context.settings.secrets)
    sessions = sessions_of(spec, codec, tools, name, environment.multi_turn, model.config, engine)
    return Worker(
        engine=engine,
        intake=intake,
        orders=orders,
        residence=residence,
        probes=probes,
        sessions=sessions,
        tools=tools,
        publisher=publisher,
        prompter=Prompter(environment, codec, spec, engine.describe().experts is not None),
        teller=Teller(
            bus,
            engine,
            intake,
            orders,
            residence,
            job=job,
            name=name,
            incarnation=context.incarnation,
            max_lag=spec.schedule.max_lag,
        ),
        pace=Pace(pace_of(spec, name), context.stopping),
        inbox=Inbox(bus, job, residence, orders, probes),
        guests=Guests(bus, job, make),
    )


def parts_of(
    bus: Bus,
    spec: JobSpec,
    name: str,
    codec: TextCodec,
    contexts: Mapping[VersionId, str],
    job: str,
    groups: int | None = None,
) -> tuple[Intake, Publisher]:
    """What takes and publishes the work of `job`: this one, or an evaluation of so many `groups` that is its guest."""
    ledger = Ledger.under(bus, job, spec, groups)
    idle, alone = spec.limits.worker_idle, spec.rollout.most == 1
    intake = Intake(bus, ledger, job, name, idle, alone=alone, pinned=groups is not None)
    publisher = Publisher(
        ledger,
        intake,
        codec,
        contexts,
        job=job,
        name=name,
        convention=convention_of(spec),
        contract=spec.contract_digest(),
        quick=scores_many(spec.task, spec.reward),
    )
    return intake, publisher


def sessions_of(
    spec: JobSpec,
    codec: TextCodec,
    tools: Tools,
    name: str,
    multi_turn: bool,
    config: Any,
    engine: RolloutEngine,
) -> Sessions:
    """Sessions of the job's turns. config: the model's, which says how many tokens its positions reach."""
    return Sessions(
        spec.turns,
        codec,
        tools,
        name,
        multi_turn=multi_turn,
        tokens=spec.sampling.max_tokens,
        context=config.get_text_config(decoder=True).max_position_embeddings,
        stops=engine.describe().stop_ids,
    )


def policy_of(spec: JobSpec) -> CommitPolicy:
    """What a commit does to running requests, as the spec says."""
    schedule = spec.schedule
    return CommitPolicy(kind=schedule.in_flight, kv=schedule.kv, carried_age=schedule.carried_age)


def make_engine(spec: JobSpec, context: ServiceContext, job: str, key: bytes) -> RolloutEngine:
    """The engine that the spec names. job, key: whose versions it takes, and what they are signed with."""
    match spec.rollout.engine:
        case "reference":
            return ReferenceEngine(
                context.settings.models,
                spec.model,
                job,
                key,
                spec.rollout.max_running,
                contract=spec.contract(),
            )
        case "sglang":
            return local_engine(
                spec,
                context.settings.models,
                context.settings.sglang,
                context.settings.own_dir(context.job, context.name),
                job,
                key,
                policy_of(spec),
            )


def pace_of(spec: JobSpec, name: str) -> float:
    """The worker's share of full speed. Raises `ValueError` for a name that is not w0, w1, ..."""
    if not spec.rollout.pace:
        return 1.0
    if not name[1:].isdecimal() or name[0] != "w" or int(name[1:]) >= len(spec.rollout.pace):
        raise ValueError(f"worker {name!r} is none of w0 to w{len(spec.rollout.pace) - 1}")
    return spec.rollout.pace[int(name[1:])]
