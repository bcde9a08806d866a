"""A slow judge to start, kill and start again, and its diary against what the job stored."""

from __future__ import annotations

import itertools
import json
import math
import socket
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import msgspec
from waiting import wait_until

from syncline.contract.token_path import PUBLISHED, REWARDED
from syncline.runtime.trace_store import SpanRecord, spans_of

HERE = Path(__file__).parent


class SlowJudge:
    """`slow_judge.py` on a port of its own."""

    def __init__(self, folder: Path, seconds: float, slots: int) -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            self.port = int(listener.getsockname()[1])
        self.seconds, self.slots = seconds, slots
        self.diary = folder / "diary.jsonl"
        self.log = (folder / "judge.log").open("ab")
        self.down: list[tuple[float, float]] = []  # wall-clock seconds between death and being up again
        self.starts = 0
        self.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/judge"

    def start(self) -> None:
        """Until it listens."""
        self.starts += 1
        words = [self.port, self.diary, self.seconds, self.slots, self.starts]
        command = [sys.executable, str(HERE / "slow_judge.py"), *map(str, words)]
        self.process = subprocess.Popen(command, stdout=self.log, stderr=self.log)
        wait_until(lambda: len(self.lines("up")) == self.starts, 60, "the judge up")

    def die(self) -> None:
        """`kill -9` with whatever it has in hand, and a new one on the same port."""
        self.process.kill()
        self.process.wait()
        died = json.loads(self.diary.read_text().splitlines()[-1])["at"]
        self.start()
        self.down.append((died, self.lines("up")[-1]["at"]))

    def stop(self) -> None:
        self.process.kill()
        self.process.wait()
        self.log.close()

    def lines(self, what: str) -> list[dict[str, Any]]:
        text = self.diary.read_text() if self.diary.exists() else ""
        lines = [json.loads(line) for line in text.splitlines() if line.endswith("}")]
        return [line for line in lines if line["what"] == what]

    def given(self) -> dict[str, dict[float, str]]:
        """Trajectory -> each score that it was given -> the text that was judged."""
        found: dict[str, dict[float, str]] = defaultdict(dict)
        for line in self.lines("answer"):
            for one in line["rewards"]:
                found[one["trajectory"]][one["reward"]] = line["texts"][one["trajectory"]]
        return found


class Use(msgspec.Struct):
    """How the judge's slots were used while it was up and something waited for it."""

    share: float  # of the slots that the waiting responses could have filled, the part that was busy
    seconds: float  # in which something waited
    full: float  # of them those in which there was enough for every slot
    per_second: float  # responses scored in each of these
    limit: float  # had every slot been busy all the time with full requests, of which as many failed as did


def use(judge: SlowJudge, batch: int, store: Path, job: str) -> Use:
    """From the judge's diary and the trace store's account of what was published and rewarded when."""
    spans = spans_of(store, job=job, names=[PUBLISHED.name, REWARDED.name])
    edges: list[tuple[float, int, int]] = []  # moment, change in responses that wait, change in busy slots
    for span in spans:
        change = 1 if span.name == PUBLISHED.name else -1
        edges.append((span.end_ns / 1e9, change, 0))
    requests = ended(judge)
    for begin, end in requests:
        edges += [(begin, 0, 1), (end, 0, -1)]
    edges += [(moment, 0, 0) for down in judge.down for moment in down]
    edges.sort()
    answers = [(line["at"], len(line["rewards"])) for line in judge.lines("answer")]
    waiting = busy = 0
    filled = could = seconds = full = 0.0
    judged = 0
    for (moment, waits, slots), (until, _, _) in itertools.pairwise(edges):
        waiting, busy = waiting + waits, busy + slots
        room = min(judge.slots, math.ceil(waiting / batch))
        if until <= moment or any(died <= moment < up for died, up in judge.down) or until == math.inf:
            continue
        lasts = until - moment
        could += room * lasts
        filled += min(busy, room) * lasts
        seconds += lasts * bool(room)
        if room == judge.slots:
            full += lasts
            judged += sum(n for at, n in answers if moment < at <= until)
    took = [end - begin for begin, end in requests if end < math.inf]
    good = len(judge.lines("answer")) / len(took)
    limit = judge.slots * batch * good / (sum(took) / len(took))
    return Use(filled / could, seconds, full, judged / full if full else 0.0, limit)


def ended(judge: SlowJudge) -> list[tuple[float, float]]:
    """When each request began and ended: answered or not, or with the judge; infinity: not yet."""
    ends = {line["request"]: line["at"] for line in judge.lines("end")}
    deaths = [died for died, _ in judge.down]
    return [
        (
            line["at"],
            ends.get(line["request"]) or min((d for d in deaths if d >= line["at"]), default=math.inf),
        )
        for line in judge.lines("begin")
    ]


def rewarded(store: Path, job: str) -> list[SpanRecord]:
    """Each reward as it was told when it was stored."""
    return spans_of(store, job=job, names=[REWARDED.name])
