"""A gloo broadcast of tensors to a second process on this machine, one after the other as they come.

Run as a program it is that second process: `python bench/broadcast.py RENDEZVOUS SHAPES ROUNDS`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

WAIT = timedelta(seconds=120)


def broadcast(tensors: Sequence[Tensor], folder: Path, rounds: int) -> list[float]:
    """Seconds of each round, from the first tensor to the other side's word that it has the last. One round before
    them does not count: it finds and touches the memory of the receiver.
    """
    meeting = folder / "meeting"
    shapes = json.dumps([list(tensor.shape) for tensor in tensors])
    argv = [sys.executable, __file__, str(meeting), shapes, str(rounds)]
    other = subprocess.Popen(argv)
    try:
        _meet(meeting, 0)
        found = [_round(tensors) for _ in range(rounds + 1)]
        dist.destroy_process_group()
        if other.wait(timeout=60):
            raise RuntimeError(f"the receiver of the broadcast ended with {other.returncode}")
    finally:
        other.kill()
    return found[1:]


def _meet(meeting: Path, rank: int) -> None:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=2, timeout=WAIT)


def _round(tensors: Sequence[Tensor]) -> float:
    dist.barrier()
    began = time.perf_counter()
    for tensor in tensors:
        dist.broadcast(tensor, 0)
    dist.barrier()
    return time.perf_counter() - began


if __name__ == "__main__":
    torch.set_num_threads(1)
    _meet(Path(sys.argv[1]), 1)
    mine = [torch.empty(shape, dtype=torch.bfloat16) for shape in json.loads(sys.argv[2])]
    for _ in range(int(sys.argv[3]) + 1):
        _round(mine)
    dist.destroy_process_group()
