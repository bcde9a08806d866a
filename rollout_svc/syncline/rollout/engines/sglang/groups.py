"""Weights by broadcast: a `torch.distributed` group of this process, which sends, and the server's ranks.

gloo, as both ends run on CPU. Only whom the server lets in over HTTP, with its key, can start a broadcast, and the
meeting is on the loopback address under a name that was drawn for it. The server waits in its scheduler for what was
announced: a sender that stops half-way leaves a server that answers nobody, so a group that broke is never used again.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed
from torch import Tensor

from syncline.rollout.engine import StageFailed
from syncline.rollout.engines.sglang.client import Refused, Server, ServerGone

_c10d: Any = torch.distributed  # torch's stubs know neither its stores nor a group's broadcast
HOST = "127.0.0.1"
MEET, SEND = 60.0, 300.0  # seconds for the ranks to meet, and for one bucket


class WeightGroup:
    """A group with `server`, whose weights lie on `ranks` ranks. Raises `Refused`, `ServerGone`, `StageFailed`."""

    def __init__(self, server: Server, ranks: int) -> None:
        self.url = server.url
        self._server = server
        self._name = secrets.token_hex(16)
        world, wait = ranks + 1, timedelta(seconds=MEET)
        self._store = _c10d.TCPStore(HOST, 0, world, True, timeout=wait, wait_for_workers=False)

        def meet() -> Any:
            # the names that `init_process_group` on the other side puts before each key
            store = self._store
            for prefix in (self._name, f"{self._name}/", "cpu/"):
                store = _c10d.PrefixStore(prefix, store)
            options = _c10d.ProcessGroupGloo._Options()
            options._timeout = wait
            options._devices = [_c10d.ProcessGroupGloo.create_device(hostname=HOST)]
            return _c10d.ProcessGroupGloo(store, 0, world, options)

        body = {
            "master_address": HOST,
            "master_port": self._store.port,
            "rank_offset": 1,
            "world_size": world,
        }
        self._group = self._both(lambda: server.init_group(self._name, body), meet)

    def send(self, tensors: Mapping[str, Tensor], label: str, *, flush: bool) -> None:
        """Broadcast one bucket inside a session. Raises as the class, and is of no more use then."""
        flat = flattened(tensors)
        body = {
            "names": list(tensors),
            "dtypes": [str(tensor.dtype).removeprefix("torch.") for tensor in tensors.values()],
            "shapes": [list(tensor.shape) for tensor in tensors.values()],
            "load_format": "flattened_bucket",
            "weight_version": label,
            "flush_cache": flush,
        }

        def broadcast() -> None:
            options = _c10d.BroadcastOptions()
            options.rootRank, options.rootTensor = 0, 0
            self._group.broadcast([flat], options).wait(timedelta(seconds=SEND))

        self._both(lambda: self._server.load_broadcast(self._name, body), broadcast)

    def close(self) -> None:
        """Leave it. The server forgets its side where it can still be asked."""
        try:
            self._server.destroy_group(self._name)
        except (Refused, ServerGone):
            return  # it is gone, or has no such group: nothing is left to forget

    def _both(self, ask: Callable[[], None], act: Callable[[], Any]) -> Any:
        """Ask the server and act here at the same time. What the server says comes first."""
        said: list[Exception] = []

        def asked() -> None:
            try:
                ask()
            except (Refused, ServerGone) as error:
                said.append(error)

        asking = threading.Thread(target=asked, name="sglang-group", daemon=True)
        asking.start()
        try:
            found = act()
        except RuntimeError as error:
            asking.join(1.0)
            raise said[0] if said else StageFailed(f"weight group: {str(error).splitlines()[0]}") from None
        asking.join()
        if said:
            raise said[0]
        return found


def aligned(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Wide elements first: each then begins at a multiple of its own size, which the server asks for."""
    return dict(sorted(tensors.items(), key=lambda item: -item[1].dtype.itemsize))


def flattened(tensors: Mapping[str, Tensor]) -> Tensor:
    """The bytes of all tensors, one after another: uint8 [bytes]."""
    return torch.cat([tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in tensors.values()])
