"""What the engine knows of its model without a server: vocabulary, positions, routes, what a manifest must list."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from syncline.contract.artefact import encoded
from syncline.contract.job import ModelSpec
from syncline.contract.precision import Hardware, PrecisionContract
from syncline.contract.precision_trace import ComponentTrace, Use
from syncline.reference.model import empty_model, model_folder, stop_ids
from syncline.reference.routes import RouteTap
from syncline.reference.state import state_plan
from syncline.rollout.engine import Description
from syncline.rollout.engines.expected import expected
from syncline.rollout.engines.sglang.checkpoint import write_config
from syncline.rollout.engines.sglang.flight import Routing
from syncline.rollout.engines.sglang.launch import LaunchPlan, plan_launch


class Model:
    """A model folder under a contract. Raises `ValueError` naming what SGLang cannot hold."""

    def __init__(
        self,
        models: Path,
        spec: ModelSpec,
        contract: PrecisionContract,
        hardware: Hardware = "cpu",
        max_running: int = 64,
        tp: int = 1,
    ) -> None:
        self.folder = model_folder(models, spec.name)
        self.contract = contract
        self.config: dict[str, Any] = json.loads((self.folder.path / "config.json").read_bytes())
        self._config = self.folder.config.get_text_config(decoder=True)
        self.vocab = int(self._config.vocab_size)
        built = empty_model(self.folder)
        self.family = type(built).__name__
        self.stop_ids = frozenset(stop_ids(self.folder))
        self.expected = expected(self.folder, state_plan(built), contract)
        if self.expected.bridged:
            raise ValueError("convert.route 'bf16_bridge': SGLang loads the artefact's codes")
        taps = RouteTap(built)
        self.routing: Routing | None = None
        if taps.layers:
            experts = next(
                int(self.config[key])
                for key in ("n_routed_experts", "num_experts", "num_local_experts")
                if key in self.config
            )
            self.routing = (int(self._config.num_hidden_layers), taps.layers, taps.topk, experts)
        self.launch: LaunchPlan = plan_launch(
            contract, self.expected.plan, hardware, max_running, self.routing is not None, tp
        )

    def describe(self, max_running: int, frees_memory: bool) -> Description:
        return Description(
            engine="sglang",
            family=self.family,
            double_buffer=False,
            policies=("drain", "in_place"),
            vocab=self.vocab,
            stop_ids=tuple(sorted(self.stop_ids)),
            max_running=max_running,
            experts=(self.routing[1], self.routing[2]) if self.routing else None,
            kv=self.contract.rollout.kv_cache,
            representation=self.contract.representation,
            seeded=False,
            carries=False,
            suppresses=False,
            frees_memory=frees_memory,
        )

    def start_folder(self, folder: Path) -> Path:
        """`folder`, written as what a server starts from: the architecture, no weights."""
        write_config(folder, self.folder.path, self.launch.quantization)
        return folder

    def check_prompt(self, name: str, prompt: Sequence[int], tokens: int) -> None:
        """Raise `ValueError` naming trajectory `name` for ids or a length that must not reach the server."""
        if not prompt or max(prompt) >= self.vocab or min(prompt) < 0:
            raise ValueError(f"trajectory {name}: prompt is empty or has an id outside the vocabulary")
        total, most = len(prompt) + tokens, int(self._config.max_position_embeddings)
        if total > most:
            raise ValueError(
                f"trajectory {name}: {len(prompt)} prompt tokens and {total} in all exceed the model's {most} positions"
            )

    def trace(self, names: Iterable[str]) -> ComponentTrace:
        """What the server was told to hold. Its kernels are not visible from here: they are named as launched."""
        uses = []
        low = self.expected.plan.low_bit()
        by_family: dict[str, list[str]] = {}
        for entry in low:
            by_family.setdefault(entry.family, []).append(entry.name)
        schemes = {entry.family: entry.weight for entry in low if entry.weight is not None}
        for family, members in sorted(by_family.items()):
            kernel = "; ".join(self.launch.emulations) or f"sglang {' '.join(self.launch.arguments[:4])}"
            uses.append(
                Use(
                    family=family,
                    tensors=len(members),
                    encoded=encoded(schemes[family]),
                    operands="X original, W reconstructed" if self.launch.emulations else "X codes, W codes",
                    kernel=kernel,
                    persistent="codes and scales",
                )
            )
        rest = len(set(names)) - sum(len(members) for members in by_family.values())
        uses.append(
            Use(
                family="",
                tensors=rest,
                encoded="BF16 values",
                operands="X original, W original",
                kernel=f"sglang {self.launch.wide}",
                persistent=self.launch.wide,
            )
        )
        return ComponentTrace(component="rollout", uses=tuple(uses))
