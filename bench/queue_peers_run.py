"""What other queues cost, run by an interpreter of their own (`.venv-peers`); it knows nothing of this project.

    python bench/queue_peers_run.py transferqueue COUNT BATCH
    python bench/queue_peers_run.py ray COUNT BATCH
    python bench/queue_peers_run.py redis-add URL KEY COUNT BATCH     (and redis-take, after it)

Prints one JSON object: CPU seconds of the timed part. TransferQueue and ray.util.queue run on a Ray of their own,
with a producer and a consumer in two processes, one after the other; `work` is the CPU of both and of the actors they
talk to, `daemons` that of Ray's own processes (raylet, gcs_server and what watches them) meanwhile. Every way is
warmed up with one batch before it is timed, and every consumer checks what it got.

A trajectory has 10,240 bytes: 512 tokens of ids (int64), log-probs (float32), versions and masks (int32).
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from importlib.metadata import version
from typing import Any

import psutil

TOKENS = 512
BYTES = TOKENS * 20
FIELDS = ("ids", "logprobs", "versions", "mask")
NAMESPACE = "bench"
AGENTS = (
    "ray::DashboardAgent",
    "ray::RuntimeEnvAgent",
    "ray::IDLE",
)  # Ray's own, though they are its workers
Answer = dict[str, Any]


# ---- a consumer group as a user of redis-py writes it ------------------------------------------------------------
def redis_add(url: str, key: str, count: int, batch: int) -> Answer:
    """XADD in pipelines of `batch`; the bodies are made beforehand."""
    import redis

    client = redis.Redis.from_url(url)
    bodies = [os.urandom(BYTES) for _ in range(batch)]
    client.ping()
    began = time.process_time()
    for _ in range(0, count, batch):
        pipeline = client.pipeline(transaction=False)
        for body in bodies:
            pipeline.xadd(key, {"m": body})
        pipeline.execute()
    return {"cpu": time.process_time() - began, "version": f"redis-py {version('redis')}"}


def redis_take(url: str, key: str, count: int, batch: int) -> Answer:
    """XREADGROUP of `batch`, XACK and XDEL of as many in one pipeline."""
    import redis

    client = redis.Redis.from_url(url)
    client.ping()
    taken, began = 0, time.process_time()
    while taken < count:
        answer: Any = client.xreadgroup("g", "c", {key: ">"}, count=batch)
        ids = [id for id, _ in answer[0][1]]
        pipeline = client.pipeline(transaction=False)
        pipeline.xack(key, "g", *ids)
        pipeline.xdel(key, *ids)
        pipeline.execute()
        taken += len(ids)
    return {"cpu": time.process_time() - began, "version": f"redis-py {version('redis')}"}


# ---- on Ray --------------------------------------------------------------------------------------------------------
def start_ray() -> str:
    """A Ray of this process's own; returns its address."""
    import ray

    started = ray.init(
        num_cpus=8,
        include_dashboard=False,
        object_store_memory=256 << 20,
        namespace=NAMESPACE,
        log_to_driver=False,
        logging_level=logging.ERROR,
    )
    return str(started.address_info["address"])


def join_ray(address: str) -> None:
    import ray

    ray.init(address=address, namespace=NAMESPACE, log_to_driver=False, logging_level=logging.ERROR)


def transferqueue(count: int, batch: int) -> Answer:
    """kv_batch_put here; in another process get_meta (the claim), get_data and clear_samples (what frees a sample)."""
    address = start_ray()
    import transfer_queue as tq

    tq.init()
    found: Answer = {"version": f"TransferQueue {version('TransferQueue')}", "address": address}
    for way in ("fields", "one"):
        with Other("transferqueue-take", address, way, count, batch) as consumer:
            put_all(way, "warm", batch, batch)
            consumer.run()
            produced = charged(partial(put_all, way, f"p{way}", count, batch))
            consumed = charged(consumer.run)
        found[way] = {name: produced[name] + consumed[name] for name in produced}
    tq.close()
    return found


def put_all(way: str, partition: str, count: int, batch: int) -> None:
    import torch
    import transfer_queue as tq
    from tensordict import TensorDict

    for at in range(0, count, batch):
        if way == "one":
            columns = {"body": torch.full((batch, BYTES), at % 251, dtype=torch.uint8)}
        else:
            kinds = (torch.int64, torch.float32, torch.int32, torch.int32)
            columns = {
                name: torch.full((batch, TOKENS), at % 251, dtype=kind)
                for name, kind in zip(FIELDS, kinds, strict=True)
            }
        keys = [f"{partition}-{n}" for n in range(at, at + batch)]
        tq.kv_batch_put(keys=keys, partition_id=partition, fields=TensorDict(columns, batch_size=[batch]))


def transferqueue_take(address: str, way: str, count: int, batch: int) -> None:
    join_ray(address)
    import transfer_queue as tq

    tq.init()
    client = tq.get_client()
    fields = ["body"] if way == "one" else list(FIELDS)

    def take(partition: str, total: int) -> None:
        taken = 0
        while taken < total:
            meta = client.get_meta(
                data_fields=fields, batch_size=batch, partition_id=partition, task_name="train"
            )
            data = client.get_data(meta)
            if data.batch_size[0] != batch:
                raise RuntimeError(f"TransferQueue gave {data.batch_size[0]} samples of {batch}")
            client.clear_samples(meta)
            taken += batch

    serve(lambda: take("warm", batch), lambda: take(f"p{way}", count))


def ray_queue(count: int, batch: int) -> Answer:
    """ray.util.queue: one by one, as its users call it, and by its batch calls."""
    address = start_ray()
    import ray
    from ray.util.queue import Queue

    found: Answer = {"version": f"ray.util.queue {ray.__version__}", "address": address}
    for way, size in (("single", 1), ("batch", batch)):
        # a handle is handed over by name: an actor of this namespace
        queue = Queue(actor_options={"name": f"q-{way}", "num_cpus": 0})
        body = os.urandom(BYTES)
        with Other("ray-take", address, way, count, size) as consumer:
            ray_put(queue, body, batch, size)
            consumer.run()
            produced = charged(partial(ray_put, queue, body, count, size))
            consumed = charged(consumer.run)
        found[way] = {name: produced[name] + consumed[name] for name in produced}
        queue.shutdown()
    return found


def ray_put(queue: Any, body: bytes, count: int, size: int) -> None:
    for _ in range(0, count, size):
        if size == 1:
            queue.put(body)
        else:
            queue.put_nowait_batch([body] * size)


def ray_take(address: str, way: str, count: int, size: int) -> None:
    join_ray(address)
    import ray
    from ray.util.queue import Queue

    queue = Queue.__new__(Queue)
    queue.maxsize, queue.actor = 0, ray.get_actor(f"q-{way}")

    def take(total: int) -> None:
        got = 0
        while got < total:
            items = [queue.get()] if size == 1 else queue.get_nowait_batch(size)
            if any(len(item) != BYTES for item in items):
                raise RuntimeError("ray.util.queue gave another body")
            got += len(items)

    serve(lambda: take(max(size, 64)), lambda: take(count))


# ---- two processes, and whom their CPU is charged to --------------------------------------------------------------
class Other:
    """A process of this file that runs its parts one by one, each when told."""

    def __init__(self, *words: object) -> None:
        argv = [sys.executable, __file__, *map(str, words)]
        self._process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._answer("ready")

    def run(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write("go\n")
        self._process.stdin.flush()
        self._answer("done")

    def _answer(self, wanted: str) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.strip() == f"bench {wanted}":
                return
        raise RuntimeError(f"the consumer ended with code {self._process.wait()}")

    def __enter__(self) -> Other:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()


def serve(*parts: Callable[[], None]) -> None:
    print("bench ready", flush=True)
    for part in parts:
        sys.stdin.readline()
        part()
        print("bench done", flush=True)


def charged(run: Callable[[], None]) -> dict[str, float]:
    """CPU seconds of this process and all below it, Ray's own apart."""
    before = used()
    began = time.monotonic()
    run()
    after = used()
    spent = {"work": 0.0, "daemons": 0.0, "wall": time.monotonic() - began}
    for pid, (kind, seconds) in after.items():
        spent[kind] += seconds - (before[pid][1] if pid in before else 0.0)
    return spent


def used() -> dict[int, tuple[str, float]]:
    """Process -> whose it is, and CPU seconds so far."""
    own = psutil.Process()
    found = {}
    for process in (own, *own.children(recursive=True)):
        try:
            times, words = process.cpu_times(), process.cmdline()
        except psutil.NoSuchProcess:
            continue
        # Ray renames its workers after their actors, as in "ray::TransferQueueController"
        title = words[0] if words else ""
        actor = title.startswith("ray::") and title not in AGENTS
        ours = process.pid == own.pid or __file__ in words or actor
        found[process.pid] = ("work" if ours else "daemons", float(times.user + times.system))
    return found


def main() -> None:
    what, *words = sys.argv[1:]
    ways: dict[str, Callable[..., Answer | None]] = {
        "redis-add": redis_add,
        "redis-take": redis_take,
        "transferqueue": transferqueue,
        "transferqueue-take": transferqueue_take,
        "ray": ray_queue,
        "ray-take": ray_take,
    }
    answer = ways[what](*(int(word) if word.isdecimal() else word for word in words))
    if answer is not None:
        print("bench " + json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
