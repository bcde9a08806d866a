"""Whether an evaluation can be: its version is in the training job's store, its prompts are none of training's."""

from __future__ import annotations

from collections.abc import Iterator

from syncline.contract import evaluation_rules as rules
from syncline.contract.events import TERMINAL_JOB_STATES
from syncline.contract.job import JobSpec, Problem
from syncline.contract.spec_text import SpecError
from syncline.contract.streams import JOB, PINS
from syncline.contract.version_path import VersionId
from syncline.environments import environment, items
from syncline.gateway.access import Gateway, may_see
from syncline.gateway.errors import Fault, Refusal
from syncline.gateway.records import JobRecord, find
from syncline.runtime.bus import Bus
from syncline.runtime.store import BlobStore
from syncline.runtime.tokens import Who

LATEST = "latest"


def check(here: Gateway, who: Who, spec: JobSpec) -> None:
    """Judge the evaluation in a spec, beside its training job. Raises `SpecError`; `Refusal` without the version.

    Another tenant's training job is one that is not there.
    """
    part = spec.evaluation
    if part is None:
        return
    found: list[Problem] = []
    training = spec
    if spec.kind == "evaluate":
        seen = may_see(here, who, part.job or "")
        record = find(here.bus, here.settings, part.job or "") if seen else None
        if record is None:
            raise SpecError([Problem(path="evaluation.job", message=f"there is no job {part.job}")])
        version_of(record, part.version or "")
        training = record.spec
        found += rules.between(spec, training)
    found = found or [*_overlap(spec, training)]
    if found:
        raise SpecError(found)


def pin(bus: Bus, spec: JobSpec, job: str) -> None:
    """Have the version kept until the evaluation `job` has ended, while its training job goes on."""
    part = spec.evaluation
    if spec.kind != "evaluate" or part is None or part.job is None or part.version is None:
        return
    state = bus.hget(JOB.at(part.job), "state")
    if state is not None and state.decode() not in TERMINAL_JOB_STATES:
        bus.hset(PINS.at(part.job), job, part.version)


def version_of(record: JobRecord, wanted: str) -> VersionId:
    """The version that `wanted` names, in the job's store. Raises `Refusal` 409, listing those that are there."""
    folder = record.folder / "store"
    there = BlobStore(folder).manifests() if folder.is_dir() else []
    fits = [v for v in there if wanted in (LATEST, str(v), str(v.number))]
    if not fits:
        listed = ", ".join(str(v) for v in there) or "none"
        detail = f"version {wanted} of {record.id} is not in its store; can be evaluated: {listed}"
        hint = "raise retention.versions of the training job to keep more"
        message = f"{wanted} is not in the job's store; can be evaluated: {listed}"
        fault = Fault(path="version", message=message, hint=hint)
        raise Refusal(409, "version-gone", detail, errors=(fault,))
    return fits[-1]


def _overlap(spec: JobSpec, training: JobSpec) -> Iterator[Problem]:
    """Of a data set that can be counted: items that it does not have. Of files: a prompt that is in both.

    What is generated from another seed is not looked through.
    """
    part, task = spec.evaluation, spec.task
    assert part is not None
    end = part.first + part.prompts
    try:
        size = items.count(task.environment, task.options)
        if size is not None and end > size:
            message = f"asks items {part.first} to {end - 1}, and the data set has 0 to {size - 1}"
            yield Problem(path="evaluation.prompts", message=message, hint="each prompt is asked once")
        if task.environment != "jsonl" or task == training.task or (size is not None and end > size):
            return
        ours, theirs = (environment.load(one.task, one.seeds.data) for one in (spec, training))
    except ValueError as error:
        yield Problem(path="task.options", message=str(error))
        return
    known = {theirs.prompt(i).plain() for i in range(theirs.size or 0)}
    for i in range(part.first, end):
        if ours.prompt(i).plain() in known:
            message = f"prompt {i} is in the training job's data too"
            yield Problem(path="task.options", message=message, hint="take it out of the held-out data")
            return
