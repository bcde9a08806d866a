"""What a tracker writes to: a TensorBoard event file, or a run of Weights & Biases. Scalars by name, once per update.

Both libraries are extras and are imported when a job asks for them. Neither catches an error: who runs a writer is a
process of its own, whose end is noticed.
"""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any, Protocol

import msgspec

from syncline.contract.evaluation import Evaluation
from syncline.contract.events import UpdateMetrics
from syncline.contract.job import JobSpec
from syncline.contract.tracking_spec import Tracker

EXTRAS: dict[Tracker, str] = {"tensorboard": "tensorboardX", "wandb": "wandb"}
"""Module that a tracker needs; the extra has the tracker's name."""
KEY = "WANDB_API_KEY"


class Writer(Protocol):
    """Where scalars go. `step`: the update, or of an evaluation the version's number."""

    def write(self, step: int, scalars: dict[str, float], at: float) -> None:
        """Scalars by name at `step`; `at`: wall-clock unix seconds."""
        ...

    def flush(self) -> None:
        """What was written is with the library's own files when this returns."""
        ...

    def close(self) -> None: ...


def writer_of(tracker: Tracker, spec: JobSpec, job: str, folder: Path) -> Writer:
    """The writer of `job`, whose folder is `folder`. Raises `ValueError` for a missing key."""
    match tracker:
        case "tensorboard":
            return TensorBoard(folder / "tensorboard")
        case "wandb":
            return Wandb(spec, job, folder / "tracking")


class TensorBoard:
    """One more event file in `folder`. Written at once, so that a full disk is an error and not a silent thread's."""

    def __init__(self, folder: Path) -> None:
        from tensorboardX.event_file_writer import EventsWriter

        folder.mkdir(exist_ok=True)
        # the library's names have seconds in them: two processes in one second would share a file
        self._events = EventsWriter(str(folder / "events"), f".{os.getpid()}")

    def write(self, step: int, scalars: dict[str, float], at: float) -> None:
        from tensorboardX.proto.event_pb2 import Event
        from tensorboardX.summary import scalar

        for name, value in scalars.items():
            self._events.write_event(Event(wall_time=at, step=step, summary=scalar(name, value)))

    def flush(self) -> None:
        self._events.flush()

    def close(self) -> None:
        self._events.close()


class Wandb:
    """The run whose id is the job's: a tracker that starts again goes on with it."""

    def __init__(self, spec: JobSpec, job: str, folder: Path) -> None:
        told = spec.tracking.wandb
        assert told is not None
        offline = told.mode == "offline" or os.environ.get("WANDB_MODE") in ("offline", "disabled")
        if not offline and KEY not in os.environ:
            raise ValueError(
                f"{KEY} is not set in the gateway's environment; or say tracking.wandb.mode = 'offline'"
            )
        import wandb  # takes seconds

        self._run: Any = wandb.init(
            project=told.project,
            entity=told.entity,
            id=job,
            name=spec.name,
            tags=list(told.tags),
            config=spec.model_dump(mode="json"),
            dir=str(folder),
            mode="offline" if told.mode == "offline" else None,
            resume="allow",
            # of the machine and its packages nothing is told: the spec says what a run is
            settings=wandb.Settings(
                console="off",
                disable_git=True,
                disable_code=True,
                x_disable_stats=True,
                x_disable_meta=True,
                x_save_requirements=False,
                silent=True,
            ),
        )
        # wandb's own step may never fall, and a resumed trainer repeats updates
        self._run.define_metric("update")
        self._run.define_metric("*", step_metric="update")

    def write(self, step: int, scalars: dict[str, float], at: float) -> None:
        self._run.log({**scalars, "update": step, "at": at})

    def flush(self) -> None:
        """The library takes what it was given to its own process, and says nothing of when it is on disk."""

    def close(self) -> None:
        self._run.finish()


# ---- what is told of an update --------------------------------------------------------------------------------
def scalars_of(metrics: UpdateMetrics) -> dict[str, float]:
    """The numbers of an update, by name. What was not measured has no scalar."""
    found = {}
    for name, value in msgspec.structs.asdict(metrics).items():
        if name not in ("update", "at") and isinstance(value, int | float):
            found[f"train/{name}"] = float(value)
    for layer, share in enumerate(metrics.route_agreement or ()):
        found[f"routes/agreement_{layer}"] = share
    return found


def evaluation_scalars(told: Evaluation) -> dict[str, float]:
    """The numbers of an evaluation, by name; its interval beside each."""
    found = {
        "eval/counted": float(told.counted),
        "eval/unscored": float(told.unscored),
        "eval/lost": float(told.lost),
        "eval/foreign": float(told.foreign),
    }
    if told.mean_reward is not None:
        found["eval/mean_reward"] = told.mean_reward
    for k, passed in told.pass_at.items():
        if passed is not None:
            for name, value in zip(("", "_low", "_high"), passed, strict=True):
                found[f"eval/pass_at_{k}{name}"] = value
    return {name: value for name, value in found.items() if math.isfinite(value)}
