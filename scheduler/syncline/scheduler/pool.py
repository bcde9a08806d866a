"""The rollout workers of a job that come and leave while it runs: what is real about them, told to the machine.

A worker that leaves ends what it holds and says so; then its process is ended, and once that has gone nobody waits for
it. Whatever it held after all, since it was killed or did not come to an end, is its ledger's next attempt. A worker
that does not come within its time is given up, as long as the spec's least are left.
"""

from __future__ import annotations

from collections.abc import Iterable

from syncline.contract.events import Emptied, Event, Pool, ScaleTo, WorkerLeft
from syncline.contract.job import JobSpec
from syncline.runtime.ledger import Ledger
from syncline.scheduler.launch.launcher import Observed
from syncline.scheduler.saved import Size, Watch
from syncline.scheduler.stages import State, kept, leaving, number

SIZES = 64  # changes that are remembered


def left(job: str, state: State, observed: Observed) -> list[WorkerLeft]:
    """Workers that were to leave and are gone. `observed`: after the placement of `state` was applied."""
    ended = [name for name in leaving(state) if number(name) >= kept(state)]
    return [
        WorkerLeft(who=name, seq=state.seq) for name in ended if f"{job}/{name}" not in observed.processes
    ]


def give_on(ledger: Ledger, gone: Iterable[str]) -> None:
    """What workers that are gone had begun is begun anew by others: a gate that shuts must not wait for it."""
    names = frozenset(gone)
    if not names:
        return
    for entry in ledger.open_lines():
        if entry.state == "running" and entry.worker in names and entry.work_id is not None:
            ledger.retry(entry.trajectory, entry.work_id, f"{entry.worker} has left the pool")


def may_be_given_up(spec: JobSpec, state: State, name: str) -> bool:
    """Whether the job can go on without the worker `name`."""
    return name in leaving(state) or (state.mode == "disjoint" and number(name) >= spec.rollout.least)


def overdue(spec: JobSpec, state: State, watch: Watch, now: float) -> list[Event]:
    """Workers that have not come, or do not come to an end, within their time. `now`: wall-clock seconds."""
    patience = spec.limits.worker_start
    late = [name for name, since in watch.awaited.items() if now > since + patience]
    never = sorted(number(n) for n in late if n not in leaving(state) and may_be_given_up(spec, state, n))
    if never:
        return [ScaleTo(workers=never[0], why="late")]
    busy = [name for name in leaving(state) if name not in state.emptied]
    over = now > watch.resized + spec.limits.batch_wait
    return [Emptied(who=name, seq=state.seq) for name in busy if over or name in late]


def note(event: Event, state: State, watch: Watch, now: float) -> None:
    """Remember what follows from `event`, which led to `state`."""
    match event:
        case ScaleTo(workers=workers, why=why) if state.pool == workers:
            watch.resized, watch.resized_by = now, why
            made = 0 if state.minted is None else state.minted.number
            watch.sizes = [*watch.sizes, Size(update=made, workers=workers)][-SIZES:]
            for name in state.engines:
                if number(name) >= 0 and name not in watch.up:
                    watch.awaited.setdefault(name, now)
        case WorkerLeft(who=who) if who not in state.engines:
            watch.awaited.pop(who, None)
            watch.up.pop(who, None)


def told(spec: JobSpec, state: State, watch: Watch, fixed: str) -> Pool:
    """The pool as people see it. fixed: why the launcher cannot change it, "" if it can."""
    rollout, going = spec.rollout, leaving(state)
    if not fixed and state.mode != "disjoint" and rollout.scales:
        fixed = "the job is colocated: its workers share the trainer's devices"
    return Pool(
        workers=state.pool,
        least=rollout.least,
        most=rollout.most,
        coming=tuple(sorted((n for n in watch.awaited if number(n) >= 0 and n not in going), key=number)),
        leaving=going,
        why=watch.resized_by,
        fixed=fixed,
    )
