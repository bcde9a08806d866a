"""The gap that a commit makes between two decode steps, next to steps of the same run that nothing disturbs.

One step is not as long as the next, commit or none: the longest of a few gaps says something only beside the longest of
as many undisturbed steps. Those are the steps before a staging begins and those from the second behind its commit on.
A gap lasts from the end of the decode step before the commit to the end of the one behind it, less the seconds in which
contexts are made anew. All are told against the median undisturbed step of their own swap. CPU seconds are those of the
thread that commits and decodes: what else runs on the machine makes a step late, and adds little to them.
"""

from __future__ import annotations

import resource
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from statistics import median

import msgspec
from rows import Say, note
from scaled import JOB

from syncline.contract.version_path import SignedManifest
from syncline.rollout.engine import CommitPolicy, Committed, Request, Sampling
from syncline.rollout.engines.reference import ReferenceEngine
from syncline.runtime.store import BlobStore

ROWS = 8  # requests that run
STEPS = 6  # undisturbed decode steps before each staging, and as many behind its commit
LATE = 0.010  # seconds beyond a step that a gap may take
POLICIES = {
    "continue_old": CommitPolicy(kind="continue_old"),
    "in_place, carried": CommitPolicy(kind="in_place", kv="carried", carried_age=1 << 20),
    "in_place, recomputed": CommitPolicy(kind="in_place"),
}


class Took(msgspec.Struct, frozen=True):
    """What some work took of this thread."""

    wall: float  # seconds on the clock
    cpu: float  # seconds of this thread
    faults: int  # page faults of this thread that needed no disk


class Swapped(msgspec.Struct, kw_only=True):
    """One commit under running requests."""

    steps: list[Took]  # undisturbed
    while_staging: float  # median step during staging, seconds; nan: none ended before it did
    stage: float
    copy: float  # right before the staging
    commit: Took
    behind: Took  # the step behind the commit
    committed: Committed

    @property
    def step(self) -> float:
        """Seconds of the median undisturbed step."""
        return median(step.wall for step in self.steps)

    @property
    def gap(self) -> float:
        """Seconds of the gap, contexts made anew left out."""
        return self.commit.wall + self.behind.wall - self.committed.refilled


def swap(
    engine: ReferenceEngine,
    policy: CommitPolicy,
    pool: ThreadPoolExecutor,
    fresh: Callable[[], SignedManifest],
    store: BlobStore,
    copied: Callable[[], float],
) -> Swapped:
    """Stage while requests run, commit under `policy`, decode on.

    fresh   makes a version that no buffer holds
    copied  seconds of a copy of as many bytes
    """
    submit(engine)
    engine.step()  # prefill
    steps = [took(engine.step) for _ in range(STEPS)]
    copy, signed = copied(), fresh()
    staging: Future[float] = pool.submit(lambda: took(lambda: engine.stage(signed, store)).wall)
    meanwhile = []
    while not staging.done():
        meanwhile.append(took(engine.step).wall)
    seen: list[Committed | None] = []
    commit = took(lambda: seen.append(engine.commit(policy)))
    behind = took(engine.step)
    committed = seen[0]
    if committed is None or committed.in_flight != ROWS:
        raise RuntimeError(f"the commit found other requests in flight than {ROWS}: {committed}")
    steps += [took(engine.step) for _ in range(STEPS)]
    for i in range(ROWS):
        engine.abort(trajectory(i))
    return Swapped(
        steps=steps,
        while_staging=median(meanwhile[:-1] or [float("nan")]),
        stage=staging.result(),
        copy=copy,
        commit=commit,
        behind=behind,
        committed=committed,
    )


def tell(say: Say, case: str, swaps: dict[str, list[Swapped]]) -> None:
    """The rows of one size, by policy."""
    every = [one for several in swaps.values() for one in several]
    slower = [s.while_staging / s.step for s in every if s.while_staging == s.while_staging]
    if slower:
        say.ratio(case, "decode step, while staging over without", slower, "the engine itself")
    for name, several in swaps.items():
        gaps = [s.gap / s.step for s in several]
        say.ratio(case, f"gap at commit over decode step, {name}", gaps, "the median undisturbed step")
        if not any(s.committed.recomputed for s in several):
            cpu = [(s.commit.cpu + s.behind.cpu) / median(step.cpu for step in s.steps) for s in several]
            say.ratio(
                case, f"CPU, gap at commit over decode step, {name}", cpu, "the median undisturbed step"
            )
    late(say, case, every)
    for name, several in swaps.items():
        of_commit, of_step = (max(s.commit.faults for s in several), max(s.behind.faults for s in several))
        say.count(case, f"page faults of the commit, {name}", of_commit, "page faults")
        say.count(case, f"page faults of the step behind it, {name}", of_step, "page faults")
    say.time(case, "decode step", [1000 * step.wall for s in every for step in s.steps], "ms")
    for name, several in swaps.items():
        pauses = [1000 * (s.committed.pause - s.committed.refilled) for s in several]
        say.time(case, f"pause, {name}", pauses, "ms")
        beyond = ", ".join(f"{1000 * (s.gap - s.step):.1f}" for s in several)
        note(f"{case}: gap beyond the median step, {name}: {beyond} ms")
    refills = [1000 * s.committed.refilled for s in swaps["in_place, recomputed"]]
    say.time(case, "contexts made anew at commit, in_place, recomputed", refills, "ms")


def late(say: Say, case: str, every: Sequence[Swapped]) -> None:
    """How long the longest gap is, and how many are late, beside undisturbed steps."""
    longest = max(s.gap / s.step for s in every)
    # one of each swap in turn: as many as there are gaps, spread over the run as they are
    as_many = [max(s.steps[i].wall / s.step for s in every) for i in range(2 * STEPS)]
    figure, against = (
        "longest gap over longest of as many steps",
        f"{len(every)} undisturbed steps of the run",
    )
    say.ratio(case, figure, [longest / other for other in as_many], against)
    steps = [step.wall - s.step for s in every for step in s.steps]
    lates = f"more than {1000 * LATE:.0f} ms beyond the median step"
    say.share(case, f"gaps {lates}", share([s.gap - s.step for s in every]), f"{len(every)} gaps")
    say.share(case, f"steps {lates}", share(steps), f"{len(steps)} undisturbed steps")
    worst = ", ".join(f"{1000 * beyond:.1f}" for beyond in sorted(steps)[-len(every) :])
    note(
        f"{case}: undisturbed steps beyond their median, the longest {len(every)} of {len(steps)}: {worst} ms"
    )


# ---- parts -------------------------------------------------------------------------------------------------
def share(beyond: Sequence[float]) -> float:
    """Of these seconds, those that are late."""
    return sum(seconds > LATE for seconds in beyond) / len(beyond)


def trajectory(i: int) -> str:
    """Name of a request."""
    return f"{JOB}-{i}-0"


def submit(engine: ReferenceEngine) -> None:
    """Requests that run until they are aborted."""
    for i in range(ROWS):
        prompt = (1, *(4 + (7 * i + 3 * k) % 90 for k in range(15)))
        fixed = Sampling(max_tokens=900, min_tokens=900)
        engine.submit(Request(trajectory=trajectory(i), prompt=prompt, seed=(i,), sampling=fixed))


def took(run: Callable[[], object]) -> Took:
    """Run it, in this thread."""
    wall, cpu, before = time.perf_counter(), time.thread_time(), faults()
    run()
    return Took(time.perf_counter() - wall, time.thread_time() - cpu, faults() - before)


def faults() -> int:
    """Page faults of this thread that needed no disk."""
    return resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
