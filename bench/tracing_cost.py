"""What tracing costs the loop: CPU seconds per update with it and without, and what the spans of an update cost alone.

"On" is how every job runs: each hop of each trajectory is a span, kept in the store of the run root. "Off" is the
same job with `OTEL_SDK_DISABLED=true`, OpenTelemetry's own switch: spans are not recorded, written or kept. Jobs of
both kinds take turns (off, on, on, off) and are charged for all processes of the installation, since seconds on the
clock say little on a busy machine. Lineage cannot be switched off: it is put together from the records that the loop
itself stands on.

Such a difference is small beside how much two equal jobs differ (`off over off` says by how much), so the cost is
measured directly too: as many spans of each hop go through `runtime.tracing` to a store in this process, and their
CPU, the background writer's included, is set against what an update takes.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

import cpu
import msgspec
from rows import Row, Say, note, table
from run_figures import PATIENCE, spec
from stack import stack

from syncline.contract.token_path import TOKEN_PATH
from syncline.contract.version_path import VERSION_PATH
from syncline.runtime import tracing

COMMAND = "python bench/tracing_cost.py"
OFF = {"OTEL_SDK_DISABLED": "true"}
CASE = ("tiny-moe", "colocated")
WANTED = 0.03  # of the loop's throughput
PATHS = {hop.name: hop for hop in (*TOKEN_PATH, *VERSION_PATH)}


class Ran(msgspec.Struct, frozen=True):
    """One job. `spent`: CPU seconds per update of all processes; `spans`: kept, per update, by hop."""

    spent: float
    spans: dict[str, float]


def measure(updates: int, repetitions: int) -> list[Row]:
    """The rows of this part. `repetitions`: of four jobs each."""
    say = Say("tracing", f"{COMMAND} --updates {updates} --repetitions {repetitions}")
    case = " ".join(CASE)
    ratios, apart, on, off = list[float](), list[float](), list[Ran](), list[Ran]()
    for n in range(repetitions):
        note(f"tracing: repetition {n + 1} of {repetitions}")
        four = [ran(updates, traced) for traced in (False, True, True, False)]
        off += [four[0], four[3]]
        on += [four[1], four[2]]
        ratios.append((four[1].spent + four[2].spent) / (four[0].spent + four[3].spent))
        apart.append(four[3].spent / four[0].spent)
    each = [direct(on[-1].spans) for _ in range(3)]
    spans = sum(on[-1].spans.values())
    shares = [spans * seconds / ran.spent for seconds, ran in zip(each * len(off), off, strict=False)]
    say.ratio(case, "CPU per update, spans by themselves over an update without", shares, "tracing off")
    say.ratio(case, "CPU per update, tracing on over off", ratios, "OTEL_SDK_DISABLED=true")
    say.ratio(case, "CPU per update, off over off", apart, "itself")
    say.count(case, "spans kept, per update", spans, "spans")
    say.time(case, "CPU of a span, its writing included", [seconds * 1e6 for seconds in each], "us")
    say.time(case, "CPU per update, tracing on", [ran.spent * 1e3 for ran in on], "ms")
    say.time(case, "CPU per update, tracing off", [ran.spent * 1e3 for ran in off], "ms")
    return say.rows


def ran(updates: int, traced: bool) -> Ran:
    """A job on a stack of its own."""
    note(f"tracing: {'on' if traced else 'off'}")
    with stack({} if traced else OFF) as running:
        job, readings = running.run(spec(*CASE, updates), PATIENCE)
        spent = cpu.per_update(readings)
        found: dict[str, float] = {}
        if traced:
            for span in tracing.spans_of(running.runs / "traces.sqlite", job=job, limit=1_000_000):
                found[span.name] = found.get(span.name, 0.0) + 1 / updates
    if not spent:
        raise RuntimeError(f"tracing: {updates} updates are too few to see two of them")
    if traced != bool(found):
        raise RuntimeError("tracing: a job with tracing kept no span")
    return Ran(sum(spent.values()), found)


def direct(per_update: dict[str, float], updates: int = 20) -> float:
    """CPU seconds per span, when as many of each hop as in `updates` updates are recorded and written.

    As in the loop the hops of a trajectory are of one trace, and no two trajectories of the same; every attribute is a
    text of a trajectory id's length.
    """
    hops = [(PATHS[name], round(count * updates)) for name, count in per_update.items() if name in PATHS]
    parents = [tracing.new_traceparent() for _ in range(max(count for _, count in hops))]
    told = 0
    with tempfile.TemporaryDirectory(prefix="sl-bench-") as folder:
        tracing.setup("bench", "bench", Path(folder) / "traces.sqlite", None)
        began = time.process_time()
        for hop, count in hops:
            for i, parent in enumerate(parents[:count]):
                attributes = dict.fromkeys((*hop.attributes, "job"), f"j0123456789-{i // 8}-{i % 8}")
                at = time.time()
                tracing.record(hop, parent, at, at, **attributes)
                told += 1
        tracing.shutdown()
        used = time.process_time() - began
        lost = {name: count for name, count in tracing.losses().items() if count}
    if lost or not told:
        raise RuntimeError(f"tracing: {told} spans, lost {lost}")
    return used / told


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--updates", type=int, default=16, help="updates of each job (default: 16)")
    parser.add_argument("--repetitions", type=int, default=3, help="of four jobs each (default: 3)")
    parser.add_argument("--json", type=Path, help="write all rows there")
    given = parser.parse_args()
    found = measure(given.updates, given.repetitions)
    print(table(found))
    if given.json is not None:
        given.json.write_bytes(msgspec.json.encode(found))
