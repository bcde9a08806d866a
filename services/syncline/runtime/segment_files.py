"""Which segments a folder holds, by the names of its files alone. What is in them: `segments.py`."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

_NAME = re.compile(r"update-(\d{6,})\.parquet")


def listed(folder: Path) -> Iterator[tuple[int, os.DirEntry[str]]]:
    """The updates whose segment is in `folder`, in any order, and its file. None for an absent folder."""
    try:
        entries = os.scandir(folder)
    except (FileNotFoundError, NotADirectoryError):
        return
    with entries:
        for entry in entries:
            if match := _NAME.fullmatch(entry.name):
                yield int(match.group(1)), entry


def stamps(folder: Path) -> dict[int, tuple[int, int]]:
    """Of each update whose segment is in `folder`: its file's time of change (nanoseconds) and size."""
    found = {}
    for update, entry in listed(folder):
        try:
            stat = entry.stat()
        except FileNotFoundError:  # deleted a moment ago
            continue
        found[update] = stat.st_mtime_ns, stat.st_size
    return found
