"""`python -m syncline.exporting JOB NAME`: one export, from `exports/NAME.request.json` of the job.

It ends with whoever started it: its standard input is a pipe that nobody writes to, and once that is closed it is done
for. What it leaves then is taken away by the next try.
"""

from __future__ import annotations

import fcntl
import os
import sys
import threading
import time
from pathlib import Path

import msgspec

from syncline.contract.exported import ExportFailure, ExportProgress, ExportRequest
from syncline.exporting.export import export
from syncline.exporting.held import FOLDER
from syncline.runtime.durable import write_whole
from syncline.runtime.settings import Settings

_EVERY = 0.2  # seconds between two notes of the progress
ABANDONED = 75


def main(job: str, name: str) -> int:
    """0: it is there; 1: it cannot be made, and `NAME.failed.json` says why; 2: another process is at it."""
    settings = Settings.read(os.environ)
    folder = settings.job_dir(job)
    place = folder / FOLDER
    threading.Thread(target=_end_with_parent, daemon=True).start()
    with (place / f"{name}.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return 2
        request = msgspec.json.decode((place / f"{name}.request.json").read_bytes(), type=ExportRequest)
        failed = place / f"{name}.failed.json"
        failed.unlink(missing_ok=True)
        try:
            export(request, folder, settings.models, _Notes(place / f"{name}.progress.json"))
        except (ValueError, OSError) as error:
            write_whole(failed, msgspec.json.encode(ExportFailure(reason=str(error))))
            return 1
        finally:
            (place / f"{name}.progress.json").unlink(missing_ok=True)
    return 0


class _Notes:
    """Writes the progress down, not too often."""

    def __init__(self, path: Path) -> None:
        self._path, self._at = path, 0.0

    def __call__(self, done: int, total: int) -> None:
        now = time.monotonic()
        if now - self._at >= _EVERY:
            self._at = now
            beside = self._path.with_suffix(".part")
            beside.write_bytes(msgspec.json.encode(ExportProgress(done=done, total=total)))
            beside.replace(self._path)


def _end_with_parent() -> None:
    os.read(0, 1)  # not through sys.stdin, whose lock would be held when the interpreter ends
    os._exit(ABANDONED)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
