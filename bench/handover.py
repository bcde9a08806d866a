"""A colocated cycle's hand-over: from the last token of one batch to the first token of the next, by what it is
spent on.

Each instant counts for one kind of work, the first of `_work` that goes on then. What is left is waiting, named
by what is waited for. Sleep is told without its beginning, so it counts from the order; all that a process does
before it obeys is in it (the trainer's checkpoint too).
"""

from __future__ import annotations

from itertools import pairwise

from record import Ordered, Record
from timeline import Interval, inside, split

from syncline.contract.token_path import PUBLISHED, REWARDED, SAMPLED, SCORED
from syncline.contract.version_path import ACTIVE, CONVERTED, MINTED, STAGED, VERIFIED
from syncline.contract.version_path import PUBLISHED as MANIFEST

TRAINER = "trainer"


def hand_overs(record: Record) -> list[dict[str, float]]:
    """Seconds by label for each hand-over but the first, whose caches are cold."""
    sampled = sorted(record.times(SAMPLED))
    work = _work(record)
    found = []
    for before, after in pairwise(record.ordered("sample")):
        window = _window(sampled, before, after)
        if window is not None:
            found.append({k: v for k, v in split(window, [*work, *_waits(record, window)]).items() if v > 0})
    return found[1:]


def _window(sampled: list[Interval], before: Ordered, after: Ordered) -> Interval | None:
    """From the last token before the phase `after` to the first one in it; None: a phase without tokens."""
    ends = [end for start, end in sampled if before.start <= start < after.start]
    starts = [start for start, _ in sampled if start >= after.start]
    return (max(ends), min(starts)) if ends and starts else None


def _work(record: Record) -> list[tuple[str, list[Interval]]]:
    """Labels in order of precedence, each with when it went on."""
    spans = (
        ("step", SCORED),
        ("export and canary scores", MINTED),
        ("convert", CONVERTED),
        ("convert", MANIFEST),
        ("stage", STAGED),
        ("verify", VERIFIED),
        ("commit", ACTIVE),
    )
    work = [(name, record.times(hop)) for name, hop in spans]
    work += [(f"{side} wakes", _wakes(record, side)) for side in (TRAINER, "rollout")]
    work += [(f"{side} sleeps", _sleeps(record, side)) for side in (TRAINER, "rollout")]
    work += [("publish", record.times(PUBLISHED)), ("reward", record.times(REWARDED))]
    return work


def _who(record: Record, side: str) -> tuple[str, ...]:
    return (TRAINER,) if side == TRAINER else record.workers


def _wakes(record: Record, side: str) -> list[Interval]:
    """An engine says how long it took to wake. One that was awake says so in no time."""
    return [
        (at - event["seconds"], at) for who in _who(record, side) for at, event in record.told("woke", who)
    ]


def _sleeps(record: Record, side: str) -> list[Interval]:
    """From each order that puts a side to sleep to its engines' answers."""
    found = []
    for before, phase in pairwise(record.phases):
        was, wanted = (p.trainer if side == TRAINER else p.rollout for p in (before, phase))
        if (was, wanted) == ("awake", "asleep"):
            for who in _who(record, side):
                answers = [at for at, event in record.told("slept", who) if event["seq"] >= phase.seq]
                found.append((phase.start, min(answers, default=phase.start)))
    return found


def _waits(record: Record, window: Interval) -> list[tuple[str, list[Interval]]]:
    """What is waited for while nobody works: it follows from the phase."""
    rewarded = max((end for _, end in inside(record.times(REWARDED), window)), default=window[0])
    named = [("waits: next reward begins", [(window[0], rewarded)])]
    for phase in record.phases:
        named += [(_wait(phase, window), [when]) for when in inside([phase.when], window)]
    return named


def _wait(phase: Ordered, window: Interval) -> str:
    match phase.name, phase.rollout, phase.trainer:
        case "sample", _, _:
            return "waits: batch is seen" if phase.start < window[0] else "waits: first token"
        case "drain", _, _:
            return "waits: drained is seen"
        case "train", _, "asleep":
            return "waits: answers of rollout"
        case "train", _, _:
            return "claim, segment, settle"
        case "sync", "asleep", _:
            return "waits: answer of the trainer"
        case "sync", _, _:
            return "waits: orders and acks of sync"
        case _:
            return f"waits: {phase.name}"
