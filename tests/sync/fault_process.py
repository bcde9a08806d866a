"""A rollout worker or sync as its own process, which stops for ever at a place that the test names.

`fault_process.py rollout` and `fault_process.py sync` run what `python -m syncline.rollout` and `.sync` run. A file
`hold.<who>` in the job's folder names the place; who comes there writes `held.<who>` and waits to be killed.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from syncline.runtime.service import run

FOLDER = Path(os.environ["SYNCLINE_RUNS"]) / os.environ["SYNCLINE_JOB"]
WHO = os.environ.get("SYNCLINE_WORKER", "sync")


def reach(place: str) -> None:
    wish = FOLDER / f"hold.{WHO}"
    if wish.is_file() and wish.read_text() == place:
        (FOLDER / f"held.{WHO}").touch()
        threading.Event().wait()


def stop(owner: type, method: str, *, before: str = "", after: str = "") -> None:
    """Put places before and after a method of `owner`."""
    inner: Callable[..., Any] = getattr(owner, method)

    def outer(*args: Any, **kwargs: Any) -> Any:
        reach(before)
        done = inner(*args, **kwargs)
        reach(after)
        return done

    setattr(owner, method, outer)


def rollout() -> None:
    import torch

    from syncline.rollout.engines.weights import Weights
    from syncline.rollout.loop import main
    from syncline.rollout.orders import Orders

    torch.set_num_threads(1)
    stop(Weights, "_settle", after="a tensor written, others not")
    stop(Orders, "_finish_staging", after="verified")
    stop(Orders, "_take_commit", before="told to commit")
    stop(Orders, "_active", before="serves it, has not said so")
    run("rollout", main)


def sync() -> None:
    from syncline.runtime.store import BlobStore
    from syncline.sync.loop import main
    from syncline.sync.publish import Publisher

    stop(BlobStore, "add", after="a blob written, others not")
    stop(BlobStore, "write_manifest", before="all blobs written, no manifest")
    stop(Publisher, "publish", before="minted", after="manifest written, nobody told")
    run("sync", main)


if __name__ == "__main__":
    {"rollout": rollout, "sync": sync}[sys.argv[1]]()
