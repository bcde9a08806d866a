"""The process group of one trainer: rank 0 is the trainer's own process, the others follow its commands.

A command is announced in the group's store and travels by broadcast; every rank carries it out and answers. The group
is the process's: engines of one topology share it, and another topology takes its place.

A rank that dies, or is silent for longer than the deadline, fails the command with its name (`RankLost`): its peers
see their connection close, or their collective time out, and rank 0 looks who is gone.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import TypeVar

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import (  # torch.distributed's, untyped there
    HashStore,
    PrefixStore,
    Store,
    TCPStore,
)

from syncline.contract.job import JobSpec
from syncline.contract.sharding.grid import Grid, Rank
from syncline.reference.routes import CannotReplay
from syncline.trainer.engine import EngineAsleep, NonFiniteWeights
from syncline.trainer.engines.frozen import BaseMoved
from syncline.trainer.engines.megatron.library import model_parallel_cuda_manual_seed, parallel_state
from syncline.trainer.engines.megatron.rank_model import RankModel
from syncline.trainer.engines.megatron.wire import Act, Answer, Build, Command, Leave, Told

T = TypeVar("T")
SILENT = 5.0  # seconds without a sign of life after which a rank counts as gone
BEAT = 1.0
_KNOWN: dict[str, type[Exception]] = {
    kind.__name__: kind for kind in (ValueError, EngineAsleep, NonFiniteWeights, CannotReplay, BaseMoved)
}


class RankLost(RuntimeError):
    """A rank died or kept silent. The message names it, its place in the grid, and what is known of its end."""


class RankFailed(RuntimeError):
    """A rank met an error of its own and the others did not. The message names it."""


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
            distributed_timeout_minutes=max(1, round(deadline / 60)),
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
                except tuple(_KNOWN.values()) as error:
                    return Answer(error=(type(error).__name__, str(error)))
            case Leave():
                return Answer()

    def leave(self) -> None:
        """Give the group and Megatron's own state back."""
        self._engines.clear()
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


class Group:
    """Rank 0's side: followers as processes of this machine, started here and ended with it."""

    def __init__(self, grid: Grid, deadline: float) -> None:
        self.grid, self.deadline = grid, deadline
        self.closed = ""
        self._engines = 0
        self._commands = 0
        self._dropped: list[int] = []
        self._followers: dict[int, subprocess.Popen[bytes]] = {}
        if grid.size == 1:
            self._store: Store = HashStore()
        else:
            self._store = TCPStore(
                "127.0.0.1", 0, is_master=True, timeout=timedelta(seconds=deadline), wait_for_workers=False
            )
            self._start(self._store.port)
        self._seat = self._guarded(lambda: Seat(grid, 0, self._store, deadline))

    def _start(self, port: int) -> None:
        grid = msgspec.json.encode(self.grid).decode()
        for index in range(1, self.grid.size):
            command = [sys.executable, "-m", "syncline.trainer.engines.megatron.follower"]
            command += [f"127.0.0.1:{port}", str(index), grid, str(self.deadline)]
            # its stdin ends when this process does, however that happens
            self._followers[index] = subprocess.Popen(command, stdin=subprocess.PIPE)

    def build(self, spec: JobSpec, models: Path, scratch: Path) -> int:
        """Make an engine on every rank; its number."""
        self._engines += 1
        self.run(Build(self._engines, spec.canonical(), str(models), str(scratch)))
        return self._engines

    def drop(self, engine: int) -> None:
        """Nobody holds `engine` any more: ranks forget it with the next command. Safe in a finaliser."""
        self._dropped.append(engine)

    def run(self, command: Command) -> list[Answer]:
        """Every rank's answer by rank. Raises what the ranks refused, `RankFailed` or `RankLost`."""
        if self.closed:
            raise RankLost(f"the ranks of {self.grid} are gone: {self.closed}")
        dropped, self._dropped = tuple(self._dropped), []
        told = Told(command, dropped)
        answers = self._guarded(lambda: self._carried_out(told))
        refused = [(i, a.error) for i, a in enumerate(answers) if a.error is not None]
        if refused:
            index, (kind, message) = refused[0]
            if index == 0 or len(refused) == len(answers):
                raise _KNOWN[kind](message)
            raise RankFailed(f"{self.grid.rank(index)}: {kind}: {message}")
        return answers

    def _carried_out(self, told: Told) -> list[Answer]:
        data = msgspec.msgpack.encode(told)
        if self.grid.size > 1:
            self._store.set(f"command/{self._commands}", "")
            self._commands += 1
        self._seat.share(data)
        mine = msgspec.msgpack.encode(self._seat.do(told))
        return [msgspec.msgpack.decode(raw, type=Answer) for raw in self._seat.collect(mine)]

    def _guarded(self, do: Callable[[], T]) -> T:
        """`do`, with a failed collective told as who is gone."""
        try:
            return do()
        except RuntimeError as error:  # all that torch.distributed raises is one
            if self.grid.size == 1 or not (lost := self._wait_for_lost()):
                raise
            self.closed = "; ".join(lost)
            self.kill()
            raise RankLost(f"{self.closed} ({str(error).splitlines()[0]})") from error

    def _wait_for_lost(self) -> list[str]:
        until = time.monotonic() + 2 * SILENT
        while time.monotonic() < until:
            if lost := self._lost():
                return lost
            time.sleep(BEAT / 10)
        return []

    def _lost(self) -> list[str]:
        """Who is gone. A rank that ended because another did says so, and is named only if nobody else is."""
        gone: list[str] = []
        followed: list[str] = []
        now = time.time()
        for index, process in self._followers.items():
            place = self.grid.rank(index)
            code = process.poll()
            if self._store.check([f"failed/{index}"]):
                followed.append(f"{place} failed: {self._store.get(f'failed/{index}').decode()}")
            elif code is not None:
                gone.append(f"{place} is dead: it ended with {code}")
            elif self._store.check([f"beat/{index}"]):
                silence = now - float(self._store.get(f"beat/{index}"))
                if silence > SILENT:
                    gone.append(f"{place} is silent for {silence:.0f} s")
        return gone or followed

    def close(self, why: str = "closed") -> None:
        """End the followers, in order if they still listen."""
        if self.closed:
            return
        self.run(Leave())
        self.closed = why
        self._seat.leave()
        for process in self._followers.values():
            process.wait(self.deadline)

    def kill(self) -> None:
        """End the followers whatever they do."""
        for process in self._followers.values():
            process.kill()
            process.wait()
        dist.destroy_process_group()


_current: list[Group] = []


def group_of(grid: Grid, deadline: float) -> Group:
    """The process's group if it has this topology; else it is closed, and a new one takes its place."""
    if _current and (_current[0].closed or _current[0].grid != grid):
        _current.pop().close("another topology took its place")
    if not _current:
        _current.append(Group(grid, deadline))
    return _current[0]


def places(answers: Sequence[Answer], grid: Grid) -> list[tuple[Rank, Answer]]:
    """Answers with who gave them."""
    return list(zip(grid.ranks(), answers, strict=True))
