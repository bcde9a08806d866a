"""Does a trajectory cost more in a large job? `python bench/growth.py [--until 1000000]`.

One job is led through the data plane (the stages of `stream_cost.py`) until it has had that many trajectories. At
1,000, 10,000 and so on the CPU of client and broker is measured over some thousand of them, and compared with the first
measurement. Records have 1 KB, so that the run is about counts and not about bytes.
"""

from __future__ import annotations

import argparse
import secrets
import time

from rows import Row, Say, note, table
from server import cpu_seconds, own_server
from stream_cost import WHOLE
from stream_stages import BATCH, Part

from syncline.contract.streams import GROUP_ROLLOUT, WORK
from syncline.runtime.bus import Bus

COMMAND = "python bench/growth.py"
SIZE = 1024
WINDOW = 64 * BATCH  # trajectories that one measurement covers
CHUNK = 16 * BATCH  # trajectories in flight at a time


def measure(until: int) -> list[Row]:
    """Rows of this part, for each power of ten from 1,000 to `until`."""
    say = Say("growth", COMMAND)
    marks = [mark for exponent in range(3, 10) if (mark := 10**exponent) <= until]
    with own_server() as url:
        bus, job = Bus(url), "j" + secrets.token_hex(5)
        bus.ensure_group(WORK.at(job), GROUP_ROLLOUT)
        done, first = 0, 0.0
        _lead(bus, url, job, 0, BATCH)  # scripts are loaded, pools are warm
        done = BATCH
        for mark in marks:
            note(f"growth: to {mark:,}")
            begin = max(done, (mark - WINDOW) // BATCH * BATCH)
            _lead(bus, url, job, done, begin - done)
            cost = _lead(bus, url, job, begin, WINDOW)
            done = begin + WINDOW
            first = first or cost
            case = f"{mark:,} trajectories in a job"
            say.time(case, "CPU per trajectory, whole way", [cost * 1e6], "us")
            say.ratio(
                case,
                "CPU per trajectory over that at the first mark",
                [cost / first],
                f"itself at {marks[0]:,}",
            )
            say.count(
                case,
                "memory of the broker",
                int(bus.call("INFO", "memory").split(b"used_memory:")[1].split()[0]) / 1e6,
                "MB",
            )
        bus.close()
    return say.rows


def _lead(bus: Bus, url: str, job: str, first: int, count: int) -> float:
    """Lead trajectories [first, first + count) from submission to oblivion; CPU seconds per trajectory."""
    used = 0.0
    for at in range(first, first + count, CHUNK):
        part = Part(url, job, min(CHUNK, first + count - at), at, SIZE)
        part.stages["submit"]()  # it connects
        before, began = cpu_seconds(bus), time.process_time()
        for stage in WHOLE[1:]:
            part.stages[stage]()
        used += time.process_time() - began + cpu_seconds(bus) - before
        part.bus.close()
    return used / max(1, count)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--until", type=int, default=100_000, help="trajectories in the end (default: 100,000)"
    )
    given = parser.parse_args()
    if given.until < 1000:
        parser.error(f"--until {given.until}: at least 1000")
    print(table(measure(given.until)))
