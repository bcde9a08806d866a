"""A blob on its way into a worker's store: a file beside it that grows, and gets its name when its hash is right.

What has come stays when a transfer breaks, also when the process dies: the next one hashes it and goes on behind it.
Nothing is flushed to the disk: after a power cut a blob may hold other bytes under its name, as after any damage of a
disk, and whoever reads it hashes it.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from syncline.transport.transport import Damaged, NoRoom, WrongLength

_PIECE = 1 << 20  # bytes read at once where what came before is hashed


class Incoming:
    """The blob `digest` of `nbytes` bytes, in the file `path` until `finish`.

    Begins with what lies there, unless `anew`.
    """

    def __init__(self, path: Path, digest: str, nbytes: int, *, anew: bool = False) -> None:
        self.digest, self.nbytes = digest, nbytes
        self._path = path
        self._hash = hashlib.sha256()
        self.held = 0
        try:
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            if anew or os.fstat(self._file).st_size > nbytes:
                os.ftruncate(self._file, 0)
            while piece := os.read(self._file, _PIECE):
                self._hash.update(piece)
                self.held += len(piece)
        except OSError as error:
            raise NoRoom(f"blob {digest}: {error}") from error
        self.resumed = self.held

    def write(self, data: memoryview) -> None:
        """Append. Raises `WrongLength` beyond the end, `NoRoom` when the disk refuses."""
        if self.held + len(data) > self.nbytes:
            raise WrongLength(f"blob {self.digest}: more than {self.nbytes} bytes come")
        self._hash.update(data)
        self.held += len(data)
        try:
            while data:
                data = data[os.write(self._file, data) :]
        except OSError as error:
            self.drop()  # its room is needed
            raise NoRoom(f"blob {self.digest}: {error}") from error

    def finish(self, target: Path) -> None:
        """Give the blob its name. Raises `Damaged` with nothing of it left if its bytes are others."""
        found = self._hash.hexdigest()
        if self.held != self.nbytes or found != self.digest:
            self.drop()
            raise Damaged(f"blob {self.digest}: {self.held} of {self.nbytes} bytes came, with digest {found}")
        self.close()
        self._path.chmod(0o444)
        self._path.replace(target)

    def drop(self) -> None:
        """Delete what came."""
        self.close()
        self._path.unlink(missing_ok=True)

    def close(self) -> None:
        """Leave what came for the next time."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
