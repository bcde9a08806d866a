"""What a fault is put through: the kinds of stacks, what a row may hook into, and how the hooks reach the parts."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import pytest
from torch import Tensor

import syncline.rollout.loop as rollout_loop
import syncline.sync.loop as sync_loop
from syncline.contract.job import JobSpec
from syncline.contract.version_path import Minted, TensorEntry, VersionManifest, VersionRecord
from syncline.rollout.engines import weights as engine_weights
from syncline.rollout.engines.readback import Scratch, fill
from syncline.rollout.worker import Worker, assemble
from syncline.runtime.service import ServiceContext
from syncline.runtime.store import BlobStore
from syncline.sync import manifest as sync_manifest
from syncline.sync import publish as sync_publish
from syncline.sync.publish import Publisher

if TYPE_CHECKING:
    from fault_stack import Stack

MODEL = "tiny-dense"
BUILDING = threading.RLock()
"""Held by who makes a model: `transformers` patches modules meanwhile, and threads here share them."""


@dataclass(frozen=True)
class Kind:
    """What a stack is made of. `victims`: workers that are processes and may be killed."""

    name: str
    about: str
    precision: Mapping[str, Any]
    mode: Literal["colocated", "disjoint"] = "disjoint"
    workers: tuple[str, ...] = ("w0", "w1", "w2")
    victims: tuple[str, ...] = ()
    sync: Literal["thread", "process"] = "thread"
    wait: float = 120.0
    store_kib: int | None = None  # the store is a file system of this size

    @property
    def names(self) -> tuple[str, ...]:
        """All workers."""
        return (*self.workers, *self.victims)

    def spec(self) -> JobSpec:
        return JobSpec.model_validate(
            {
                "name": "faults",
                "model": {"name": MODEL},
                "precision": dict(self.precision),
                "schedule": {"mode": self.mode},
                "rollout": {
                    "workers": len(self.workers) + len(self.victims) + 1,
                    "max_running": 4,
                },  # one may join
                "retention": {"versions": 2},
                "limits": {"activation_wait": self.wait},
            }
        )


@dataclass
class Hooks:
    """What the present row changes, inside this process. Empty: nothing."""

    half_converted: Callable[[Path], object] | None = None  # export folder; its files are open and checked
    before_sign: Callable[[VersionManifest], VersionManifest] | None = None
    after_publish: Callable[[VersionManifest], object] | None = None  # sync has ordered nothing yet
    before_stage: dict[str, Callable[[], object]] = field(default_factory=dict)  # by worker
    after_stage: dict[str, Callable[[Any], object]] = field(default_factory=dict)  # gets the staged `Weights`
    on_read: dict[str, Callable[[TensorEntry, Tensor], Tensor]] = field(default_factory=dict)


class Switchboard:
    """Joins the hooks of the stacks to the parts, once for all rows."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.stacks: dict[str, Stack] = {}
        self._stores: dict[int, tuple[str, str]] = {}  # by id: which (job, worker) stages from it
        self._pour, self._build = engine_weights._poured, sync_manifest.build
        board = self

        class Hooked(Publisher):
            def publish(
                self, minted: Minted, record: VersionRecord, *, proven: bool = True
            ) -> VersionManifest:
                manifest = super().publish(minted, record, proven=proven)
                hooks = board.stacks[minted.job].hooks
                if hooks.after_publish is not None:
                    hooks.after_publish(manifest)
                return manifest

            def _base(self, minted: Minted) -> Any:
                hooks = board.stacks[minted.job].hooks
                if hooks.half_converted is not None:
                    hooks.half_converted(self.export_of(minted))
                return super()._base(minted)

        patch.setattr(sync_loop, "Publisher", Hooked)
        patch.setattr(sync_publish, "build", self._built)
        patch.setattr(engine_weights, "_poured", self._poured)
        patch.setattr(rollout_loop, "assemble", self._assembled)
        build = engine_weights.Weights.__init__

        def built(weights: Any, expected: Any) -> None:
            with BUILDING:
                build(weights, expected)

        patch.setattr(engine_weights.Weights, "__init__", built)

    def _built(self, minted: Minted, converted: Any) -> VersionManifest:
        manifest, change = self._build(minted, converted), self.stacks[minted.job].hooks.before_sign
        return manifest if change is None else change(manifest)

    def _poured(self, entry: TensorEntry, own: Tensor, store: BlobStore, scratch: Scratch) -> str:
        """In one of a load's threads: the store says whose."""
        found = self._pour(entry, own, store, scratch)
        job, name = self._stores[id(store)]
        change = self.stacks[job].hooks.on_read.get(name)
        if change is None:
            return found
        return fill(own, change(entry, engine_weights._tensor(entry, store)))

    def _assembled(self, context: ServiceContext) -> Worker:
        with BUILDING:
            worker, stack = assemble(context), self.stacks[context.job]
        engine: Any = worker.engine
        stage = engine.stage

        def staged(signed: Any, store: BlobStore) -> Any:
            self._stores[id(store)] = (context.job, context.name)
            before, after = stack.hooks.before_stage, stack.hooks.after_stage
            if context.name in before:
                before[context.name]()
            done = stage(signed, store)
            if context.name in after:
                after[context.name](engine._staged)
            return done

        engine.stage = staged
        stack.parts[context.name] = worker
        return worker
