"""The cases of a campaign below the whole stack: real trainer processes and a real Redis, the rest played."""

from __future__ import annotations

import random
import secrets
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from doomed import POINTS, RESUMING
from field import Field, spec_of
from harms import HARMS, Harm
from lives import Story, harmed, live
from own_redis import OwnRedis
from tally import Failure, Recorded

from syncline.runtime.bus import BusDown, CommandRefused
from syncline.runtime.ledger import LedgerBroken

TRAINER, MESSAGES = "trainer", "messages and Redis"


def cases(seed: int) -> Iterator[tuple[str, int]]:
    """Names of all cases in turn, with seeds that never repeat."""
    drawn = random.Random(seed)
    while True:
        for call in (1, 2, 3):
            for point in POINTS:
                yield f"point:{point}:{call}", drawn.randrange(1 << 30)
            for harm in HARMS:
                yield f"harm:{harm.name}", drawn.randrange(1 << 30)
            for _ in range(4):
                yield "many", drawn.randrange(1 << 30)


def warm_up(url: str) -> None:
    """One job without faults: the server of forks has imported everything before a deadline runs."""
    runs = Path(tempfile.mkdtemp(prefix="sl-"))
    job = Field(url, "j" + secrets.token_hex(5), runs, spec_of())
    try:
        live(job, seconds=600.0)
    finally:
        job.close()
        shutil.rmtree(runs, ignore_errors=True)


def run(case: str, seed: int, recorded: Recorded, url: str) -> None:
    """Carry out one case on the shared server at `url`, or on one of its own, and write down what came of it."""
    runs = Path(tempfile.mkdtemp(prefix="sl-"))
    kind, _, rest = case.partition(":")
    harm = next((harm for harm in HARMS if kind == "harm" and harm.name == rest), None)
    server = OwnRedis(harm.own) if harm is not None and harm.own else None
    job = Field(
        server.url if server else url, "j" + secrets.token_hex(5), runs, spec_of(schedule={"updates": 12})
    )
    try:
        story = _story(case, seed, job, harm, server)
        note(recorded, case, seed, story, MESSAGES if harm else TRAINER)
    except (AssertionError, CommandRefused, BusDown, LedgerBroken) as error:
        level = MESSAGES if harm else TRAINER
        row = recorded.row(
            level, rest.rpartition(":")[0] if kind == "point" else rest or "killed again and again"
        )
        row.injections += 1
        recorded.failures.append(Failure(case=case, seed=seed, story=str(error)[-300:]))
    finally:
        job.close()
        if server is not None:
            server.remove()
        shutil.rmtree(runs, ignore_errors=True)


def _story(case: str, seed: int, job: Field, harm: Harm | None, server: OwnRedis | None) -> Story:
    drawn = random.Random(seed)
    if harm is not None:
        return harmed(job, harm, server, times=4, seed=seed)
    if case == "many":
        points = [*POINTS, *RESUMING]
        return live(job, [(drawn.choice(points), drawn.randint(1, 2)) for _ in range(6)])
    _, point, call = case.split(":")
    return live(job, [(point, int(call))])


def note(recorded: Recorded, case: str, seed: int, story: Story, level: str) -> None:
    """Each injection under its own fault; what the run lost or repeated under the last one's."""
    verdict, recovered = story.verdict, iter(story.recovered)
    for struck in story.struck:
        row = recorded.row(level, fault_of(struck, level))
        row.injections += 1
        row.survived += verdict.clean
        row.recovery += [seconds for seconds in [next(recovered, None)] if seconds is not None]
    if story.struck:
        row.lost += len(verdict.lost)
        row.repeated += len(verdict.repeated)
        row.reported += len(verdict.reported)
    if not verdict.clean:
        recorded.failures.append(Failure(case=case, seed=seed, story=str(verdict)[:300]))


def fault_of(struck: str, level: str) -> str:
    """The name of a fault in the table."""
    if level == MESSAGES:
        return struck
    place = struck.rpartition(", call")[0]
    return f"killed {place}" if place in POINTS else f"killed in {place}"
