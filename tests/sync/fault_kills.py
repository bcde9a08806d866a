"""Faults of what the parts run on: the disk, and processes that are killed at a place."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

from fault_stack import SECONDS, Stack
from waiting import wait_until

from syncline.contract.version_path import VersionId

WORKER_PLACES = ("a tensor written, others not", "verified", "told to commit", "serves it, has not said so")
SYNC_PLACES = (
    "minted",
    "a blob written, others not",
    "all blobs written, no manifest",
    "manifest written, nobody told",
    "told to stage",
    "one worker verified",
    "told to commit",
    "active",
)

Injection = Callable[[Stack], AbstractContextManager[None]]


@contextmanager
def disk_full(stack: Stack) -> Iterator[None]:
    """Room for half a version is left."""
    store = stack.run / "store"
    used = sum(path.stat().st_size for path in (store / "blobs").iterdir())
    filler = store / "filler"
    free = _free(stack)
    half = used // 2 // stack.spec.retention.versions // 4096 * 4096
    filler.write_bytes(bytes(free - half))
    stack.mint()
    yield
    wait_until(lambda: _free(stack) >= half, SECONDS, "what was written of the failed version is deleted")
    assert not list((store / "blobs").glob("*.tmp"))
    filler.unlink()


def _free(stack: Stack) -> int:
    facts = os.statvfs(stack.run / "store")
    return facts.f_bavail * facts.f_bsize


def worker_killed(name: str, place: str) -> Injection:
    @contextmanager
    def inject(stack: Stack) -> Iterator[None]:
        stack.hold_process(name, place)
        if place == "verified":  # one of the others has not: nothing is committed before the kill
            with stack.held_before_stage("w0") as held:
                version = stack.mint()
                held()
                stack.held_process(name)
                assert _verified(stack, version, name)
                stack.kill(name)
        else:
            stack.mint()
            stack.held_process(name)
            stack.kill(name)
        yield

    return inject


def _verified(stack: Stack, version: VersionId, name: str) -> bool:
    def seen() -> bool:
        record = stack.record(version)
        path = None if record is None else record.workers.get(name)
        return path is not None and path.verified is not None

    return wait_until(seen, SECONDS, f"{name} verified {version}")


@contextmanager
def sync_killed_over_garbage(stack: Stack) -> Iterator[None]:
    """The manifest that the dead process wrote is no JSON when the next one looks."""
    stack.hold_process("sync", "manifest written, nobody told")
    version = stack.mint()
    stack.held_process("sync")
    stack.kill_sync()
    path = stack.run / "store" / "manifests" / f"{version}.json"
    path.chmod(0o644)
    path.write_bytes(b"{")
    stack.start_sync()
    yield


def sync_killed(place: str) -> Injection:
    @contextmanager
    def inject(stack: Stack) -> Iterator[None]:
        match place:
            case "told to stage":
                with stack.held_before_stage(*stack.kind.workers) as held:
                    stack.mint()
                    held()
                    stack.kill_sync()
            case "one worker verified":
                with stack.held_before_stage("w1") as held:
                    version = stack.mint()
                    held()
                    _verified(stack, version, "w0")
                    stack.kill_sync()
            case "told to commit":
                with stack.deaf_to_commits():
                    version = stack.mint()
                    told = lambda: any(o.order == "commit" and o.version == version for o in stack.orders())  # noqa: E731
                    wait_until(told, SECONDS, "an order to commit")
                    stack.kill_sync()
            case "active":
                stack.settle(stack.mint())
                stack.kill_sync()
            case _:
                stack.hold_process("sync", place)
                stack.mint()
                stack.held_process("sync")
                stack.kill_sync()
        stack.start_sync()
        yield

    return inject
