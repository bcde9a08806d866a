"""A judge as a process: slow, with few slots, failing now and then, and with a diary of all it did.

    python slow_judge.py PORT DIARY SECONDS SLOTS SEED

Each response gets a random score each time it is asked for, so that a score can be told from every other. Of the
requests, one in twenty fails with 500, one in twenty hangs until the other side gives up; and some trajectories
(`poison`) always fail.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse


def poison(trajectory: str) -> bool:
    """One trajectory in thirty-two: it makes the judge fail whenever it is asked about it."""
    _, group, index = trajectory.split("-")
    return (4 * int(group) + int(index)) % 32 == 5


class Diary:
    """Lines of JSON, each flushed before the judge goes on: a killed judge has told all it did."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("a")

    def write(self, **line: Any) -> None:
        self._file.write(json.dumps({"at": time.time(), **line}) + "\n")
        self._file.flush()


def app(diary: Diary, seconds: float, slots: int, dice: random.Random) -> FastAPI:
    free = asyncio.Semaphore(slots)

    @contextlib.asynccontextmanager
    async def up(_: FastAPI) -> AsyncIterator[None]:
        diary.write(what="up")
        yield

    judge = FastAPI(lifespan=up)

    @judge.post("/judge")
    async def answer(request: Request) -> Response:
        asked = (await request.json())["responses"]
        names = [one["trajectory"] for one in asked]
        async with free:
            number = dice.random()
            diary.write(what="begin", request=number, names=names)
            try:
                fate = dice.random()
                if any(map(poison, names)):
                    fate = 0.0
                if fate >= 0.95:
                    diary.write(what="hang", request=number)
                    while not await request.is_disconnected():
                        await asyncio.sleep(0.05)
                    return Response(status_code=500)
                await asyncio.sleep(seconds)
                if fate < 0.05:
                    diary.write(what="500", request=number)
                    return Response(status_code=500)
                rewards = [{"trajectory": name, "reward": dice.random()} for name in names]
                dice.shuffle(rewards)  # the order says nothing
                texts = {one["trajectory"]: one["response"] for one in asked}
                diary.write(what="answer", request=number, rewards=rewards, texts=texts)
                return JSONResponse({"rewards": rewards, "judge": "slow/1"})
            finally:
                diary.write(what="end", request=number)

    return judge


def main(port: str, diary: str, seconds: str, slots: str, seed: str) -> None:
    judge = app(Diary(Path(diary)), float(seconds), int(slots), random.Random(int(seed)))
    uvicorn.run(judge, port=int(port), log_level="warning")


if __name__ == "__main__":
    main(*sys.argv[1:])
