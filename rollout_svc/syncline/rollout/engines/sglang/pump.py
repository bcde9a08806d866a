"""Requests on their way: one thread that holds any number of open HTTP requests, and a queue of what came back."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Coroutine, Mapping
from concurrent.futures import Future
from typing import Any

import httpx

from syncline.rollout.engines.sglang.client import Refused, Server, ServerGone, answered

Reply = dict[str, Any] | ServerGone | Refused


class Pump:
    """Sends bodies to `/generate`. `land` gives tags and replies back in the order in which they came."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._landed: queue.Queue[tuple[Any, Reply]] = queue.Queue()
        self._air = 0
        self._changed = threading.Condition()
        self._clients: dict[str, httpx.AsyncClient] = {}
        self._thread = threading.Thread(target=self._loop.run_forever, name="sglang-pump", daemon=True)
        self._thread.start()

    @property
    def air(self) -> int:
        """Requests without a reply."""
        return self._air

    def send(self, server: Server, tag: object, body: Mapping[str, Any], headers: Mapping[str, str]) -> None:
        with self._changed:
            self._air += 1
        self._run(self._post(server, tag, body, headers))

    def wait_empty(self, seconds: float) -> bool:
        """Wait until nothing is on its way. False: it took longer."""
        with self._changed:
            return self._changed.wait_for(lambda: self._air == 0, seconds)

    def land(self, wait: float) -> list[tuple[Any, Reply]]:
        """What came back since; waits up to `wait` seconds for the first."""
        landed: list[tuple[Any, Reply]] = []
        try:
            landed.append(self._landed.get(timeout=wait) if wait > 0 else self._landed.get_nowait())
            while True:
                landed.append(self._landed.get_nowait())
        except queue.Empty:
            return landed

    def close(self) -> None:
        """End the thread. What is on its way is given up."""
        self._run(self._close()).result(timeout=10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout=10)
        self._loop.close()

    def _run(self, what: Coroutine[Any, Any, None]) -> Future[None]:
        return asyncio.run_coroutine_threadsafe(what, self._loop)

    async def _post(
        self, server: Server, tag: object, body: Mapping[str, Any], headers: Mapping[str, str]
    ) -> None:
        reply: Reply
        try:
            client = self._client(server)
            reply = answered("/generate", await client.post("/generate", json=body, headers=dict(headers)))
        except (ServerGone, Refused) as error:
            reply = error
        except httpx.HTTPError as error:
            reply = ServerGone(f"{server.url}: {error or type(error).__name__}")
        self._landed.put((tag, reply))
        with self._changed:
            self._air -= 1
            self._changed.notify_all()

    def _client(self, server: Server) -> httpx.AsyncClient:
        if server.url not in self._clients:
            limits = httpx.Limits(max_connections=None, max_keepalive_connections=64)
            timeout = httpx.Timeout(None, connect=30.0)
            self._clients[server.url] = httpx.AsyncClient(
                base_url=server.url, headers=server.headers, timeout=timeout, limits=limits, trust_env=False
            )
        return self._clients[server.url]

    async def _close(self) -> None:
        for client in self._clients.values():
            await client.aclose()
