"""A TCP proxy that delays, cuts, resets and refuses what goes through it."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from pathlib import Path
from typing import Any

CHUNK = 65536
STEP = 0.02  # seconds between looks whether a partition is over


class Proxy:
    """Between 127.0.0.1:`port` and the unix socket `target`, in a thread of its own.

    delay     seconds that each piece of data is held back, in each direction
    severed   nothing goes through; connections stay open, as with a cable that was pulled
    refusing  new connections are closed at once
    """

    def __init__(self, target: Path) -> None:
        self._target = target
        self.delay, self.severed, self.refusing = 0.0, False, False
        self.carried = 0  # bytes
        self._open: set[asyncio.StreamWriter] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="proxy", daemon=True)
        self._thread.start()
        self._server = self._do(asyncio.start_server(self._serve, "127.0.0.1", 0)).result(10)
        self.port = int(self._server.sockets[0].getsockname()[1])

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def heal(self) -> None:
        self.delay, self.severed, self.refusing = 0.0, False, False

    def reset(self) -> None:
        """Close every connection."""
        self._do(self._reset()).result(10)

    def close(self) -> None:
        self.heal()
        self._do(self._close()).result(10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()

    def _do(self, work: Coroutine[Any, Any, Any]) -> Future[Any]:
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    async def _reset(self) -> None:
        for writer in tuple(self._open):
            writer.transport.abort()

    async def _close(self) -> None:
        self._server.close()
        await self._reset()
        tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._open.add(writer)
        try:
            if self.refusing:
                return
            there, out = await asyncio.open_unix_connection(self._target)
            self._open.add(out)
            try:
                pumps = [asyncio.create_task(self._pump(*ends)) for ends in ((reader, out), (there, writer))]
                await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
                for pump in pumps:
                    pump.cancel()
                await asyncio.gather(*pumps, return_exceptions=True)
            finally:
                self._open.discard(out)
                out.transport.abort()
        except OSError:
            pass  # the server is away: the client sees its connection closed
        finally:
            self._open.discard(writer)
            with contextlib.suppress(OSError):
                writer.transport.abort()

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(CHUNK):
                if self.delay:
                    await asyncio.sleep(self.delay)
                while self.severed:
                    await asyncio.sleep(STEP)
                writer.write(data)
                self.carried += len(data)
                await writer.drain()
