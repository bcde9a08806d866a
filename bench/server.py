"""A Redis of the bench's own: the embedded server with the options that the product gives it."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from syncline.runtime.bus import Bus
from syncline.scheduler.stack import redis_process


@contextmanager
def own_server() -> Iterator[str]:
    """URL of a running server; its data goes with it."""
    folder = Path(tempfile.mkdtemp(prefix="sl-"))
    (folder / "redis").mkdir()
    process = redis_process(folder, folder / "s")
    with (folder / "log").open("wb") as log:
        server = subprocess.Popen(process.argv, stdout=log, stderr=log)
    try:
        end = time.monotonic() + 20.0
        while not (folder / "s").exists():
            if server.poll() is not None or time.monotonic() > end:
                raise RuntimeError(f"valkey-server did not start: {(folder / 'log').read_text()[-500:]}")
            time.sleep(0.01)
        yield f"unix://{folder / 's'}"
    finally:
        server.kill()
        server.wait()
        shutil.rmtree(folder, ignore_errors=True)


def cpu_seconds(bus: Bus) -> float:
    """CPU seconds that the server has used, all threads, by its own account (microsecond steps)."""
    lines = bus.call("INFO", "cpu").decode().splitlines()
    used = [line.partition(":")[2] for line in lines if line.startswith(("used_cpu_user:", "used_cpu_sys:"))]
    return sum(map(float, used))
