"""What a manifest must list for this model under this contract, resolved from the engine's own architecture."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NoReturn

import msgspec

from syncline.contract.adapters import adapter_shapes
from syncline.contract.artefact import Part, padding, parts
from syncline.contract.plan import PlanEntry, PrecisionPlan, resolve
from syncline.contract.precision import PrecisionContract
from syncline.contract.schemes import KvFormat
from syncline.contract.version_path import VersionManifest
from syncline.reference.model import ModelFolder, empty_model, stop_ids
from syncline.reference.routes import RouteTap
from syncline.reference.state import StatePlan, Window, check_names, state_plan
from syncline.rollout.engine import Description, StageFailed

WIDE = ("BF16", "F32")
"""Dtypes in which a wide tensor may travel."""


class Expected(msgspec.Struct, frozen=True):
    """Architecture and contract, joined.

    bridged   weights that the engine quantises as it loads, by name
    adapter   shapes of the contract's adapter tensors, by name; none without an adapter
    """

    folder: ModelFolder
    state: StatePlan
    contract: PrecisionContract
    plan: PrecisionPlan
    bridged: dict[str, PlanEntry]
    adapter: dict[str, tuple[int, int]]

    def check(self, manifest: VersionManifest) -> None:
        """Raise `StageFailed`, naming the tensor, unless `manifest` lists exactly this model's tensors in the
        contract's form.
        """
        if manifest.model != self.folder.config_digest:
            raise StageFailed(
                f"manifest of version {manifest.version} is for another model (config {manifest.model})"
            )
        if manifest.representation != self.contract.representation:
            raise StageFailed(
                f"manifest has representation {manifest.representation!r}, this engine reads "
                f"{self.contract.representation}"
            )
        low = self.plan.low_bit()
        self._check_parts(manifest)
        # without low-bit weights there is nothing that two plans could treat differently
        if (low or manifest.plan) and manifest.plan != self.plan.digest():
            raise StageFailed(
                f"manifest of version {manifest.version} was made by precision plan "
                f"{manifest.plan or 'none'}, this engine resolves {self.plan.digest()}"
            )
        padded = {} if self.bridged else {k: v for entry in low for k, v in padding(entry).items()}
        for name in sorted(manifest.padding.keys() | padded.keys()):
            if manifest.padding.get(name) != padded.get(name):
                raise StageFailed(
                    f"tensor {name} is padded from {manifest.padding.get(name)} in the manifest and from "
                    f"{padded.get(name)} in this engine's plan"
                )

    def _check_parts(self, manifest: VersionManifest) -> None:
        names = [entry.name for entry in manifest.tensors]
        if len(set(names)) != len(names):
            raise StageFailed(f"tensor {next(n for n in names if names.count(n) > 1)} is listed twice")
        wanted: dict[str, Part] = {}
        if not self.bridged:
            wanted = {part.name: part for entry in self.plan.low_bit() for part in parts(entry)}
        listed = {entry.name: entry for entry in manifest.tensors}
        for part in wanted.values():
            if part.name not in listed:
                _missing(part, [other for other in wanted.values() if other.source == part.source], listed)
            found = listed[part.name]
            if (found.dtype, tuple(found.shape)) != (part.dtype, part.shape):
                raise StageFailed(
                    f"tensor {part.name} has dtype {found.dtype} and shape {list(found.shape)}, the plan says "
                    f"{part.dtype} and {list(part.shape)}"
                )
        rest = {name: entry for name, entry in listed.items() if name not in wanted}
        for name, entry in rest.items():
            if entry.dtype not in WIDE:
                raise StageFailed(f"tensor {name} has dtype {entry.dtype}, this engine reads {list(WIDE)}")
        for absent, source in manifest.ties:
            if (absent, source) not in self.state.ties:
                raise StageFailed(f"tensor {absent} is tied to {source} in the manifest and not in the model")
        sources = {part.source for part in wanted.values()}
        windows = {name: window for name, window in self.state.windows.items() if name not in sources}
        ties = tuple((absent, source) for absent, source in self.state.ties if source in windows)
        for name, (r, c) in self.adapter.items():
            windows[name] = Window(owner=name, shape=(r, c), stride=(c, 1), offset=0)
        try:
            check_names(
                StatePlan(windows=windows, ties=ties), {name: entry.shape for name, entry in rest.items()}
            )
        except ValueError as error:
            raise StageFailed(str(error)) from None


def expected(folder: ModelFolder, state: StatePlan, contract: PrecisionContract) -> Expected:
    """Resolve `contract` for the architecture. Raises `BadPlan` if it does not fit."""
    shapes = {name: window.shape for name, window in state.windows.items()}
    plan = resolve(contract, shapes)
    bridge = contract.convert.route == "bf16_bridge"
    bridged = {entry.name: entry for entry in plan.low_bit()} if bridge else {}
    adapter = {} if contract.adapter is None else adapter_shapes(contract.adapter, shapes)
    return Expected(folder, state, contract, plan, bridged, adapter)


def described(
    folder: ModelFolder, contract: PrecisionContract, kv: KvFormat, max_running: int
) -> tuple[Description, Expected]:
    """What the reference engine says of itself with the model in `folder`, and what it takes. Raises `BadPlan`."""
    model = empty_model(folder)
    taps = RouteTap(model)
    config = folder.config.get_text_config(decoder=True)
    description = Description(
        engine="reference",
        family=type(model).__name__,
        double_buffer=True,
        policies=("drain", "continue_old", "in_place"),
        vocab=int(config.vocab_size),
        stop_ids=stop_ids(folder),
        max_running=max_running,
        experts=(taps.layers, taps.topk) if taps.layers else None,
        kv=kv,
        representation=contract.representation,
    )
    return description, expected(folder, state_plan(model), contract)


def _missing(part: Part, family: list[Part], listed: Mapping[str, object]) -> NoReturn:
    there = [other for other in family if other.name in listed]
    why = "none of its parts is there"
    if there:
        why = f"{there[0].name} is there, its {there[0].role} without the {part.role}"
    raise StageFailed(f"tensor {part.name} is missing: {part.source} is low-bit, and {why}")
