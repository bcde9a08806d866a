"""Kind `group` with real processes: a dead or silent side ends by the deadline and holds nobody else."""

from __future__ import annotations

import logging
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest
from transport_rig import KEY, TOTAL, Rig, same
from waiting import wait_until

from syncline.transport.transport import Superseded, Unreachable

PEER = """
import pathlib, sys, msgspec
from syncline.contract.version_path import SyncOrder
from syncline.transport.group import GroupFetch
from syncline.transport.incoming import Incoming
from syncline.transport.puller import Puller
write = Incoming.write
def dies(into, data):
    write(into, data)
    if into.held > 500_000:
        print("half", flush=True)
        sys.stdin.read()
Incoming.write = dies
order = msgspec.json.decode(sys.argv[2], type=SyncOrder)
key = bytes.fromhex(sys.argv[3])
worker = Puller(GroupFetch(key, "w1", 1 << 18), pathlib.Path(sys.argv[1]), key, "w1", 20.0)
worker.pull(order, None)
"""


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Rig]:
    made = Rig(tmp_path, "group")
    yield made
    made.close()


def test_a_worker_killed_half_way_holds_nobody(pair: Rig, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "syncline.transport")
    manifest = pair.publish(0)
    (pair.folder / "w1").mkdir()
    order = msgspec.json.encode(pair.order(manifest, "w1")).decode()
    process = subprocess.Popen(
        [sys.executable, "-c", PEER, str(pair.folder / "w1"), order, KEY.hex()],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    with process.stdin, process.stdout:
        assert process.stdout.readline() == b"half\n"
        pair.pull(pair.puller(), manifest)  # while w1 stands still
        process.kill()
        process.wait()
    wait_until(lambda: "worker w1: its group broke" in caplog.text, 15, "sync tells who is gone")
    again = pair.puller("w1")
    signed, pulled = again.pull(pair.order(manifest, "w1"), None)
    same(again, signed, manifest)
    assert pulled.resumed > 500_000
    assert pulled.resumed + pulled.full + pulled.held == TOTAL


def test_a_worker_that_nobody_meets_ends_by_its_deadline(pair: Rig) -> None:
    manifest = pair.publish(0)
    worker = pair.puller("w9", timeout=1.0)
    order = pair.order(manifest, "w0")  # sync waits for w0 alone
    began = time.monotonic()
    with pytest.raises(Unreachable, match=r"worker w9: version 0\.0: manifest: not within 1 s"):
        worker.pull(order, None)
    assert time.monotonic() - began < 5
    pair.pull(pair.puller(), manifest)


def test_a_newer_order_is_not_held_up_by_a_meeting(pair: Rig) -> None:
    manifest = pair.publish(0)
    worker = pair.puller("w9")
    order = pair.order(manifest, "w0")
    with ThreadPoolExecutor(1) as pool:
        pull = pool.submit(worker.pull, order, None)
        began = time.monotonic()
        worker.supersede(order.seq + 1)
        with pytest.raises(Superseded):
            pull.result(20)
        assert time.monotonic() - began < 6


def test_sync_ends_its_side_when_its_time_is_over(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "syncline.transport")
    rig = Rig(tmp_path, "group", timeout=0.5)
    rig.order(rig.publish(0), "w3")
    wait_until(lambda: "worker w3: order 1 is not waited for any longer" in caplog.text, 5, "its thread ends")
    rig.close()
