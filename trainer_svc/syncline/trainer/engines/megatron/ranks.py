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
from torch._C._distributed_c10d import HashStore, Store, TCPStore  # torch.distributed's, untyped there

from syncline.contract.job import JobSpec
from syncline.contract.sharding.grid import Grid, Rank
from syncline.trainer.engines.megatron.seat import KNOWN, Seat, release
from syncline.trainer.engines.megatron.wire import Answer, Build, Command, Leave, Told

T = TypeVar("T")
SILENT = 5.0  # seconds without a sign of life after which a rank counts as gone
BEAT = 1.0
START = 300.0  # seconds in which a rank has to be there: it imports torch, transformers and megatron-core


class RankLost(RuntimeError):
    """A rank died or kept silent. The message names it, its place in the grid, and what is known of its end."""


class RankFailed(RuntimeError):
    """A rank met an error of its own and the others did not. The message names it."""


class Group:
    """Rank 0's side: followers as processes of this machine, started here and ended with it.

    follower   command of one; address, rank, grid and deadline come behind it
    """

    follower: tuple[str, ...] = (sys.executable, "-m", "syncline.trainer.engines.megatron.follower")

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
            self._await_followers()
        self._seat = self._guarded(lambda: Seat(grid, 0, self._store, deadline))

    def _start(self, port: int) -> None:
        grid = msgspec.json.encode(self.grid).decode()
        for index in range(1, self.grid.size):
            command = [*self.follower]
            command += [f"127.0.0.1:{port}", str(index), grid, str(self.deadline)]
            # its stdin ends when this process does, however that happens
            self._followers[index] = subprocess.Popen(command, stdin=subprocess.PIPE)

    def _await_followers(self) -> None:
        """Until all ranks are there, so that the job's deadline is for what they do and not for their imports."""
        until = time.monotonic() + START
        while missing := [i for i in self._followers if not self._store.check([f"here/{i}"])]:
            ended = [i for i in missing if self._followers[i].poll() is not None]
            if ended or time.monotonic() > until:
                who = self.grid.rank((ended or missing)[0])
                self.closed = (
                    f"{who} {'ended while it started' if ended else f'has not come up in {START:g} s'}"
                )
                self.kill()
                raise RankLost(self.closed)
            time.sleep(BEAT / 20)

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
                raise KNOWN[kind](message)
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
            if self.grid.size == 1 or not (lost := self._wait_for_lost() or self._hung(error)):
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

    def _hung(self, error: RuntimeError) -> list[str]:
        """After a timeout: who lives and has not failed. Ranks that waited as rank 0 did have timed out as well."""
        if "timed out" not in str(error).lower():
            return []
        return [
            f"{self.grid.rank(index)} is alive and kept the others waiting for {self.deadline:g} s"
            for index in self._followers
            if not self._store.check([f"failed/{index}"])
        ]

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
            assert process.stdin is not None
            process.stdin.close()
        release()


_current: list[Group] = []


def group_of(grid: Grid, deadline: float) -> Group:
    """The process's group if it is of this kind; else it is closed, and a new one takes its place."""
    if _current and (_current[0].closed or (_current[0].grid, _current[0].deadline) != (grid, deadline)):
        _current.pop().close("another topology or deadline took its place")
    if not _current:
        _current.append(Group(grid, deadline))
    return _current[0]


def places(answers: Sequence[Answer], grid: Grid) -> list[tuple[Rank, Answer]]:
    """Answers with who gave them."""
    return list(zip(grid.ranks(), answers, strict=True))
