"""An SGLang engine with a local server of its own, as a job's spec asks for it."""

from __future__ import annotations

from pathlib import Path

from syncline.contract.job import JobSpec
from syncline.rollout.engine import CommitPolicy
from syncline.rollout.engines.sglang.engine import SGLangEngine
from syncline.rollout.engines.sglang.launch import ServerProcess
from syncline.rollout.engines.sglang.loader import Loader
from syncline.rollout.engines.sglang.model import Model


def local_engine(
    spec: JobSpec, models: Path, python: Path, folder: Path, job: str, key: bytes, policy: CommitPolicy
) -> SGLangEngine:
    """The engine of one worker; `folder` is that worker's own. Raises `ValueError` naming what cannot run so."""
    hardware, most = spec.device.hardware, spec.rollout.max_running
    model = Model(models, spec.model, spec.contract(), hardware, most, spec.rollout.sglang.tp)
    place = folder / "sglang"
    process = ServerProcess(python, model.launch, model.start_folder(place / "model"), place / "server.log")
    loader = Loader(
        model.expected, model.config, model.launch, place / "versions", spec.rollout.sglang.update
    )
    engine = SGLangEngine(model, job, key, process, loader, most, policy)
    if not model.launch.saves_memory:
        process.start()  # while the trainer mints its first version; nothing lends this memory
    return engine
