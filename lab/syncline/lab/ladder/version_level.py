"""Level 6 for one published version of a job: its own bytes, on engines out of rotation, before a worker serves it.

What a worker verifies by itself is what it holds. Here an engine that has taken every version in turn must score, to
the last bit, as one that has taken this version alone; both must hold what the signed manifest lists; and what they
score must be what the trainer said when it minted. Then the version's weights, as values, go through the ladder's own
level 6: a known perturbation of them, converted and published to the ladder's own engine, must move scores as it moves
the trainer's. The perturbed weights are never the job's: they lie in a folder of the climb and are gone with it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from syncline.contract.adapters import is_adapter
from syncline.contract.job import JobSpec
from syncline.contract.schemes import KvFormat
from syncline.contract.validation import Check, same
from syncline.contract.version_path import Canary, SignedManifest, VersionManifest, opened
from syncline.exporting.decoded import Decoded
from syncline.exporting.held import stores_low_bit
from syncline.exporting.source import Stored, plan_of
from syncline.lab.ladder import live_level
from syncline.lab.ladder.subject import PROMPTS, SIZE, Subject, learn
from syncline.lab.pair import DRAIN, Pair
from syncline.reference.adapter import attach
from syncline.reference.model import load_model
from syncline.reference.state import named_windows
from syncline.rollout.engines.reference import ReferenceEngine
from syncline.runtime.store import BlobStore
from syncline.trainer.engines.state import WEIGHTS

_DTYPES = {"BF16": torch.bfloat16, "F32": torch.float32}


class Version(NamedTuple):
    """A published version. `digest`: of the manifest that is meant; `store` has its blobs."""

    signed: SignedManifest
    digest: str
    canaries: Sequence[Canary]
    tolerance: float
    store: BlobStore


class Home(NamedTuple):
    """The job that the version is of. `key` signs its manifests."""

    job: str
    key: bytes
    spec: JobSpec
    models: Path

    def engine(self) -> ReferenceEngine:
        """A new engine that holds nothing."""
        spec = self.spec
        running = spec.rollout.max_running
        return ReferenceEngine(self.models, spec.model, self.job, self.key, running, contract=spec.contract())


def checks(version: Version, home: Home, warm: ReferenceEngine, folder: Path) -> Iterator[Check]:
    """Raises what the engine and the store raise for a version that cannot be staged.

    warm     serves the version before, or nothing; serves this one afterwards
    folder   for the perturbed weights, empty
    """
    manifest = opened(version.signed, home.key)
    yield same("the manifest is the version's", _unlike_asked(version, home, manifest), "signed by sync")
    warm.stage(version.signed, version.store)
    warm.commit(DRAIN)
    cold = home.engine()
    cold.stage(version.signed, version.store)
    cold.commit(DRAIN)
    held = [
        f"{name} of the {kind} engine"
        for kind, e in (("warm", warm), ("cold", cold))
        for name in _other(e, manifest)
    ]
    yield same("the active version holds the manifest's tensors", held, "digests of what was read back")
    on_warm, on_cold = (_scores(engine, version.canaries) for engine in (warm, cold))
    differ = [f"prefix {i}" for i, (a, b) in enumerate(zip(on_warm, on_cold, strict=True)) if a != b]
    yield same("warm equals cold", differ, "an engine that took this version alone, to the last bit")
    yield _as_minted(version, _scores(cold, version.canaries, kv="wide"))
    yield from live_level.checks(Perturbed(home.spec, home.models, folder, _values(version, home, manifest)))


def _unlike_asked(version: Version, home: Home, manifest: VersionManifest) -> list[str]:
    told = (
        ("digest", manifest.digest(), version.digest),
        ("job", manifest.job, home.job),
        ("contract", manifest.contract, home.spec.contract_digest()),
    )
    return [f"{what} {found} is not {due}" for what, found, due in told if found != due]


def _other(engine: ReferenceEngine, manifest: VersionManifest) -> list[str]:
    """Tensors of which `engine` holds other bytes than the manifest says."""
    active = engine._active()
    held: Mapping[str, str] = {} if active is None else active.contents
    return [entry.name for entry in manifest.tensors if held.get(entry.name) != entry.digest]


def _scores(
    engine: ReferenceEngine, canaries: Sequence[Canary], kv: KvFormat | None = None
) -> list[tuple[float, ...]]:
    """Log-probs of each fixed prefix's scored tokens, at temperature 1; `kv`: None: as the contract stores contexts."""
    return [tuple(engine.score(c.tokens, c.prompt, buffer="active", kv=kv).logprobs) for c in canaries]


def _as_minted(version: Version, found: Sequence[Sequence[float]]) -> Check:
    """The largest |engine - trainer| over all prefixes; a version without prefixes proves nothing."""
    apart = [
        (abs(a - b) if np.isfinite(a) else np.inf, f"prefix {i} token {n}")
        for i, (canary, scores) in enumerate(zip(version.canaries, found, strict=True))
        for n, (a, b) in enumerate(zip(scores, canary.logprobs, strict=True))
    ]
    worst, where = max(apart, default=(np.inf, "no prefix was scored by the trainer"))
    return Check(
        name="scores are those that the trainer minted",
        found=float(worst),
        bound=version.tolerance,
        source="convert.tolerance of the contract",
        unit="nats, largest",
        where="" if worst <= version.tolerance else where,
    )


def _values(version: Version, home: Home, manifest: VersionManifest) -> dict[str, Tensor]:
    """The version's weights by checkpoint name, low-bit ones as the values that they stand for."""
    contract = home.spec.contract()
    entries = {entry.name: entry for entry in manifest.tensors}
    source: Decoded | Stored = Stored(version.store, entries)
    if stores_low_bit(contract):
        plan = plan_of(contract, manifest, version.store)
        source = Decoded(version.store, entries, plan, operands="fp32")
    facts = source.facts
    return {
        name: torch.frombuffer(bytearray(raw), dtype=_DTYPES[facts[name].dtype]).reshape(facts[name].shape)
        for name, raw in source.tensors(sorted(facts))
    }


class Perturbed(Subject):
    """A subject whose pair has the values of a version, on engines of the ladder's own."""

    def __init__(self, spec: JobSpec, models: Path, folder: Path, values: Mapping[str, Tensor]) -> None:
        super().__init__(spec, models, folder)
        self._values = values

    @cached_property
    def pair(self) -> Pair:
        """Both engines with the version's weights, published."""
        pair = Pair(self.spec, self.models, self.new_folder("pair"), self.rollouts.warm)
        pair.publish()
        state = self.new_folder("state")
        pair.trainer.save(state)
        tensors = load_file(state / WEIGHTS)
        masters = self._masters()
        for name in [name for name in tensors if name.startswith("parameter.")]:
            tensors[name] = masters[name.removeprefix("parameter.")].to(tensors[name].dtype).clone()
        save_file(tensors, state / WEIGHTS)
        pair.trainer.load(state)
        pair.updates += 1
        pair.publish()
        if not all(bool(tensor.any()) for name, tensor in self._values.items() if is_adapter(name)):
            learn(pair, pair.sample(range(PROMPTS), SIZE))  # a fresh B is zero, and zero hides what reads it
            pair.publish()
        return pair

    def _masters(self) -> dict[str, Tensor]:
        """The values by the names that the trainer gives its parameters."""
        loaded = load_model(self.models, self.spec.model, self.spec.seeds.model)
        views = named_windows(loaded.model, loaded.plan)
        if self.contract.adapter is not None:
            views |= attach(loaded.model, loaded.plan, self.contract.adapter, seed=0).views()
        with torch.no_grad():
            for name in views.keys() & self._values.keys():
                views[name].copy_(self._values[name])
        return {name: parameter.detach() for name, parameter in loaded.model.named_parameters()}
