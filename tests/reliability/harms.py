"""What is done to a running job, one row per kind of harm: messages, consumers, and the Redis under them.

Each row says what becomes of the trajectories it hits: nothing, the weights are those of a run without faults; or
`told`, the only reasons with which the ledger may end some of them.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from field import Field, record_of
from own_redis import OwnRedis

from syncline.contract.streams import GROUP_ROLLOUT, REWARDS, TRAJECTORIES, WORK
from syncline.runtime.ledger import LedgerEntry


@dataclass(frozen=True)
class Harm:
    """`do` returns whether it could be done now. `own`: it needs a server of its own, with this appendfsync.

    `told`: a pattern of "state: reason". `held`: the job waits for it with one group open; one that needs an update
    meanwhile cannot be waited for.
    """

    name: str
    do: Callable[[Field, OwnRedis | None], bool]
    told: str = ""
    own: str = ""
    held: bool = True


def of_state(job: Field, state: str) -> list[LedgerEntry]:
    return [entry for entry in job.ledger.open_lines() if entry.state == state]


# ---- messages ---------------------------------------------------------------------------------------------
def post_twice(job: Field, _: OwnRedis | None) -> bool:
    worker = job.workers[0]
    worker.posts = 2
    worker.intake.ask_now()  # else what it asked a moment ago keeps it from beginning in this turn
    before = job.ledger.counts()["buffered"] + job.ledger.counts()["trained"]
    worker.turn(job.versions()[-1])
    worker.posts = 1
    return job.ledger.counts()["buffered"] + job.ledger.counts()["trained"] > before


def post_again_late(job: Field, _: OwnRedis | None) -> bool:
    """A post that was trained long ago comes once more."""
    done = [e for e in job.ledger.entries(job.names()).values() if e.state == "trained" and e.version]
    if not done:
        return False
    entry = done[0]
    assert entry.version is not None
    record = record_of(job.item(entry.group, entry.index), entry.attempt, entry.version, job.contract, "w0")
    assert job.ledger.publish(record, "0-1") == "published"
    return True


def reward_twice(job: Field, _: OwnRedis | None) -> bool:
    """An errand that was redelivered after it was done."""
    done = [e for e in job.ledger.entries(job.names()).values() if e.reward is not None]
    if not done:
        return False
    assert not job.reward(done[0].trajectory, done[0].attempt, done[0].group, done[0].index)
    return True


def lose_errand(job: Field, _: OwnRedis | None) -> bool:
    job.drop_errands = True
    before = job.ledger.counts()["running"]
    for worker in job.workers:
        worker.turn(job.versions()[-1])
    job.drop_errands = False
    return job.ledger.counts()["running"] < before


def poison_work(job: Field, _: OwnRedis | None) -> bool:
    job.bus.call("XADD", WORK.at(job.job), "*", "m", b"\xc1 no message pack")
    job.bus.call("XADD", WORK.at(job.job), "*", "nothing", b"")
    return True


def poison_record(job: Field, _: OwnRedis | None) -> bool:
    """Entries that no worker wrote, in any position of the stream of records."""
    job.bus.call("XADD", TRAJECTORIES.at(job.job), "*", "h", b"\x00", "t", b"\x01")
    return True


def lose_record(job: Field, _: OwnRedis | None) -> bool:
    there = [entry.stream_id for entry in of_state(job, "buffered") if entry.stream_id]
    if not there:
        return False
    job.bus.call("XDEL", TRAJECTORIES.at(job.job), there[0])
    return True


def poison_reward(job: Field, _: OwnRedis | None) -> bool:
    there = [entry for entry in of_state(job, "buffered") if entry.reward]
    if not there:
        return False
    job.bus.hset(REWARDS.at(job.job), there[0].trajectory, b"\xc1")
    return True


def lose_work(job: Field, _: OwnRedis | None) -> bool:
    there = [entry for entry in of_state(job, "running") if entry.work_id]
    if not there:
        return False
    job.bus.call("XDEL", WORK.at(job.job), str(there[0].work_id))
    return True


def trim_work(job: Field, _: OwnRedis | None) -> bool:
    return bool(job.bus.call("XTRIM", WORK.at(job.job), "MAXLEN", 0))


def destroy_group(job: Field, _: OwnRedis | None) -> bool:
    return bool(job.bus.call("XGROUP", "DESTROY", WORK.at(job.job), GROUP_ROLLOUT))


def rewind_group(job: Field, _: OwnRedis | None) -> bool:
    job.bus.ensure_group(WORK.at(job.job), GROUP_ROLLOUT)
    job.bus.call("XGROUP", "SETID", WORK.at(job.job), GROUP_ROLLOUT, "0")
    return True


# ---- consumers --------------------------------------------------------------------------------------------
def worker_dies(job: Field, _: OwnRedis | None) -> bool:
    """With requests begun and not posted; it comes back under its name."""
    worker = job.workers[0]
    worker.intake.take(2)
    worker.intake.begin(job.versions()[-1], 2, lambda held: None)
    held = bool(worker.intake.held)
    worker.restart()
    return held


def slow_consumer(job: Field, _: OwnRedis | None) -> bool:
    """It is silent until another has taken over what it holds, and then posts it all the same."""
    slow = job.workers[0]
    slow.intake.take(2)
    slow.intake.begin(job.versions()[-1], 2, lambda held: None)
    holds = [held for held in slow.intake.held.values() if held.begun is not None]
    if not holds:
        return False
    slow.slow = True
    fenced = slow.fenced
    names = [held.item.trajectory for held in holds]
    job.until(
        lambda: all(
            entry.attempt > 1 or entry.state != "running" for entry in job.ledger.entries(names).values()
        ),
        20,
        "somebody takes over from the slow worker",
    )
    slow.slow = False
    slow.post(holds)
    assert slow.fenced == fenced + len(holds), "a post of a worker that was taken over from was accepted"
    return True


# ---- Redis ------------------------------------------------------------------------------------------------
def drop_connections(job: Field, _: OwnRedis | None) -> bool:
    return bool(job.bus.call("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes"))


def flush_scripts(job: Field, _: OwnRedis | None) -> bool:
    return bool(job.bus.call("SCRIPT", "FLUSH"))


def kill_redis(job: Field, server: OwnRedis | None) -> bool:
    assert server is not None
    server.kill()
    server.start()
    return True


def freeze_redis(job: Field, server: OwnRedis | None) -> bool:
    """Unreachable, and slower to come back than a lease lasts in the test (2 s)."""
    assert server is not None
    server.freeze()
    until = time.monotonic() + 3.0
    job.pause_until(until)
    server.thaw()
    return True


def fill_redis(job: Field, server: OwnRedis | None) -> bool:
    """Every write is refused for want of memory, and then no more."""
    assert server is not None
    job.bus.call("CONFIG", "SET", "maxmemory", 1)
    job.pause_until(time.monotonic() + 0.5)
    job.bus.call("CONFIG", "SET", "maxmemory", 0)
    return True


def roll_back_redis(job: Field, server: OwnRedis | None) -> bool:
    """It comes back as it was a version or more ago: what is lost with `appendfsync everysec`, and more."""
    assert server is not None
    newest = job.versions()[-1]
    if job.kept is None:
        job.kept = (server.keep(), newest)
        return False
    copy, seen = job.kept
    if newest <= seen:
        return False
    server.roll_back(copy)
    job.kept = None
    job.scheduler_restarts()
    return True


OTHERS = r"filtered: group \d+ has fewer than two scored members: without .*"
GONE = rf"failed: its record .* is gone from the stream|{OTHERS}"
UNSCORED = rf"filtered: it has no reward|{OTHERS}"
LATE = r"expired: at version \d+, no update within the lag bound of 2 is left for it, as when Redis comes back older"

HARMS: tuple[Harm, ...] = (
    Harm("a record is posted twice at once", post_twice),
    Harm("a record is posted again after it was trained", post_again_late),
    Harm("an errand is redelivered after it was done", reward_twice),
    Harm("an errand is lost", lose_errand),
    Harm("an unreadable work item", poison_work),
    Harm("an unreadable record", poison_record),
    Harm("a record is deleted", lose_record, GONE),
    Harm("a reward is unreadable", poison_reward, UNSCORED),
    Harm("a work item is deleted", lose_work),
    Harm("the work stream is trimmed", trim_work),
    Harm("the consumer group is destroyed", destroy_group),
    Harm("the consumer group is set back", rewind_group),
    Harm("a worker dies with requests begun", worker_dies),
    Harm("a slow worker posts what was taken over", slow_consumer),
    Harm("all connections are dropped", drop_connections, own="no"),
    Harm("the script cache is emptied", flush_scripts, own="no"),
    Harm("Redis is killed", kill_redis, own="no"),
    Harm("Redis is killed, appendfsync everysec", kill_redis, own="everysec"),
    Harm("Redis comes back a moment older", roll_back_redis, LATE, own="no", held=False),
    Harm("Redis is unreachable for longer than a lease", freeze_redis, own="no"),
    Harm("Redis is out of memory", fill_redis, own="no"),
)
