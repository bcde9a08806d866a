"""The trainer's parts for one job, put together from the spec. No decisions are made here."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import psutil

from syncline.contract.job import JobSpec
from syncline.runtime.lease import Devices
from syncline.runtime.ledger import Ledger
from syncline.runtime.service import ServiceContext
from syncline.trainer import canaries
from syncline.trainer.checkpoint import Checkpoints
from syncline.trainer.device import Device
from syncline.trainer.engine import TrainerEngine, build_engine
from syncline.trainer.intake import Intake
from syncline.trainer.minting import Mint
from syncline.trainer.phases import Phases
from syncline.trainer.probing import Probing
from syncline.trainer.resume import Resume
from syncline.trainer.updating import Updating


@dataclass(frozen=True)
class Parts:
    """Everything that the loop drives. `baseline`: resident bytes with the code loaded and no weights."""

    spec: JobSpec
    spec_hash: str
    folder: Path
    ledger: Ledger
    engine: TrainerEngine
    phases: Phases
    intake: Intake
    updating: Updating
    probing: Probing
    mint: Mint
    checkpoints: Checkpoints
    resume: Resume
    device: Device
    baseline: int


def resident() -> int:
    """Resident bytes of this process."""
    return int(psutil.Process().memory_info().rss)


def assemble(ctx: ServiceContext) -> Parts:
    """The parts of the job that `ctx` names. Raises `ValueError` naming the file or key that is wrong."""
    job = ctx.job
    folder = ctx.settings.job_dir(job)
    spec = JobSpec.model_validate_json((folder / "spec.json").read_bytes())
    spec_hash, contract = spec.hash(), spec.contract_digest()
    lease = ctx.lease_named("trainer")
    ledger = Ledger.under(ctx.bus, job, spec, lease=lease)
    prefixes = canaries.prefixes(spec, ctx.settings.models)
    engine = build_engine(spec, ctx.settings.models, folder / "trainer")
    intake = Intake(ctx.bus, ledger, spec, spec_hash)
    updating = Updating(ctx.bus, ledger, engine, intake, spec, folder / "segments", lease)
    checkpoints = Checkpoints(
        folder / "checkpoints", job, spec_hash, contract, spec.checkpoint.keep, lease.require
    )
    return Parts(
        spec=spec,
        spec_hash=spec_hash,
        folder=folder,
        ledger=ledger,
        engine=engine,
        phases=Phases(ctx.bus, job),
        intake=intake,
        updating=updating,
        probing=Probing(ctx.bus, engine, spec, job, folder, ctx.emit),
        mint=Mint(ctx.bus, lease, job, folder, contract, prefixes, spec.contract().adapter is not None),
        checkpoints=checkpoints,
        resume=Resume(ledger, engine, updating, checkpoints, folder),
        device=Device(Devices(ctx.bus, ctx.heartbeat_key, ctx.incarnation), spec, job, ctx.name),
        baseline=resident(),
    )
