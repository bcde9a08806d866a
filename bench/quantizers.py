"""Quantizers on CPU: GB per second of BF16 input, beside a plain copy and the fastest ways of two public libraries.

All in one process, on one tensor of 4096 x 4096 BF16 values and one thread, in CPU seconds: others' work on the machine
changes little. Every way of a library runs (FP32 and BF16 input, FP32 and BF16 scales: some are faster, some alone are
exact); the fastest to quantise and the fastest to dequantise to BF16 then alternate with ours. A ratio is of the best
run on each side. Bytes are those of the BF16 tensor, whatever a way reads; converting its input is not charged. Outputs
are fresh on both sides. With `--threads` both sides have as many, and it is seconds on the clock.

"share of codes that differ" compares bytes with the ways whose rule is ours. INT4 is measured with amax/7.5, the rule
of both libraries, and torchao's packs nothing.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
from msgspec.structs import replace
from quantizer_peers import installed, peers
from rows import Row, Say, note, table

from syncline.contract.schemes import SCHEMES
from syncline.numerics.quantized import dequantize, quantize

COMMAND = "python bench/quantizers.py"
CASES = ("fp8_block", "fp8_tile", "int4_g32", "int4_g128", "mxfp8", "mxfp4", "nvfp4")
LIBRARIES = ("torchao", "compressed-tensors")
Work = Callable[[], Any]


def measure(size: int, repetitions: int, threads: int = 1) -> list[Row]:
    """The rows of this part, for a `size` x `size` tensor."""
    say = Say("quantizers", COMMAND if threads == 1 else f"{COMMAND} --threads {threads}")
    if find_spec("numba") is None:
        note("quantizers: numba is not installed, so ours run in torch: pip install -e '.[fast]'")
    missing = [library for library in LIBRARIES if not installed(library)]
    if missing:
        note(f"quantizers: peers not installed ({', '.join(missing)}): pip install -e '.[bench-peers]'")
    with running_on(threads):
        x = made(size)
        copies(say, x, repetitions)
        for case in CASES:
            note(f"quantizers: {case}")
            one_case(say, case, x, repetitions)
    return say.rows


def made(size: int) -> torch.Tensor:
    """Values as a weight's, N(0, 0.02)."""
    return (torch.randn(size, size, generator=torch.Generator().manual_seed(0)) * 0.02).to(torch.bfloat16)


def copies(say: Say, x: torch.Tensor, repetitions: int) -> None:
    """What memory allows: into a tensor that exists, and into a fresh one."""
    there, works = torch.empty_like(x), 4 * repetitions
    for figure, work in (("copy", lambda: there.copy_(x)), ("copy into a fresh tensor", x.clone)):
        say.time(shape(x), figure, [gigabytes(x) / seconds(work) for _ in range(works)], "GB/s")


def one_case(say: Say, name: str, x: torch.Tensor, repetitions: int) -> None:
    """Ours beside the libraries, there and back."""
    case, scheme, ways = f"{name} {shape(x)}", SCHEMES[name], peers(name)
    if scheme.format == "int4":
        scheme = replace(scheme, rule="amax/7.5")
    ours = quantize(x, scheme)
    given = {dtype: x.to(dtype) for dtype in (torch.float32, torch.bfloat16)}
    to: dict[str, Work] = {way.name: partial(way.quantize, given[way.dtype]) for way in ways}
    kept = {label: work() for label, work in to.items()}
    for way in ways:
        if way.codes is not None:
            differ = way.codes(kept[way.name]).contiguous().view(torch.uint8) != ours.codes.view(torch.uint8)
            figure = f"share of codes that differ, {way.name.partition(' ')[0]}"
            say.share(case, figure, float(differ.float().mean()), way.name)
    alternate(say, case, "quantize", gigabytes(x), partial(quantize, x, scheme), to, repetitions)
    back: dict[str, Work] = {way.name: partial(way.dequantize, kept[way.name]) for way in ways}
    mine = partial(dequantize, ours, torch.bfloat16)
    alternate(say, case, "dequantize", gigabytes(x), mine, back, repetitions)


def alternate(
    say: Say, case: str, figure: str, size: float, ours: Work, theirs: dict[str, Work], repetitions: int
) -> None:
    """Ours and the fastest of theirs in turn; each way's best of two finds the fastest."""
    seconds(ours)  # compiled by now, and its memory is warm
    label = min(theirs, key=lambda name: min(seconds(theirs[name]) for _ in range(2)), default="")
    mine, peer = [], []
    for _ in range(repetitions):
        mine.append(seconds(ours))
        peer += [seconds(theirs[label])] if label else []
    say.time(case, figure, [size / took for took in mine], "GB/s")
    if label:
        say.ratio(case, f"{figure} over the fastest peer", [min(peer) / min(mine)], label)
        say.time(case, f"{figure}, fastest peer", [size / took for took in peer], "GB/s")


def seconds(work: Work) -> float:
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    began = clock()
    work()
    return clock() - began


def gigabytes(x: torch.Tensor) -> float:
    return x.numel() * 2 / 1e9


def shape(x: torch.Tensor) -> str:
    return "x".join(map(str, x.shape))


@contextmanager
def running_on(threads: int) -> Iterator[None]:
    """As many threads for ours and for theirs."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", type=int, default=4096, help="multiple of 128 (default: 4096)")
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1, help="of ours and of theirs (default: 1)")
    asked = parser.parse_args()
    if asked.size < 128 or asked.size % 128:
        parser.error(f"--size {asked.size}: a multiple of 128 is needed")
    print(table(measure(asked.size, asked.repetitions, asked.threads)))
