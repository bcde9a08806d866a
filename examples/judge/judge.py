"""A judge to copy: the protocol of docs/judges.md around one function. Put your reward model into `score`.

    python examples/judge/judge.py --port 8900 --slots 4

and in the job:

    [reward]
    source = "http"
    url = "http://127.0.0.1:8900/judge"
    batch = 8          # responses in one request
    parallel = 4       # requests at a time: not more than the judge has slots
    timeout = 30.0     # seconds for one request
    budget = 240.0     # seconds in which a response must be judged
"""

from __future__ import annotations

import argparse
import asyncio
from typing import Any

import uvicorn
from fastapi import FastAPI, HTTPException
from pydantic import BaseModel

VERSION = "vowels/1"  # recorded with every reward: change it when what `score` says of a response changes


class Response(BaseModel):
    """One response to judge."""

    trajectory: str  # comes back with its reward
    prompt: str | list[dict[str, str]]  # text, or the messages of a chat
    response: str
    meta: dict[str, Any]  # what the task says of the prompt: often the right answer


class Asked(BaseModel):
    """A request."""

    responses: list[Response]


class Rewarded(BaseModel):
    """One response's reward. None: it cannot be told, which is not the same as 0."""

    trajectory: str
    reward: float | None


class Answer(BaseModel):
    """An answer: in any order, each trajectory once."""

    rewards: list[Rewarded]
    judge: str = VERSION


def score(responses: list[Response]) -> list[float | None]:
    """The rewards of a batch, in its order. Here: the share of vowels; nothing can be said of an empty response."""
    texts = [one.response.lower() for one in responses]
    return [sum(letter in "aeiou" for letter in text) / len(text) if text else None for text in texts]


def app(slots: int) -> FastAPI:
    """A judge that works on `slots` requests at a time and asks all others to come back."""
    judge, busy = FastAPI(title="judge"), asyncio.Semaphore(slots)

    @judge.post("/judge")
    async def answer(asked: Asked) -> Answer:
        if busy.locked():  # said at once, rather than let them wait into their timeout
            raise HTTPException(429, "all slots are taken", {"retry-after": "1"})
        async with busy:
            rewards = await asyncio.to_thread(score, asked.responses)
        pairs = zip(asked.responses, rewards, strict=True)
        return Answer(rewards=[Rewarded(trajectory=one.trajectory, reward=reward) for one, reward in pairs])

    return judge


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="An example of a judge.")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8900)
    parser.add_argument("--slots", type=int, default=4, help="requests that are worked on at a time")
    told = parser.parse_args()
    uvicorn.run(app(told.slots), host=told.host, port=told.port, log_level="warning")
