"""Engines for tests, and the real SGLang servers behind them, started once per session: one takes 60 CPU-seconds."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from syncline.contract.job import ModelSpec
from syncline.contract.precision import PrecisionContract
from syncline.contract.recipes import RECIPES
from syncline.contract.sglang_spec import Update
from syncline.rollout.engine import CommitPolicy
from syncline.rollout.engines.sglang.client import ServerGone
from syncline.rollout.engines.sglang.engine import SGLangEngine
from syncline.rollout.engines.sglang.launch import ServerProcess
from syncline.rollout.engines.sglang.loader import Loader
from syncline.rollout.engines.sglang.model import Model

ROOT = Path(__file__).parents[2]
PYTHON = Path(os.environ.get("SYNCLINE_SGLANG", ROOT / ".venv-sglang" / "bin" / "python")).absolute()
DRAIN = CommitPolicy(kind="drain")


class Fleet:
    """One server per model, contract and number, kept for the session."""

    def __init__(self, logs: Path) -> None:
        self._logs = logs
        self._servers: dict[tuple[str, str, int], ServerProcess] = {}
        self._engines: list[SGLangEngine] = []

    def model(self, folder: Path, contract: PrecisionContract = RECIPES["bf16"]) -> Model:
        return Model(folder.parent, ModelSpec(name=folder.name), contract)

    def server(self, model: Model, number: int = 0) -> ServerProcess:
        key = (model.folder.config_digest, model.contract.digest(), number)
        if key not in self._servers:
            log = self._logs / f"{model.folder.path.name}-{model.contract.name}-{number}.log"
            folder = self._logs / f"{model.folder.path.name}-{model.contract.name}-{number}"
            self._servers[key] = ServerProcess(PYTHON, model.launch, model.start_folder(folder), log)
        return self._servers[key]

    def engine(
        self,
        folder: Path,
        scratch: Path,
        job: str,
        key: bytes,
        max_running: int,
        *,
        contract: PrecisionContract = RECIPES["bf16"],
        number: int = 0,
        update: Update = "disk",
        in_flight: CommitPolicy = DRAIN,
    ) -> SGLangEngine:
        """An engine on the shared server. Another engine's weights may lie in it until the first stage."""
        model = self.model(folder, contract)
        loader = Loader(model.expected, model.config, model.launch, scratch, update)
        server = self.server(model, number)
        engine = SGLangEngine(model, job, key, server, loader, max_running, in_flight)
        self._engines.append(engine)
        return engine

    def after_test(self) -> None:
        """Requests of the test end, and servers that it had run at full speed again."""
        for engine in self._engines:
            engine.close()
            if engine.process.alive:
                with contextlib.suppress(ServerGone):  # it starts anew, at full speed
                    engine.process.server.slow_down(None)
        self._engines = []

    def stop(self) -> None:
        for server in self._servers.values():
            server.stop()
