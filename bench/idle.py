"""Memory of the idle stack: `syncline up`, no job, nothing asked. Per process and together.

PSS (a shared page counts for each sharer by its share) adds up over processes; RSS counts shared pages once per
process. Both are read from /proc when `SETTLED` looks in a row differ by less than 1 %. Children count for the process
that has a name. Whether torch is among a process's loaded files is read from its map: a count of 0 is what should be.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import msgspec
import psutil
from rows import Row, Say, note, table
from stack import stack

COMMAND = "python bench/idle.py"
LIMIT = 700  # MB wanted of all together
SETTLED, EVERY, PATIENCE = 3, 1.0, 60.0  # looks; seconds between them, and in all
HEAVY = ("libtorch", "/torch/", "/transformers/", "/triton/")


class Memory(msgspec.Struct, frozen=True):
    """Of one process with what it started, in MB; `heavy`: loaded files of torch and the like."""

    pss: float
    rss: float
    processes: int
    heavy: int


def measure(settle: int = SETTLED) -> list[Row]:
    """The rows of this part."""
    say = Say("idle", COMMAND)
    note("idle: starting a stack")
    with stack() as running:
        found = steady(running.runs, settle)
    case = "idle stack"
    pss = sum(memory.pss for memory in found.values())
    rss = sum(memory.rss for memory in found.values())
    say.share(case, "PSS of all processes over what is wanted", pss / LIMIT, f"{LIMIT} MB")
    say.count(case, "files of torch loaded", sum(memory.heavy for memory in found.values()), "loaded files")
    say.count(case, "PSS, all processes", pss, "MB")
    say.count(case, "RSS, all processes", rss, "MB")
    for name, memory in sorted(found.items(), key=lambda item: -item[1].pss):
        say.count(case, f"PSS, {name}", memory.pss, "MB")
        say.count(case, f"RSS, {name}", memory.rss, "MB")
        say.count(case, f"processes, {name}", memory.processes, "processes")
    return say.rows


def steady(runs: Path, settle: int) -> dict[str, Memory]:
    """What the processes hold once that has stopped changing. Raises `RuntimeError` if it does not."""
    end, looks = time.monotonic() + PATIENCE, list[float]()
    while time.monotonic() < end:
        named = pids(runs)
        found = {name: memory_of(pid, set(named.values()) - {pid}) for name, pid in named.items()}
        looks = [*looks, sum(memory.pss for memory in found.values())][-settle:]
        if len(looks) == settle and max(looks) < 1.01 * min(looks):
            return found
        time.sleep(EVERY)
    raise RuntimeError(f"idle: memory still changes after {PATIENCE:g} s: {looks} MB")


def pids(runs: Path) -> dict[str, int]:
    """The stack's own processes by name, the supervisor among them."""
    up = json.loads((runs / "up.json").read_text())
    records = json.loads((runs / "launch" / "stack.json").read_text())["processes"]
    named = {full.rpartition("/")[2]: known["pid"] for full, known in records.items() if not known["dead"]}
    return {"supervisor": int(up["supervisor"]), **named}


def memory_of(pid: int, others: set[int]) -> Memory:
    """Of a process and its descendants that are not `others`."""
    own, left = list[psutil.Process](), [psutil.Process(pid)]
    while left:
        own.append(left.pop())
        left += [child for child in own[-1].children() if child.pid not in others]
    full = [each.memory_full_info() for each in own]
    heavy = sum(any(word in file.path for word in HEAVY) for each in own for file in each.memory_maps())
    return Memory(sum(m.pss for m in full) / 1e6, sum(m.rss for m in full) / 1e6, len(own), heavy)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="write all rows there")
    given = parser.parse_args()
    found = measure()
    print(table(found))
    if given.json is not None:
        given.json.write_bytes(msgspec.json.encode(found))
