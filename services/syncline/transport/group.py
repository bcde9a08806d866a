"""Kind `group`: a `torch.distributed` group of two, sync and one worker, for each pull; gloo carries it.

Sync serves a store for the meetings (`TCPStore`) and says in each stage order where. Each addressed worker has a thread
in sync for the order's time, so that a slow or dead worker holds nobody. The worker knocks, both make a group, and then
it asks: a line of `REQUEST` bytes, answered by a head of two numbers (status, bytes of the whole thing) and at most one
bucket of bytes. A group that breaks is made anew, and the transfer goes on at the byte where it broke.

Keys of the meeting begin with a token that the job's key gives. That hides them and does not lock: neither the store
nor gloo asks who comes, so the network between must be the job's own. What comes is hashed all the same.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import os
import socket
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec
import torch
import torch.distributed

from syncline.contract.deltas import BadIndex
from syncline.contract.version_path import BadManifest, SignedManifest, VersionId
from syncline.runtime.store import BlobStore, MissingManifest
from syncline.transport.offered import Offered
from syncline.transport.transport import Deadline, Into, NotOffered, WrongLength

_c10d: Any = torch.distributed  # torch's stubs know neither its stores nor a group's send and recv
Group = Any

_LABEL = b"syncline transfer: place of the meeting"
REQUEST = 160  # bytes of a question, padded with spaces: "FOLDER/NAME FIRST COUNT"
_FOUND, _MISSING = 1, 2
_MEET = 3.0  # seconds for one try to meet
_STALL = 10.0  # seconds for one message
_KNOCK = 0.02  # seconds between looks for a worker that knocks
_LOG = logging.getLogger("syncline.transport")


def _place(key: bytes) -> str:
    return hmac.new(key, _LABEL, hashlib.sha256).hexdigest()[:32]


def _met(place: str, knock: int, host: str, port: int, rank: int, seconds: float) -> Group:
    """The group of the `knock`th meeting at `place`. Raises `RuntimeError` if the other does not come."""
    wait = timedelta(seconds=seconds)
    # of one's own: a store that waits for one meeting answers nobody else
    store = _c10d.TCPStore(host, port, None, False, timeout=wait, wait_for_workers=False)
    options = _c10d.ProcessGroupGloo._Options()
    options._timeout = wait
    options._devices = [_c10d.ProcessGroupGloo.create_device(hostname=_address_towards(host))]
    return _c10d.ProcessGroupGloo(_c10d.PrefixStore(f"{place}/{knock}", store), rank, 2, options)


def _address_towards(host: str) -> str:
    """This machine's address on the way to `host`."""
    family, kind, _, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(address)
        return str(probe.getsockname()[0])


# ---- sync
class GroupOffering:
    """Meets the workers of each order. `timeout`: seconds that a worker has; `bucket`: bytes of one answer."""

    def __init__(self, store: BlobStore, key: bytes, host: str, timeout: float, bucket: int) -> None:
        self._offered, self._place = Offered(store), _place(key)
        self._host = socket.gethostname() if host in ("0.0.0.0", "::") else host
        self._timeout, self._bucket = timeout, bucket
        self._meetings = _c10d.TCPStore(self._host, 0, None, True, wait_for_workers=False)
        self._newest: dict[str, int] = {}  # worker -> its newest order: threads of older ones end
        self._closed = threading.Event()

    def offer(self, version: VersionId) -> None:
        """The store is looked at with each question."""

    def source(self, version: VersionId, workers: tuple[str, ...], seq: int) -> str:
        for worker in workers:
            self._newest[worker] = seq
            serving = threading.Thread(
                target=self._serve, args=(worker, seq), name=f"transfer-{worker}", daemon=True
            )
            serving.start()
        return f"tcp://{self._host}:{self._meetings.port}/{seq}"

    def retire(self) -> None:
        """The store is looked at with each question."""

    def close(self) -> None:
        self._closed.set()

    def _serve(self, worker: str, seq: int) -> None:
        """Answer one worker until it is done, its time is over or a newer order takes this one's place."""
        place = f"{self._place}/{seq}/{worker}"
        until = time.monotonic() + self._timeout
        served = 0
        while not self._closed.wait(_KNOCK) and self._newest[worker] == seq and time.monotonic() < until:
            try:
                knock = self._meetings.add(f"{place}/knocks", 0)
                if knock == served:
                    continue
                served = knock
                group = _met(place, knock, self._host, self._meetings.port, 0, _MEET)
                self._answer(group, until)
            except RuntimeError as error:
                _LOG.warning("worker %s: its group broke: %s", worker, str(error).splitlines()[0])
            else:
                return
        _LOG.info("worker %s: order %d is not waited for any longer", worker, seq)

    def _answer(self, group: Group, until: float) -> None:
        """Answer questions until an empty one. Raises `RuntimeError` if the peer is gone."""
        question = torch.zeros(REQUEST, dtype=torch.uint8)
        bucket = torch.zeros(self._bucket, dtype=torch.uint8)
        while True:
            left = timedelta(seconds=max(0.001, until - time.monotonic()))
            group.recv([question], 1, 0).wait(left)
            words = bytes(question.tolist()).decode("ascii", "replace").split()
            if not words:
                return
            status, total, count = self._found(words, bucket)
            head = torch.tensor([status, total], dtype=torch.int64)
            group.send([head], 1, 0).wait(timedelta(seconds=_STALL))
            if count:
                group.send([bucket[:count]], 1, 0).wait(timedelta(seconds=_STALL))

    def _found(self, words: list[str], bucket: torch.Tensor) -> tuple[int, int, int]:
        """Status, bytes of the whole, and how many of the asked ones lie in `bucket`."""
        view = bucket.numpy().data
        try:
            name, first, count = words[0], int(words[1]), int(words[2])
            folder, _, rest = name.partition("/")
            if folder == "blobs":
                path = self._offered.blob(rest)
                return (_MISSING, 0, 0) if path is None else _part(path, first, view[:count])
            body = self._offered.manifest(rest) if folder == "manifests" else self._offered.extra(name)
        except (ValueError, IndexError, MissingManifest, BadIndex, OSError, msgspec.MsgspecError) as error:
            _LOG.info("not offered: %s", error)
            return _MISSING, 0, 0
        if body is None:
            return _MISSING, 0, 0
        piece = body[first : first + min(count, len(view))]
        view[: len(piece)] = piece
        return _FOUND, len(body), len(piece)


def _part(path: Path, first: int, view: memoryview) -> tuple[int, int, int]:
    with path.open("rb", buffering=0) as file:
        total = os.fstat(file.fileno()).st_size
        view = view[: max(0, total - first)]
        done = 0
        while done < len(view) and (got := os.preadv(file.fileno(), [view[done:]], first + done)):
            done += got
    return _FOUND, total, done


# ---- worker
class GroupFetch:
    """See `transport.Fetch`. One group per order, made anew when it breaks."""

    kind = "group"

    def __init__(self, key: bytes, worker: str, bucket: int) -> None:
        self._place, self._worker = _place(key), worker
        self._bucket = torch.zeros(bucket, dtype=torch.uint8)
        self._view = self._bucket.numpy().data
        self._source = ""
        self._group: Group | None = None

    def seek(self, source: str) -> None:
        self.close()  # each order has a group of its own
        self._source = source

    def manifest(self, version: VersionId, until: Deadline) -> SignedManifest:
        try:
            return msgspec.json.decode(self._whole(f"manifests/{version}", until), type=SignedManifest)
        except msgspec.MsgspecError as error:
            raise BadManifest(f"what {self._source} sends is no manifest: {error}") from None

    def extra(self, name: str, until: Deadline) -> bytes:
        return self._whole(name, until)

    def blob(self, into: Into, until: Deadline) -> None:
        while into.held < into.nbytes:
            count = min(len(self._view), into.nbytes - into.held)
            total, got = self._ask(f"blobs/{into.digest}", into.held, count, until)
            if total != into.nbytes:
                raise WrongLength(
                    f"blob {into.digest}: {self._source} has {total} bytes, the manifest says {into.nbytes}"
                )
            into.write(self._view[:got])

    def interrupt(self) -> None:
        group = self._group
        if group is not None:
            group.abort()

    def done(self) -> None:
        """Let the other side end."""
        if self._group is not None:
            try:
                self._send("", timedelta(seconds=_STALL), self._group)
            except RuntimeError as error:
                _LOG.info("%s: %s", self._source, str(error).splitlines()[0])
            self._group = None

    def close(self) -> None:
        self._group = None

    # ---- one question
    def _whole(self, name: str, until: Deadline) -> bytes:
        body, total = bytearray(), 1
        while len(body) < total:
            total, got = self._ask(name, len(body), len(self._view), until)
            if got == 0 and len(body) < total:
                raise ConnectionError(f"{self._source}: sends nothing of {name}")
            body += self._view[:got]
        return bytes(body)

    def _ask(self, name: str, first: int, count: int, until: Deadline) -> tuple[int, int]:
        """(bytes of the whole, bytes that lie in the bucket). Raises `NotOffered`, `OSError`."""
        wait = timedelta(seconds=min(until.left(), _STALL))
        head = torch.zeros(2, dtype=torch.int64)
        try:
            group = self._group = self._group or self._meet(until)
            self._send(f"{name} {first} {count}", wait, group)
            group.recv([head], 0, 0).wait(wait)
            status, total = head.tolist()
            got = max(0, min(count, total - first)) if status == _FOUND else 0
            if got:
                group.recv([self._bucket[:got]], 0, 0).wait(wait)
        except RuntimeError as error:
            self._group = None
            raise ConnectionError(f"{self._source}: {str(error).splitlines()[0]}") from error
        if status != _FOUND:
            raise NotOffered(f"{name}: {self._source} does not offer it")
        return total, got

    def _send(self, text: str, wait: timedelta, group: Group) -> None:
        question = torch.tensor(list(text.encode().ljust(REQUEST)), dtype=torch.uint8)
        group.send([question], 0, 0).wait(wait)

    def _meet(self, until: Deadline) -> Group:
        url = urlsplit(self._source)
        host, port, seconds = url.hostname or "", url.port or 0, min(until.left(), _MEET)
        place = f"{self._place}/{url.path.strip('/')}/{self._worker}"
        store = _c10d.TCPStore(
            host, port, None, False, timeout=timedelta(seconds=seconds), wait_for_workers=False
        )
        return _met(place, store.add(f"{place}/knocks", 1), host, port, 1, seconds)
