"""One rank's place in the process group: what every rank has, rank 0 as well."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, Store  # torch.distributed's, untyped there

from syncline.contract.job import JobSpec
from syncline.contract.sharding.grid import Grid
from syncline.reference.routes import CannotReplay
from syncline.trainer.engine import EngineAsleep, NonFiniteWeights
from syncline.trainer.engines.frozen import BaseMoved
from syncline.trainer.engines.megatron.library import model_parallel_cuda_manual_seed, parallel_state
from syncline.trainer.engines.megatron.rank_model import RankModel
from syncline.trainer.engines.megatron.wire import Act, Answer, Build, Leave, Told

KNOWN: dict[str, type[Exception]] = {
    kind.__name__: kind for kind in (EngineAsleep, NonFiniteWeights, CannotReplay, BaseMoved, ValueError)
}
"""Refusals that travel in an answer, and are raised again by rank 0; the first that fits."""


def release() -> None:
    """Give the process group and Megatron's own state back, as far as there are any."""
    parallel_state.destroy_model_parallel()
    if dist.is_initialized():
        dist.destroy_process_group()


class Seat:
    """One rank's place in the group: collectives, subgroups, engines by number. The same on every rank."""

    def __init__(self, grid: Grid, index: int, store: Store, deadline: float) -> None:
        self.grid, self.rank = grid, grid.rank(index)
        self.store = store
        timeout = timedelta(seconds=deadline)
        cuda = torch.cuda.is_available()
        if cuda:
            torch.cuda.set_device(index % torch.cuda.device_count())
        dist.init_process_group(
            "nccl" if cuda else "gloo",
            rank=index,
            world_size=grid.size,
            store=PrefixStore("group", store),
            timeout=timeout,
        )
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=grid.tp,
            pipeline_model_parallel_size=grid.pp,
            expert_model_parallel_size=grid.ep,
            expert_tensor_parallel_size=grid.etp,
            distributed_timeout_minutes=deadline / 60,  # passed on to a timedelta, which takes fractions
        )
        model_parallel_cuda_manual_seed(1, inference_rng_tracker=True)
        self._timeout = timeout
        self._control = dist.new_group(backend="gloo", timeout=timeout)
        self._subgroups: dict[tuple[int, ...], dist.ProcessGroup] = {}
        self._engines: dict[int, RankModel] = {}

    def subgroup(self, ranks: tuple[int, ...]) -> dist.ProcessGroup:
        """The group of `ranks`. All ranks ask for the same ones in the same order."""
        if ranks not in self._subgroups:
            group = dist.new_group(list(ranks), timeout=self._timeout)
            assert group is not None
            self._subgroups[ranks] = group
        return self._subgroups[ranks]

    def share(self, command: bytes | None) -> bytes:
        """Rank 0's bytes, on every rank."""
        if self.grid.size == 1:
            assert command is not None
            return command
        size = torch.tensor([len(command or b"")])
        dist.broadcast(size, src=0, group=self._control)
        data = torch.zeros(int(size), dtype=torch.uint8)
        if command is not None:
            data = torch.frombuffer(bytearray(command), dtype=torch.uint8)
        dist.broadcast(data, src=0, group=self._control)
        return data.numpy().tobytes()

    def collect(self, answer: bytes) -> list[bytes]:
        """Every rank's bytes by rank, on rank 0; empty elsewhere."""
        if self.grid.size == 1:
            return [answer]
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.grid.size)]
        dist.all_gather(sizes, torch.tensor([len(answer)]), group=self._control)
        longest = max(int(size) for size in sizes)
        mine = torch.zeros(longest, dtype=torch.uint8)
        mine[: len(answer)] = torch.frombuffer(bytearray(answer), dtype=torch.uint8)
        first = self.rank.index == 0
        every: list[Tensor] | None = [torch.zeros_like(mine) for _ in sizes] if first else None
        dist.gather(mine, every, dst=0, group=self._control)
        return [t[: int(n)].numpy().tobytes() for t, n in zip(every or [], sizes, strict=False)]

    def do(self, told: Told) -> Answer:
        """Carry a command out here. A refusal is an answer too."""
        for number in told.dropped:
            self._engines.pop(number, None)
        match told.command:
            case Build() as build:
                spec = JobSpec.model_validate_json(build.spec)
                self._engines[build.engine] = RankModel(
                    spec, Path(build.models), Path(build.scratch), self.rank, self.subgroup
                )
                return Answer()
            case Act() as act:
                try:
                    return self._engines[act.engine].do(act)
                except tuple(KNOWN.values()) as error:
                    name = next(name for name, kind in KNOWN.items() if isinstance(error, kind))
                    return Answer(error=(name, str(error)))
            case Leave():
                return Answer()

    def leave(self) -> None:
        """Give the group and Megatron's own state back."""
        self._engines.clear()
        release()
