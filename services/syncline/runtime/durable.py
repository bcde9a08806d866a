"""Files that survive a power cut: whole under their name, or not there."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import secrets
from pathlib import Path


def disk_full(error: BaseException) -> bool:
    """Whether `error` says that a file system had no room: what was to be written can be once there is some.

    Libraries that write by themselves (safetensors) say it in words only.
    """
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return True
    return "No space left on device" in str(error)


def sync_file(path: Path) -> str:
    """fsync `path` and return the sha256 hex of its bytes."""
    with path.open("rb+") as file:
        os.fsync(file.fileno())
        return hashlib.file_digest(file, "sha256").hexdigest()


def sync_folder(path: Path) -> None:
    """fsync a folder, so that the names in it are on disk."""
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_whole(path: Path, data: bytes | memoryview) -> None:
    """Write `path` so that a reader, or a crash, finds the old bytes or the new ones and never a part.

    The folder must exist. What a writer has not finished lies beside it under a name of its own, which begins with a
    dot: one that was frozen and wakes cannot write into what its successor has put into place.
    """
    _beside(path, data).replace(path)
    sync_folder(path.parent)


def write_first(path: Path, data: bytes | memoryview) -> bool:
    """`write_whole`, unless something has that name already: then False, and it stays as it is."""
    beside = _beside(path, data)
    try:
        os.link(beside, path)
    except FileExistsError:
        return False
    finally:
        beside.unlink()
    sync_folder(path.parent)
    return True


def _beside(path: Path, data: bytes | memoryview) -> Path:
    beside = path.with_name(f".{path.name}.{secrets.token_hex(4)}.part")
    with beside.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    return beside


def locked(path: Path) -> bool:
    """Whether a process holds the lock file `path`; False where there is none."""
    if not path.is_file():
        return False
    with path.open("r") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False
