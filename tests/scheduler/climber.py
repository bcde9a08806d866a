"""A stand-in for the process that climbs as a gate: `python climber.py JOB NUMBER`. The spec's name says what it does.

`holds`, `fails`, `breaks`: so it ends once a file `go` lies in its folder; `dies`: at once, each time.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time

import msgspec

from syncline.contract.validation import (
    REPORT,
    Check,
    Level,
    Report,
    Result,
    ValidationProgress,
)
from syncline.runtime import validations
from syncline.runtime.settings import Settings

GO = "go"


def main(job: str, number: int) -> None:
    folder = Settings.read(os.environ).job_dir(job)
    with validations.climbing(folder, number) as place:
        assert place is not None
        request = validations.request_of(folder, number)
        assert request is not None
        does = json.loads(request.spec)["name"]
        if does == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        done = tuple(result(level, True) for level in request.levels[:-1])
        validations.note(place, ValidationProgress(results=done, now=request.levels[-1]))
        while not (place / GO).exists():
            time.sleep(0.02)
        if does == "breaks":
            validations.broken(place, "there is no such model")
            return
        results = (*done, result(request.levels[-1], does == "holds"))
        report = Report(recipe="bf16", model="none", contract="c", seed=0, results=results)
        (place / REPORT).write_bytes(msgspec.json.encode(report))


def result(level: Level, holds: bool) -> Result:
    check = Check(name="a figure", found=0.5 if holds else 2.0, bound=1.0, source="a test", where="layer 1")
    return Result(level=level, checks=(check,), seconds=0.1)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
