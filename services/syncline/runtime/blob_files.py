"""What `store.py` does with single files: write one whole, compare one, bring many to the disk, remove one."""

from __future__ import annotations

import ctypes
import os
import secrets
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path

CHUNK = 1 << 20  # bytes compared at a time
TOGETHER = 256  # files that are brought to the disk at once
_START = getattr(ctypes.CDLL(None), "sync_file_range", None)  # Linux alone has it, and Python no name for it
_WRITE = 2  # SYNC_FILE_RANGE_WRITE: begin to write, wait for nothing


def written(folder: Path, raw: memoryview, *, fsync: bool = True) -> Path:
    """A new, read-only file in `folder`. On any error it is removed before the error goes on."""
    path = folder / f"{secrets.token_hex(8)}.tmp"
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o444)
    whole = False
    try:
        with os.fdopen(descriptor, "wb", buffering=0) as file:
            done = 0
            while done < len(raw):  # an unbuffered write may take only a part
                done += file.write(raw[done:])
            if fsync:
                os.fsync(descriptor)
        whole = True
    finally:
        if not whole:
            path.unlink()
    return path


def holds(path: Path, raw: memoryview) -> bool:
    """Whether the file at `path` has exactly the bytes `raw`. Ten times faster than to hash it."""
    try:
        with path.open("rb", buffering=0) as file:
            if os.fstat(file.fileno()).st_size != len(raw):
                return False
            part = bytearray(min(CHUNK, len(raw)))
            at = 0
            while at < len(raw):
                count = file.readinto(memoryview(part)[: len(raw) - at])
                if not count or part[:count] != raw[at : at + count]:  # compared as memory
                    return False
                at += count
    except FileNotFoundError:
        return False
    return True


def sync_files(paths: Iterable[Path]) -> None:
    """Bring files to the disk. One for which that fails is removed, for the system takes its bytes for written; raises
    its `OSError`. One that is not there any more is nobody's.
    """
    waiting = list(paths)
    for first in range(0, len(waiting), TOGETHER):
        _sync(waiting[first : first + TOGETHER])


def _sync(paths: Sequence[Path]) -> None:
    """All are on their way before the first is waited for: the file system makes one journal entry of them."""
    with ExitStack() as opened:
        there = [(path, file) for path in paths if (file := _opened(path, opened)) is not None]
        if len(there) > 1 and _START is not None:
            for _, file in there:
                _START(file, ctypes.c_int64(0), ctypes.c_int64(0), _WRITE)  # a hint: fsync says what failed
        for path, file in there:
            try:
                os.fsync(file)
            except OSError:
                path.unlink(missing_ok=True)
                raise


def _opened(path: Path, stack: ExitStack) -> int | None:
    try:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    stack.callback(os.close, file)
    return file


def removed(path: Path) -> int:
    """Unlink `path` and return the bytes that it held. A reader that has it mapped keeps what it sees."""
    size = path.stat().st_size
    path.unlink()
    return size
