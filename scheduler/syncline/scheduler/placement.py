"""Which processes a job needs, as a pure function of its spec and the machine's state."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from syncline.contract.job import JobSpec
from syncline.scheduler.launch.launcher import Placement, Process
from syncline.scheduler.stages import TRAINER, State, kept, worker

VALIDATOR = "validator"
Commands = Mapping[str, tuple[str, ...]]
COMMANDS: Commands = {
    service: (sys.executable, "-m", f"syncline.{module}")
    for service, module in (
        ("rollout", "rollout"),
        ("trainer", "trainer"),
        ("sync", "sync"),
        ("validation", "lab.validation"),
        ("validator", "lab.validator"),
    )
}
"""What to run for each service of a job."""
POD_COMMANDS: Commands = {service: ("python", *words[1:]) for service, words in COMMANDS.items()}
"""The same inside an image."""


def workers(spec: JobSpec) -> tuple[str, ...]:
    """Names of the rollout workers."""
    return tuple(worker(i) for i in range(spec.rollout.workers))


def proves(spec: JobSpec) -> bool:
    """Whether each version must pass level 6 of the validation ladder before it is active."""
    return bool(spec.validation.before_active)


def processes(spec: JobSpec) -> tuple[str, ...]:
    """Names of all processes that a job begins with: its engines, sync, and what proves versions."""
    return (*workers(spec), TRAINER, "sync", *((VALIDATOR,) if proves(spec) else ()))


def place(
    job: str, spec: JobSpec, state: State, settings: Mapping[str, str], folder: Path, commands: Commands
) -> Placement:
    """The job's processes, named `job/process`; none once it is done.

    settings   variables that make a process read the installation's settings
    folder     the job's folder; logs go to its `logs`
    Phases decide who is awake; processes stay, since a sleeping engine has given its memory back. A rollout worker that
    leaves stays until it, and all above it, hold nothing. Colocated engines
    name the devices that they share, which moves them where a launcher gives devices to pods.
    """
    if state.stage == "done":
        return Placement()
    common = {**settings, "SYNCLINE_JOB": job, "SYNCLINE_PORT": "0"}

    def process(name: str, service: str, **more: str) -> Process:
        return Process(
            name=f"{job}/{name}",
            argv=commands[service],
            env={**common, **more},
            log=folder / "logs" / f"{name}.log",
            role=service,
            devices="shared" if state.mode == "colocated" and service in ("rollout", "trainer") else "",
            start=spec.limits.worker_start,
        )

    names = [worker(i) for i in range(kept(state))]
    fleet: Sequence[Process] = [process(name, "rollout", SYNCLINE_WORKER=name) for name in names]
    trainers = [process(TRAINER, "trainer")] if TRAINER in state.engines else []
    validators = [process(VALIDATOR, VALIDATOR)] if proves(spec) else []
    return Placement(processes=(*fleet, *trainers, process("sync", "sync"), *validators))
