"""`python -m syncline.lab.study`: the seed's Table 5 for one format. `syncline study` starts it.

Rollout stays at the format; four trainer variants and an unquantised pair train from the same seeds. Each cell is a
process of its own. What is finished stays: a study that was interrupted goes on with the cells that are missing.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from pathlib import Path

import msgspec

from syncline.lab.figure import drawing, page
from syncline.lab.findings import NAMES, Study, findings, table
from syncline.lab.records import Cell, Order, finished
from syncline.runtime.durable import write_whole

FORMATS = {
    "unified-fp8": "unified_fp8",
    "int4": "int4_qat_w4a16",
    "mxfp8": "mxfp8",
    "mxfp4": "mxfp4_qat_w4a16",
    "nvfp4": "nvfp4_w4a4",
}
"""Format as the command line names it -> recipe that says what rollout is."""
STEP = 20  # updates between two lines of progress where there is no terminal


class CellFailed(RuntimeError):
    """A cell's process ended without a result. The message says which one and what it last said."""


class Progress:
    """How far the cells are, on stderr: one line that is drawn again on a terminal, elsewhere a line now and then."""

    def __init__(self, name: str, total: int, updates: int) -> None:
        self._name, self._total, self._updates = name, total, updates
        self._done = 0
        self._running: dict[str, str] = {}
        self._lock = threading.Lock()
        self._live = sys.stderr.isatty()

    def at(self, cell: str, update: int, reward: str) -> None:
        """`cell` has made `update`."""
        with self._lock:
            self._running[cell] = f"{cell} {update}/{self._updates} reward {reward}"
            self._say(always=update % STEP == 0)

    def ended(self, cell: str, how: str) -> None:
        """`cell` has a result."""
        with self._lock:
            self._done += 1
            self._running.pop(cell, None)
            if not self._live:
                sys.stderr.write(f"{self._name}: {cell} {how}\n")
            self._say(always=True)

    def close(self) -> None:
        """Leave the terminal's line."""
        if self._live:
            sys.stderr.write("\n")

    def _say(self, always: bool) -> None:
        told = "  ".join([f"{self._name}: {self._done}/{self._total} cells", *sorted(self._running.values())])
        if self._live:
            sys.stderr.write(f"\r\x1b[K{told[:180]}")
        elif always:
            sys.stderr.write(told + "\n")
        sys.stderr.flush()


class Cells:
    """Runs the cells of a study, `jobs` at once, results in `folder`, which is there."""

    def __init__(self, folder: Path, jobs: int, progress: Progress) -> None:
        self._folder, self._jobs, self._progress = folder, jobs, progress
        self._children: set[subprocess.Popen[str]] = set()
        self._lock = threading.Lock()
        self._stopping = False

    def run(self, orders: Sequence[Order], fresh: bool) -> list[Cell]:
        """Results in the order of `orders`. Raises `CellFailed`; on any error the other cells are stopped."""
        with ThreadPoolExecutor(self._jobs) as pool:
            futures = [pool.submit(self._one, order, fresh) for order in orders]
            try:
                for future in wait(futures, return_when=FIRST_EXCEPTION).done:
                    future.result()  # the first failure ends the study, though others still run
                return [future.result() for future in futures]
            finally:
                self._stop()
                pool.shutdown(cancel_futures=True)

    def _one(self, order: Order, fresh: bool) -> Cell:
        name = f"{order.variant}/{order.seed}"
        path = self._folder / f"{order.variant}-seed{order.seed}.json"
        known = None if fresh else finished(path, order)
        if known is not None:
            self._progress.ended(name, "finished before")
            return known
        log = path.with_suffix(".log")
        command = [sys.executable, "-m", "syncline.lab.cell", msgspec.json.encode(order).decode(), str(path)]
        environ = {**os.environ, "OMP_NUM_THREADS": "1"}
        with log.open("w") as errors:
            with self._lock:
                if self._stopping:
                    raise CellFailed(f"cell {name}: not started")
                child = subprocess.Popen(
                    command, env=environ, stdout=subprocess.PIPE, stderr=errors, text=True
                )
                self._children.add(child)
            assert child.stdout is not None
            with child.stdout as lines:
                for line in lines:
                    update, reward = line.split()
                    self._progress.at(name, int(update), reward)
            code = child.wait()
        with self._lock:
            self._children.discard(child)
        cell = finished(path, order)
        if code or cell is None:
            said = log.read_text().strip().splitlines() or ["nothing"]
            raise CellFailed(f"cell {name} ended with {code}: {said[-1]} (all of it in {log})")
        log.unlink()
        self._progress.ended(name, f"took {cell.seconds:.0f} s")
        return cell

    def _stop(self) -> None:
        with self._lock:
            self._stopping = True
            children = list(self._children)
        for child in children:
            child.terminate()


def orders(
    recipe: str, variants: Sequence[str], seeds: Sequence[int], updates: int, groups: int
) -> list[Order]:
    """All cells: seed by seed, so that an early end leaves whole comparisons."""
    return [
        Order(recipe=recipe, variant=variant, seed=seed, updates=updates, groups=groups)
        for seed in seeds
        for variant in variants
    ]


def study(args: argparse.Namespace) -> Study:
    """Run what is missing and write `study.json`, `study.md`, `study.html` and `study.svg` into `args.out`."""
    recipe = FORMATS[args.format]
    wanted = orders(recipe, args.variants, args.seeds, args.updates, args.groups)
    progress = Progress(args.format, len(wanted), args.updates)
    try:
        cells = Cells(args.out / "cells", args.jobs, progress).run(wanted, args.fresh)
    finally:
        progress.close()
    done = Study(
        format=args.format,
        recipe=recipe,
        seeds=tuple(args.seeds),
        updates=args.updates,
        findings=findings(cells),
        cells=tuple(cells),
    )
    write_whole(args.out / "study.json", msgspec.json.encode(done))
    write_whole(args.out / "study.md", table(done).encode())
    write_whole(args.out / "study.html", page(done).encode())
    write_whole(args.out / "study.svg", drawing(done).encode())
    return done


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="syncline study",
        description="Rollout fixed at a low-bit format, four trainer variants with the same seeds: how well they "
        "agree with rollout, how far they are from a BF16 reference, and what they learn.",
    )
    parser.add_argument("format", choices=sorted(FORMATS))
    parser.add_argument("--updates", type=_positive, default=120, metavar="N", help="per cell (120)")
    parser.add_argument("--seeds", type=_seeds, default=[0, 1], metavar="A,B", help="0,1")
    parser.add_argument(
        "--variants", type=_variants, default=list(NAMES), metavar="A,B", help=",".join(NAMES)
    )
    parser.add_argument(
        "--groups", type=_positive, default=32, metavar="N", help="prompts per update, 16 samples each (32)"
    )
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="where results go")
    parser.add_argument("--jobs", type=_positive, default=2, metavar="N", help="cells at once (2)")
    parser.add_argument("--fresh", action="store_true", help="run finished cells again")
    parser.add_argument("--json", action="store_true", help="print findings as JSON")
    return parser


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no number from 1 on")
    return int(text)


def _seeds(text: str) -> list[int]:
    parts = text.split(",")
    if not all(part.isdecimal() for part in parts) or len(set(parts)) < len(parts):
        raise argparse.ArgumentTypeError(f"{text!r} is no list of different seeds, such as 0,1")
    return [int(part) for part in parts]


def _variants(text: str) -> list[str]:
    parts = text.split(",")
    unknown = sorted(set(parts) - NAMES.keys())
    if unknown:
        raise argparse.ArgumentTypeError(f"there is no variant {unknown[0]!r}; there are {','.join(NAMES)}")
    return [name for name in NAMES if name in parts]


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code: 0 done, 1 a cell failed, 2 wrong input (argparse), 130 interrupted."""
    parser = _parser()
    args = parser.parse_args(arguments)
    try:
        (args.out / "cells").mkdir(parents=True, exist_ok=True)
    except OSError as error:
        parser.error(f"argument --out: {args.out} cannot be a folder of results: {error.strerror}")
    # a shell starts background jobs with SIGINT ignored
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        done = study(args)
    except CellFailed as error:
        sys.stderr.write(f"error: {error}\n")
        return 1
    except KeyboardInterrupt:
        sys.stderr.write(
            f"interrupted; finished cells stay in {args.out}, the same command goes on from there\n"
        )
        return 130
    if args.json:
        short = msgspec.structs.replace(done, cells=())
        sys.stdout.write(msgspec.json.format(msgspec.json.encode(short), indent=2).decode() + "\n")
    else:
        sys.stdout.write(
            f"{table(done)}\nfigure {args.out / 'study.html'}, all figures {args.out / 'study.json'}\n"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
