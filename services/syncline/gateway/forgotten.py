"""Versions of jobs that Redis has forgotten, as their folders tell of them: of the last few that were asked about.

They lie in the evidence of a whole job, a file of megabytes in a large one. It is not read for every question about one
token: what was made of it is told again as long as the file is the same.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable

from syncline.contract.version_path import VersionId, VersionRecord
from syncline.gateway.records import JobRecord
from syncline.gateway.reporter import EVIDENCE

KEPT = 8  # jobs
Versions = dict[VersionId, VersionRecord]


class Forgotten:
    """Safe for threads. Holds nothing that cannot be read again; what it returns is not to be changed."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._made: OrderedDict[str, tuple[tuple[int, int], Versions]] = OrderedDict()

    def versions(self, record: JobRecord, make: Callable[[], Versions]) -> Versions:
        """What `make` returns, which is asked again when the evidence is another file, or there is none yet."""
        try:
            stat = (record.folder / EVIDENCE).stat()
        except FileNotFoundError:
            return make()
        stamp = stat.st_mtime_ns, stat.st_size
        with self._lock:
            known = self._made.get(record.id)
            if known is not None and known[0] == stamp:
                self._made.move_to_end(record.id)
                return known[1]
        made = make()
        with self._lock:
            self._made[record.id] = stamp, made
            self._made.move_to_end(record.id)
            while len(self._made) > KEPT:
                self._made.popitem(last=False)
        return made
