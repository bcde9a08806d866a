"""No caller ever reads another's reply, whatever happens to connections between a command and its answer."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from proxy import Proxy
from waiting import wait_until

from syncline.contract.streams import PREFIX
from syncline.runtime.bus import Bus

KEYS = 100
THREADS = 8


@pytest.fixture
def proxy(redis_url: str) -> Iterator[Proxy]:
    between = Proxy(Path(redis_url.removeprefix("unix://")))
    yield between
    between.close()


def test_replies_are_the_askers_own_while_connections_are_reset_and_slow(
    redis_url: str, job: str, proxy: Proxy
) -> None:
    """Commands time out and are cut between sending and reading; a connection that was left so is never used again."""
    direct, bus = Bus(redis_url), Bus(proxy.url, deadline=30.0)
    bus._pool.connection_kwargs["socket_timeout"] = (
        0.1  # the proxy holds replies back for longer, now and then
    )
    names = [f"{PREFIX}:{{{job}}}:cross:{number}" for number in range(KEYS)]
    for name in names:
        direct.set(name, name, ttl=60)
    wrong: list[tuple[str, bytes | None]] = []
    asked = [0] * THREADS
    stop = threading.Event()

    def ask(which: int) -> None:
        drawn = random.Random(which)
        while not stop.is_set():
            name = drawn.choice(names)
            if (got := bus.get(name)) != name.encode():
                wrong.append((name, got))
            asked[which] += 1

    threads = [threading.Thread(target=ask, args=(which,)) for which in range(THREADS)]
    for thread in threads:
        thread.start()
    drawn = random.Random(1)
    for _ in range(12):
        before = sum(asked)
        proxy.delay = drawn.choice([0.0, 0.12])
        proxy.reset()
        proxy.delay = 0.0
        wait_until(lambda before=before: sum(asked) >= before + 50, 20, "fifty more answers")  # type: ignore[misc]
        proxy.delay = 0.2
        wait_until(lambda seen=bus.reconnects: bus.reconnects > seen, 20, "a reply that comes too late")  # type: ignore[misc]
        proxy.delay = 0.0
    stop.set()
    for thread in threads:
        thread.join(30)
    assert not wrong
    assert bus.reconnects >= 12
    bus.close()
    direct.close()
