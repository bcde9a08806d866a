"""Which rollout engine a climb looks at: the one of this process, or SGLang servers of the ladder's own over HTTP."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Literal, Protocol

from syncline.contract.job import JobSpec
from syncline.contract.version_path import VersionManifest
from syncline.lab.ladder.records import Level
from syncline.lab.pair import DRAIN, JOB, KEY, reference_engine
from syncline.rollout.engine import RolloutEngine
from syncline.rollout.engines.reference import ReferenceEngine
from syncline.rollout.engines.sglang.engine import SGLangEngine
from syncline.rollout.engines.sglang.local import local_engine
from syncline.rollout.engines.sglang.model import Model
from syncline.runtime.settings import Settings
from syncline.runtime.store import BlobStore

Engine = Literal["reference", "sglang"]
ENGINES: tuple[Engine, ...] = ("reference", "sglang")


class Rollouts(Protocol):
    """Makes the engines of a climb and looks into them.

    name          of the engine
    without       level -> why this engine has nothing to compare there
    running       why requests cannot be followed through a commit; "": they can
    shows_state   whether what a request keeps can be read
    """

    name: Engine
    shows_state: bool
    without: Mapping[Level, str]
    running: str

    def refuses(self, spec: JobSpec, models: Path) -> list[str]:
        """What the contract says and the engine does not do on this machine."""
        ...

    def warm(self, spec: JobSpec, models: Path) -> RolloutEngine:
        """The engine that takes every version of the climb in turn."""
        ...

    def cold(self, spec: JobSpec, models: Path) -> RolloutEngine:
        """An engine that has held no version of the climb."""
        ...

    def unlike(self, engine: RolloutEngine, manifest: VersionManifest, store: BlobStore) -> list[str]:
        """Tensors that `engine` holds otherwise than `manifest` says, read from where its forward pass reads them."""
        ...

    def close(self) -> None:
        """The climb has ended."""
        ...


class InProcess:
    """The reference engine: everything of it can be looked at."""

    name: Engine = "reference"
    shows_state = True
    without: Mapping[Level, str] = MappingProxyType({})
    running = ""

    def refuses(self, spec: JobSpec, models: Path) -> list[str]:
        """Nothing: it multiplies as the contract says."""
        return []

    def warm(self, spec: JobSpec, models: Path) -> RolloutEngine:
        """See `Rollouts`."""
        return reference_engine(spec, models)

    def cold(self, spec: JobSpec, models: Path) -> RolloutEngine:
        """See `Rollouts`."""
        return reference_engine(spec, models)

    def unlike(self, engine: RolloutEngine, manifest: VersionManifest, store: BlobStore) -> list[str]:
        """By the digests of what was copied into the active buffer."""
        assert isinstance(engine, ReferenceEngine), "made here"
        active = engine._active()
        held = {} if active is None else active.contents
        names = {entry.name: entry.digest for entry in manifest.tensors}
        return [name for name in sorted(names) if held.get(name) != names[name]]

    def close(self) -> None:
        """Nothing runs outside this process."""


class Servers:
    """SGLang, spoken to over HTTP. Call `close` when the climb has ended.

    python   interpreter of SGLang's own environment
    folder   for checkpoints and logs
    """

    name: Engine = "sglang"
    shows_state = False
    without: Mapping[Level, str] = MappingProxyType(
        {
            3: "its operators run in the server's process, and show from level 4 on",
            8: "a run on a server is a job of its own: submit one",
            9: "the profile is this process's, and the server has its own profiler",
        }
    )
    running = "a server's decode steps cannot be counted from outside"

    def __init__(self, python: Path, folder: Path) -> None:
        self._python, self._folder = python, folder
        self._made: list[SGLangEngine] = []

    def refuses(self, spec: JobSpec, models: Path) -> list[str]:
        """A scheme or a context that SGLang has no setting for here, or only emulates."""
        try:
            model = Model(models, spec.model, spec.contract(), spec.device.hardware, spec.rollout.max_running)
        except ValueError as error:
            return [str(error)]
        return [f"emulated on {spec.device.hardware}: {each}" for each in model.launch.emulations]

    def warm(self, spec: JobSpec, models: Path) -> RolloutEngine:
        """See `Rollouts`. Starts a server."""
        return self._engine(spec, models)

    def cold(self, spec: JobSpec, models: Path) -> RolloutEngine:
        """See `Rollouts`. Starts another server, whose weights begin as noise."""
        return self._engine(spec, models)

    def _engine(self, spec: JobSpec, models: Path) -> SGLangEngine:
        folder = self._folder / f"server-{len(self._made)}"
        self._made.append(local_engine(spec, models, self._python, folder, JOB, KEY, DRAIN))
        return self._made[-1]

    def unlike(self, engine: RolloutEngine, manifest: VersionManifest, store: BlobStore) -> list[str]:
        """By the server's own checksums beside those that the manifest's tensors make when they are fused alike."""
        assert isinstance(engine, SGLangEngine), "made here"
        wanted = engine._loader.prepare(manifest, store, None)
        found = engine.process.server.checksums()
        names = sorted(found.keys() | wanted.checksums.keys())
        wrong = [name for name in names if found.get(name) != wanted.checksums.get(name)]
        if wanted.adapter is not None and wanted.adapter[0] not in engine.process.server.adapters():
            wrong.append(f"adapter {wanted.adapter[0]}")
        return wrong

    def close(self) -> None:
        """End the servers."""
        for engine in self._made:
            engine.close()
            engine.process.stop()


def missing(engine: Engine) -> str:
    """Why `engine` cannot run here; "": it can."""
    python = Settings.read(os.environ).sglang
    if engine == "reference" or python.is_file():
        return ""
    return (
        f"{python} is missing: `make sglang-venv` makes SGLang's environment, SYNCLINE_SGLANG names another"
    )


def rollouts_of(engine: Engine, folder: Path) -> Rollouts:
    """By the engine's name. `folder` takes a server's log and checkpoints."""
    return InProcess() if engine == "reference" else Servers(Settings.read(os.environ).sglang, folder)
