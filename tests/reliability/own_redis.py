"""A Redis of a test's own: killed, frozen, emptied, filled, rolled back."""

from __future__ import annotations

import shutil
import signal
import socket
import subprocess
import tempfile
from pathlib import Path

import psutil
from waiting import wait_until

from syncline.runtime.bus import Bus, BusDown
from syncline.scheduler.stack import valkey_binary


class OwnRedis:
    """A server process with an append-only file, as the product starts one. `fsync`: its appendfsync.

    port   0: on a unix socket alone; else also on 127.0.0.1:port
    """

    def __init__(self, fsync: str = "no", port: int = 0) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="sl-"))  # short: a socket path holds at most 107 bytes
        self.fsync, self.port = fsync, port
        self.url = f"unix://{self.folder / 's'}"
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    @property
    def process(self) -> psutil.Process:
        assert self._process is not None
        return psutil.Process(self._process.pid)

    def start(self) -> None:
        """Start on what data there is, and wait until it answers."""
        options = {
            "port": str(self.port),
            "bind": "127.0.0.1",
            "unixsocket": str(self.folder / "s"),
            "dir": str(self.folder),
            "appendonly": "yes",
            "appendfsync": self.fsync,
            "save": "",
            "maxmemory-policy": "noeviction",
            "hz": "100",
        }
        argv = [
            str(valkey_binary()),
            *(part for name, value in options.items() for part in (f"--{name}", value)),
        ]
        with (self.folder / "log").open("ab") as log:
            self._process = subprocess.Popen(argv, stdout=log, stderr=log)
        wait_until(self.answers, 20, "the server's answer", every=0.01)

    def answers(self) -> bool:
        bus = Bus(self.url, deadline=0.0)
        try:
            return bus.ping()
        except BusDown:
            return False
        finally:
            bus.close()

    def kill(self) -> None:
        assert self._process is not None
        self._process.kill()
        self._process.wait(10)
        (self.folder / "s").unlink(missing_ok=True)

    def freeze(self) -> None:
        self.process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def keep(self) -> Path:
        """A copy of the data folder as it is now, for `roll_back`."""
        copy = self.folder / "kept"
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(self.folder / "appendonlydir", copy)
        return copy

    def roll_back(self, copy: Path) -> None:
        """Kill it and start it on older data: what a server loses that had not brought its file to the disk."""
        self.kill()
        shutil.rmtree(self.folder / "appendonlydir")
        shutil.copytree(copy, self.folder / "appendonlydir")
        self.start()

    def empty(self) -> None:
        """Kill it and start it with no data at all."""
        self.kill()
        shutil.rmtree(self.folder / "appendonlydir")
        self.start()

    def remove(self) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(signal.SIGCONT)
            self.kill()
        shutil.rmtree(self.folder, ignore_errors=True)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])
