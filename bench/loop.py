"""All figures of the loop: `python bench/loop.py [--json PATH] [--updates N] [--short]`.

Progress goes to stderr, a table to stdout, and with `--json` everything to a file that later runs can be compared
with. Parts: `engine.py`, `stream_cost.py`, `quantizers.py`, `delta.py`, `activation.py`, `run_figures.py`,
`conversion.py`, `growth.py`, `gateway_growth.py`, and in the full form `trl_step.py`, `trl_peer.py`,
`queue_peers.py`, `tracing_cost.py`, `idle.py`, `schedules.py`; each runs alone too.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch: two threads are slower on such models

import activation
import conversion
import delta
import engine
import gateway_growth
import growth
import idle
import msgspec
import quantizers
import queue_peers
import run_figures
import scaled
import schedules
import stream_cost
import torch
import tracing_cost
import train_step
import trl_peer
import trl_step
from rows import KINDS, Row, document, machine, note, table

SHORT_CASES = (("tiny-moe", run_figures.SWITCHING),)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="write all rows and the machine's facts there")
    parser.add_argument("--updates", type=int, default=12, help="updates of each job (default: 12)")
    parser.add_argument(
        "--short", action="store_true", help="a check that everything works; figures mean little"
    )
    given = parser.parse_args()
    if given.updates < 4:
        parser.error(
            f"--updates {given.updates}: at least 4 are needed for one hand-over that is not the first"
        )
    if given.json is not None and not given.json.absolute().parent.is_dir():
        parser.error(f"--json {given.json}: there is no such folder")
    torch.set_num_threads(1)
    facts, began = machine(), time.monotonic()
    rows = measure(given.updates, given.short)
    seconds = time.monotonic() - began
    for kind in KINDS:
        print(f"\n{kind}s\n{table([row for row in rows if row.kind == kind])}")
    if given.json is not None:
        made = document(rows, facts, given.short, seconds)
        given.json.write_bytes(msgspec.json.format(msgspec.json.encode(made), indent=1) + b"\n")
    note(f"{len(rows)} rows in {seconds:.0f} s")


def measure(updates: int, short: bool) -> list[Row]:
    """Every part, one after the other: side by side they would disturb one another."""
    if short:
        return [
            *engine.measure(requests=16, repetitions=1),
            *train_step.measure(train_step.CASES[:1], repetitions=1),
            *stream_cost.measure(count=256, repetitions=1),
            *quantizers.measure(size=256, repetitions=1),
            *delta.measure(delta.SHORT, (1e-6,), wider=1, updates=2, repetitions=1),
            *activation.measure((scaled.TINY,), repetitions=1),
            *conversion.measure(scaled.TINY, repetitions=1),
            *growth.measure(until=1000, pairs=2),
            *gateway_growth.measure(small=128, large=256, calls=3),
            *run_figures.measure(SHORT_CASES, updates=8),
        ]
    return [
        *engine.measure(requests=64, repetitions=3),
        *train_step.measure(repetitions=2),
        *trl_step.measure(repetitions=2),
        *trl_peer.measure(trl_peer.CASES[:1], seeds=2),
        *stream_cost.measure(count=2048, repetitions=3),
        *quantizers.measure(size=4096, repetitions=5),
        *delta.measure(delta.RECIPES, (1e-6,), wider=4, updates=5, repetitions=3),
        *activation.measure((scaled.SMALL, scaled.MIDDLE), repetitions=3),
        *run_figures.measure(run_figures.CASES, updates),
        *queue_peers.measure(count=2048, repetitions=3),
        *tracing_cost.measure(updates, repetitions=3),
        *idle.measure(),
        *schedules.measure(updates=200),
        *conversion.measure(scaled.LARGE, repetitions=3),
        *growth.measure(until=100_000),
        *gateway_growth.measure(small=1000, large=100_000, calls=300),
    ]


if __name__ == "__main__":
    main()
