"""`python -m syncline.trainer.engines.megatron.follower HOST:PORT RANK GRID DEADLINE`: a rank other than 0.

Waits for rank 0's commands and carries them out until it is told to leave. It ends with its parent (stdin closes) and
with the group: a collective that fails is told in the store, under `failed/RANK`, before it does.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from datetime import timedelta

import msgspec
import torch
from torch._C._distributed_c10d import Store, TCPStore  # torch.distributed's, untyped there

from syncline.contract.sharding.grid import Grid
from syncline.trainer.engines.megatron.ranks import BEAT
from syncline.trainer.engines.megatron.seat import Seat
from syncline.trainer.engines.megatron.wire import Leave, Told

_LONG = timedelta(days=30)


def main(address: str, index: int, grid: Grid, deadline: float) -> int:
    """Follow until told to leave; the exit code."""
    host, _, port = address.rpartition(":")
    store = TCPStore(host, int(port), is_master=False, timeout=timedelta(seconds=deadline))
    threading.Thread(target=_end_with_parent, daemon=True).start()
    threading.Thread(target=_beat, args=(host, int(port), index, deadline), daemon=True).start()
    store.set(f"here/{index}", "")
    try:
        _follow(Seat(grid, index, store, deadline), store)
    except RuntimeError as error:  # torch.distributed's; rank 0 tells whose end it was
        store.set(f"failed/{index}", str(error).splitlines()[0])
        raise
    return 0


def _follow(seat: Seat, store: Store) -> None:
    number = 0
    while True:
        store.wait([f"command/{number}"], _LONG)
        number += 1
        told = msgspec.msgpack.decode(seat.share(None), type=Told)
        seat.collect(msgspec.msgpack.encode(seat.do(told)))
        if isinstance(told.command, Leave):
            seat.leave()
            return


def _end_with_parent() -> None:
    while os.read(sys.stdin.fileno(), 1):
        pass
    os._exit(1)


def _beat(host: str, port: int, index: int, deadline: float) -> None:
    """A sign of life, by a connection of its own: the other one waits for commands."""
    store = TCPStore(host, port, is_master=False, timeout=timedelta(seconds=deadline))
    while True:
        store.set(f"beat/{index}", str(time.time()))
        time.sleep(BEAT)


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(
        main(sys.argv[1], int(sys.argv[2]), msgspec.json.decode(sys.argv[3], type=Grid), float(sys.argv[4]))
    )
