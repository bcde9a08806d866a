"""`python -m syncline.gateway.tracker JOB TRACKER`: tells one writer of each update of one job.

consumes      the job's stream of metrics, its evaluations
produces      an event file, or a run of Weights & Biases; `tracking/<tracker>.json`: how far it is
waits for     the next update, or the job's end
unblocked by  the trainer; the scheduler, which ends the job; the gateway, whose pipe on standard input closes

Whatever fails here ends this process and nothing else. The next one goes on behind the last update that was flushed;
one that was written and not noted is written again.
"""

from __future__ import annotations

import fcntl
import os
import sys
import threading
from pathlib import Path
from typing import IO, cast

import msgspec

from syncline.contract.events import TERMINAL_JOB_STATES, UpdateMetrics
from syncline.contract.job import JobSpec
from syncline.contract.streams import JOB, METRICS
from syncline.contract.tracking_spec import Tracker
from syncline.gateway.tracking_writers import Writer, evaluation_scalars, scalars_of, writer_of
from syncline.runtime.bus import Bus, unpack
from syncline.runtime.durable import write_whole
from syncline.runtime.evaluations import kept
from syncline.runtime.settings import Settings

FOLDER = "tracking"
EVERY = 1.0  # seconds between two looks
LEAVING = 20.0  # seconds that closing a writer may take once the gateway is gone
ABANDONED = 75


class Told(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """`tracking/<tracker>.json`. `cursor`: of the newest update that was told; `done`: the job ended, all is told."""

    cursor: str = ""
    update: int = 0
    evaluations: int = 0
    done: bool = False


def read_told(folder: Path, tracker: Tracker) -> Told:
    """How far `tracker` of the job in `folder` is."""
    path = folder / FOLDER / f"{tracker}.json"
    return msgspec.json.decode(path.read_bytes(), type=Told) if path.is_file() else Told()


def track(
    bus: Bus, spec: JobSpec, job: str, folder: Path, tracker: Tracker, stopping: threading.Event
) -> None:
    """Follow the job until it ended and all is told, or until told to stop."""
    told = read_told(folder, tracker)
    writer = writer_of(tracker, spec, job, folder)
    try:
        while not told.done:
            ended = (bus.hget(JOB.at(job), "state") or b"").decode() in TERMINAL_JOB_STATES
            news = _tell(bus, job, folder, told, writer)
            if ended:
                news = msgspec.structs.replace(news, done=True)
            if news != told:
                writer.flush()
                write_whole(folder / FOLDER / f"{tracker}.json", msgspec.json.encode(news))
            told = news
            if not told.done and stopping.wait(EVERY):
                return
    finally:
        writer.close()


def _tell(bus: Bus, job: str, folder: Path, told: Told, writer: Writer) -> Told:
    """Tell `writer` what is new; how far it is then."""
    start = f"({told.cursor}" if told.cursor else "-"
    for entry in bus.range(METRICS.at(job), start):
        metrics = unpack(entry, UpdateMetrics)
        writer.write(metrics.update, scalars_of(metrics), metrics.at)
        told = msgspec.structs.replace(told, cursor=entry.id, update=metrics.update)
    evaluations = kept(folder)
    for evaluation in evaluations[told.evaluations :]:
        writer.write(evaluation.version, evaluation_scalars(evaluation), evaluation.when)
    return msgspec.structs.replace(told, evaluations=len(evaluations))


def main(job: str, tracker: Tracker) -> None:
    """Raises whatever fails; who started this reads the last line."""
    settings = Settings.read(os.environ)
    folder = settings.job_dir(job)
    stopping = threading.Event()
    threading.Thread(target=_end_with_parent, args=(stopping,), daemon=True).start()
    (folder / FOLDER).mkdir(exist_ok=True)
    bus = Bus(settings.redis_url)
    spec = JobSpec.model_validate_json(bus.hget(JOB.at(job), "spec") or b"")
    with (folder / FOLDER / f"{tracker}.lock").open("w") as lock:
        if _locked(lock, stopping):
            track(bus, spec, job, folder, tracker, stopping)
    bus.close()


def _locked(lock: IO[str], stopping: threading.Event) -> bool:
    """Wait for a forerunner that a gateway before this one started. False: told to stop first."""
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if stopping.wait(EVERY):
                return False
        else:
            return True


def _end_with_parent(stopping: threading.Event) -> None:
    os.read(0, 1)
    stopping.set()
    threading.Event().wait(LEAVING)
    os._exit(ABANDONED)


if __name__ == "__main__":
    main(sys.argv[1], cast(Tracker, sys.argv[2]))
