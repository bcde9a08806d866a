"""The oldest spans leave a store that has become too old or too large: whole traces, in small steps.

For the gateway, which runs on and on. A step is a transaction of its own and short, so that whoever writes or reads
spans meanwhile hardly waits. The file does not shrink: what has left is room for what comes.
"""

from __future__ import annotations

import logging
import sqlite3
import threading
import time
from pathlib import Path

from syncline.runtime.trace_store import BUSY_SECONDS

AT_ONCE = 256  # the traces of so many oldest spans leave in one step
LOOK = 60.0  # seconds between two looks
PAUSE = 0.05  # seconds between two steps, for others
_MIB = 1 << 20
_LOG = logging.getLogger(__name__)
_STEP = f"""
delete from spans where trace_id in (
  select trace_id from (select trace_id, start_ns from spans order by start_ns limit {AT_ONCE}) where start_ns < ?
)"""


def keep_pruned(store: Path, days: float, mib: int, stopping: threading.Event) -> None:
    """Until `stopping`: no trace that began more than `days` ago, and at most `mib` MiB; 0: without that bound."""
    if not days and not mib:
        return
    while not stopping.is_set():
        before = int((time.time() - days * 86400) * 1e9) if days else 0
        try:
            left = prune(store, before, mib * _MIB)
        except sqlite3.Error as error:  # a view of records that are elsewhere: no reason to end
            _LOG.warning("trace store %s: not pruned for now: %s", store, error)
            left = 0
        stopping.wait(PAUSE if left else LOOK)


def prune(store: Path, before_ns: int, most: int) -> int:
    """One step: how many spans have left; 0: nothing is too old, and there are at most `most` bytes (0: any number).

    Raises `sqlite3.Error` for a store that cannot be written.
    """
    if not store.exists():
        return 0
    db = sqlite3.connect(store, timeout=BUSY_SECONDS, isolation_level=None)
    try:
        if db.execute("select 1 from sqlite_master where name = 'spans'").fetchone() is None:
            return 0  # made a moment ago
        limit = 1 << 62 if most and used(db) > most else before_ns
        return max(0, db.execute(_STEP, (limit,)).rowcount)
    finally:
        db.close()


def used(db: sqlite3.Connection) -> int:
    """Bytes of the file that hold something."""
    (pages,), (free,), (size,) = (
        db.execute(f"pragma {name}").fetchone() for name in ("page_count", "freelist_count", "page_size")
    )
    return int((pages - free) * size)
