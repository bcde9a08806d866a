"""Does a trajectory cost more in a large job? `python bench/growth.py [--until 1000000] [--json PATH]`.

One job is led through the data plane (the stages of `stream_cost.py`) until it has had that many trajectories. At
1,000, 10,000 and so on the CPU of client and broker is measured over a thousand of them, and in turns over a thousand
of a job that has had one thousand, on a server of its own: what else the machine does falls on both. A ratio is of one
such pair. Records have 1 KB, so that the run is about counts and not about bytes. What the scheduler forgets in a real
job, how groups ended, is forgotten here too, and not charged.

A million takes some 8 minutes of CPU, 1 GB of memory and up to 2 GB of disk. With `--sown` the trajectories before a
mark are not led through but sown: all that a job keeps of one that was trained, its line and the sums, is written as it
is. That takes a minute.
"""

from __future__ import annotations

import argparse
import secrets
import time
from contextlib import ExitStack
from pathlib import Path

import msgspec
from rows import Row, Say, document, machine, note, table
from server import cpu_seconds, own_server
from stream_cost import WHOLE
from stream_stages import BATCH, GROUP, Part

from syncline.contract.streams import COUNTS, ENTRIES, GROUP_ROLLOUT, OUTCOMES, WORK
from syncline.runtime.bus import Bus
from syncline.runtime.ledger_shapes import Line

COMMAND = "python bench/growth.py"
SIZE = 1024
FIRST = 1000  # trajectories of the job that others are compared with
WINDOW = 16 * BATCH  # trajectories that one measurement covers, in flight at a time
PAIRS = 15
SOWN = 64 * BATCH  # trajectories that are sown at a time
TOLD = 100_000  # trajectories between two words of progress


class Job:
    """A job on a server, and how many trajectories it has had."""

    def __init__(self, url: str, bus: Bus) -> None:
        self.done, self._url, self._bus = 0, url, bus
        self._job = "j" + secrets.token_hex(5)
        bus.ensure_group(WORK.at(self._job), GROUP_ROLLOUT)

    def lead(self, count: int) -> float:
        """The next ones, from submission to oblivion. CPU seconds per trajectory, of client and broker."""
        used, end = 0.0, self.done + count
        while self.done < end:
            part = Part(self._url, self._job, min(WINDOW, end - self.done), self.done, SIZE)
            part.ledger.counts()  # it connects
            before, began = cpu_seconds(self._bus), time.process_time()
            for stage in WHOLE:
                part.stages[stage]()
            used += time.process_time() - began + cpu_seconds(self._bus) - before
            part.bus.close()
            self._bus.call("XTRIM", OUTCOMES.at(self._job), "MAXLEN", 0)
            if self.done // TOLD != (self.done + part.count) // TOLD:
                note(f"growth: {self.done + part.count:,} trajectories")
            self.done += part.count
        return used / max(1, count)

    def sow(self, count: int) -> None:
        """The next ones, as they are in the ledger once they were forgotten.

        Each is written and not read, as those that are led through: a table that has grown moves its entries step by
        step as it is used, and at a million it is still at that.
        """
        end = self.done + count
        while self.done < end:
            some = range(self.done, min(self.done + SOWN, end))
            flat: list[str | bytes] = []
            for i in some:
                group, index = divmod(i, GROUP)
                update = i // BATCH
                line = Line(
                    "trained", 1, "w0", update, 0, group, index, group, update + 1, "", "", "", "scored", "", 16
                )  # fmt: skip
                flat += [f"{self._job}-{group}-{index}", msgspec.msgpack.encode(line)]
            self._bus.call("HSET", ENTRIES.at(self._job), *flat)
            self._bus.many(
                [("HINCRBY", COUNTS.at(self._job), name, len(some)) for name in ("submitted", "trained")]
            )
            self.done += len(some)


def measure(until: int, pairs: int = PAIRS, sown: bool = False) -> list[Row]:
    """Rows of this part, for each power of ten from 1,000 to `until`."""
    say = Say("growth", f"{COMMAND} --sown" if sown else COMMAND)
    marks = [mark for exponent in range(3, 10) if (mark := 10**exponent) <= until]
    with ExitStack() as stack:
        urls = [stack.enter_context(own_server()) for _ in range(2)]
        ours, other = (Bus(url) for url in urls)
        stack.callback(ours.close)
        stack.callback(other.close)
        job = Job(urls[0], ours)
        Job(urls[0], ours).lead(BATCH)  # scripts are loaded, pools are warm
        Job(urls[1], other).lead(BATCH)
        for mark in marks:
            note(f"growth: to {mark:,}")
            before = job.sow if sown else job.lead
            before(max(0, _whole(mark) - job.done))
            costs = [_pair(job, urls[1], other) for _ in range(pairs)]
            case = f"{mark:,} trajectories in a job{', sown' if sown else ''}"
            ratios = [large / small for large, small in costs]
            say.ratio(case, "CPU per trajectory over that of a small job", ratios, f"itself at {FIRST:,}")
            say.time(case, "CPU per trajectory, whole way", [large * 1e6 for large, _ in costs], "us")
            say.time(case, f"CPU per trajectory at {FIRST:,}", [small * 1e6 for _, small in costs], "us")
            say.count(case, "memory of the broker", _said(ours, "memory", "used_memory") / 1e6, "MB")
        children = sum(_said(ours, "cpu", f"used_cpu_{kind}_children") for kind in ("user", "sys"))
        if children:  # a short log is not rewritten
            case = f"{marks[-1]:,} trajectories in a job"
            say.time(case, "CPU per trajectory, rewriting the log", [children / job.done * 1e6], "us")
    return say.rows


def _pair(job: Job, url: str, bus: Bus) -> tuple[float, float]:
    """CPU seconds per trajectory of the job, and of a new one that has had a thousand."""
    small = Job(url, bus)
    small.lead(_whole(FIRST))
    return job.lead(WINDOW), small.lead(WINDOW)


def _whole(mark: int) -> int:
    """In whole batches."""
    return mark // BATCH * BATCH


def _said(bus: Bus, section: str, name: str) -> float:
    """A number of the server's INFO."""
    return float(bus.call("INFO", section).split(f"{name}:".encode())[1].split()[0])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--until", type=int, default=100_000, help="trajectories in the end (default: 100,000)"
    )
    parser.add_argument("--sown", action="store_true", help="write what is before a mark into the ledger")
    parser.add_argument(
        "--pairs", type=int, default=PAIRS, help=f"of windows, at each mark (default: {PAIRS})"
    )
    parser.add_argument("--json", type=Path, help="write the rows and the machine's facts there")
    given = parser.parse_args()
    if given.until < 1000:
        parser.error(f"--until {given.until}: at least 1000")
    facts, started = machine(), time.monotonic()
    rows = measure(given.until, given.pairs, given.sown)
    print(table(rows))
    if given.json is not None:
        told = document(rows, facts, given.until < 1_000_000, time.monotonic() - started)
        given.json.write_bytes(msgspec.json.format(msgspec.json.encode(told), indent=1) + b"\n")
