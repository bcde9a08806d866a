"""What a job waits for now, as a pure function: each wait with its name, its owner, and when it is too long.

"Slow" and "never" look different from outside because every wait that should end has a deadline; when it has
passed, the job fails with the wait's own words.
"""

from __future__ import annotations

from collections.abc import Mapping

from syncline.contract.events import Wait
from syncline.contract.job import JobSpec
from syncline.contract.judging import JudgeStatus
from syncline.scheduler.stages import TRAINER, Stage, State, asleep, heard

SLOW = 10.0  # seconds that a response may be with its judge before it is worth telling
SILENCE = 15.0  # seconds without a word from the process that asks the judge


def waits(spec: JobSpec, state: State, since: float, awaited: Mapping[str, float]) -> list[Wait]:
    """All present waits of a running job.

    since     wall-clock second at which the stage was entered
    awaited   engine that has not reported for duty -> since when
    """
    found = [
        Wait(
            name="worker",
            owner=name,
            since=at,
            deadline=at + spec.limits.worker_start,
            detail=f"{name} has not reported for duty",
        )
        for name, at in sorted(awaited.items())
    ]
    stage = _stage(spec, state, state.stage)
    if stage is not None:
        name, owner, patience, detail = stage
        found.append(Wait(name=name, owner=owner, since=since, deadline=since + patience, detail=detail))
    return found


def judge_waits(spec: JobSpec, status: JudgeStatus | None, now: float) -> list[Wait]:
    """What is to be said of the job's HTTP judge, if anything: at its deadline a response is unscored.

    status   None: the job has none, or nothing was asked of it yet
    now      wall-clock unix seconds
    """
    if status is None or not status.waiting + status.asked:
        return []
    deadline = status.at - status.oldest + spec.reward.within(spec.limits.batch_wait)
    count = f"{status.waiting + status.asked} responses wait"
    if now - status.at > SILENCE:
        since, detail = status.at, f"nobody has asked it for {now - status.at:.0f} s: {count}"
    elif status.state != "answers":
        silent = f"it has not answered for {now - status.since:.0f} s"
        since, detail = status.since, f"{silent} ({status.reason}): {count}"
    elif status.oldest > SLOW:
        since, detail = (
            status.at - status.oldest,
            f"{status.asked} responses are with it, {status.waiting} wait",
        )
    else:
        return []
    return [Wait(name="reward", owner="judge", since=since, deadline=deadline, detail=detail)]


def _stage(spec: JobSpec, state: State, stage: Stage) -> tuple[str, str, float, str] | None:
    """(name, owner, patience in seconds, detail) of what the stage waits for; None: for nobody, or the user."""
    limits = spec.limits
    version = "the first version" if state.minted is None else f"version {state.minted}"
    match stage:
        case "sample":
            return "batch", "rollout", limits.batch_wait, f"{spec.batch.groups} rewarded groups"
        case "drain" if not heard(state):
            deaf = sorted(n for n, it in state.engines.items() if max(it.slept, it.woke) < state.gate_since)
            owner = ", ".join(name for name in deaf if name != TRAINER)
            return "drain", owner, limits.batch_wait, "workers hear that the gate is shut"
        case "drain" if not state.drained:
            return "drain", "rollout", limits.batch_wait, "requests and rewards in flight"
        case "drain" | "yield":
            return "device", TRAINER, limits.batch_wait, "the trainer ends its update and sleeps"
        case "clear":
            late = sorted(name for name in state.engines if name != TRAINER and not asleep(state, name))
            return "device", ", ".join(late), limits.activation_wait, "workers fall asleep"
        case "train" if state.engines[TRAINER].woke < state.trainer_since:
            patience = limits.worker_start + limits.activation_wait
            return "device", TRAINER, patience, "the trainer loads its engine"
        case "sync" | "join":
            # twice the limit that sync itself keeps: this one is for a sync service that does nothing at all
            proof = "passes level 6 and " if spec.validation.before_active else ""
            owner = "sync, validator" if proof else "sync"
            return "activation", owner, 2 * limits.activation_wait, f"{version} {proof}becomes active"
    return None
