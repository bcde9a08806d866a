"""A taskset of the `verifiers` library with one tool."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import verifiers.v1 as vf

__all__ = ["ToyTaskset"]


class ToyData(vf.TaskData):  # type: ignore[misc]
    answer: str


class Adder(vf.Toolset):  # type: ignore[misc]
    @vf.tool  # type: ignore[untyped-decorator]
    def add(self, a: int, b: int) -> str:
        """The sum."""
        return str(a + b)


class ToyTask(vf.Task[ToyData]):  # type: ignore[misc]
    @classmethod
    def toolsets(cls, config: Any) -> list[Any]:
        return [Adder(vf.ToolsetConfig())]

    @vf.reward(weight=1.0)  # type: ignore[untyped-decorator]
    async def right(self, trace: Any) -> float:
        return float(self.data.answer in trace.last_reply)


class ToyTaskset(vf.Taskset[ToyTask]):  # type: ignore[misc]
    def load(self) -> Iterator[ToyTask]:
        for i in range(20):
            yield ToyTask(ToyData(prompt=f"{i}+1=", answer=str(i + 1)))
