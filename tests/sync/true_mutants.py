"""Ways to break the rule that a recorded version is the version really read. Each must be caught by the histories.

A mutant patches the engine or the worker; nothing of it is ever imported by a service.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from syncline.contract.version_path import loaded_digest, opened
from syncline.rollout.engines.batching import Batch
from syncline.rollout.engines.reference import ReferenceEngine
from syncline.rollout.engines.rows import Row
from syncline.rollout.engines.weights import Weights
from syncline.rollout.orders import Orders

Mutant = Callable[[pytest.MonkeyPatch], None]


def label_before_load(patch: pytest.MonkeyPatch) -> None:
    """The label flips with the order to stage, before a byte was loaded."""
    take = Orders._take_stage

    def flipped(self: Any, order: Any) -> None:
        active = self._engine._active()
        if active is not None:
            active.version, active.digest = order.version, order.digest
            self._engine._lanes[-1].version = order.version
        take(self, order)

    patch.setattr(Orders, "_take_stage", flipped)


def label_without_load(patch: pytest.MonkeyPatch) -> None:
    """Staging believes the manifest and writes nothing."""

    load = Weights.load

    def believed(self: Any, signed: Any, manifest: Any, *rest: Any) -> str:
        if not self._held:  # a buffer that was never written would say nothing at all
            return load(self, signed, manifest, *rest)
        self.version, self.digest = manifest.version, manifest.digest()
        self.signed, self.manifest = signed, manifest
        return loaded_digest(manifest.tensors)

    patch.setattr(Weights, "load", believed)
    _no_canaries(patch)


def one_buffer(patch: pytest.MonkeyPatch) -> None:
    """Staging writes into the weights that serve."""

    load = ReferenceEngine._load

    def loaded(self: Any, signed: Any, manifest: Any, store: Any) -> str:
        active = self._active()
        if active is not None:
            version, digest, before = active.version, active.digest, active.signed
            active.load(signed, manifest, store)
            active.version, active.digest, active.signed = (
                version,
                digest,
                before,
            )  # it goes on under its old name
        return load(self, signed, manifest, store)

    patch.setattr(ReferenceEngine, "_load", loaded)


def old_weights_read(patch: pytest.MonkeyPatch) -> None:
    """After a swap under running requests, the old modules go on under the new name."""
    adopt = Batch.adopt

    def kept(self: Any, weights: Any, carried_age: Any) -> Any:
        old = self.weights
        told = adopt(self, weights, carried_age)
        self.weights = _Mask(old, weights)
        return told

    patch.setattr(Batch, "adopt", kept)


class _Mask:
    """The modules of one set of weights under the name of another."""

    def __init__(self, modules: Any, name: Any) -> None:
        self.model, self.direct, self.taps = modules.model, modules.direct, modules.taps
        self.signed, self.contents = name.signed, name.contents
        self.version, self.digest, self.adapter = name.version, name.digest, name.adapter


def span_not_closed(patch: pytest.MonkeyPatch) -> None:
    """A swap does not close the spans: what the old version sampled is told under the new one."""
    adopt = Batch.adopt

    def unclosed(self: Any, weights: Any, carried_age: Any) -> Any:
        told = [row.told for row in self._table.rows]
        _, anew = adopt(self, weights, carried_age)
        for row, before in zip(self._table.rows, told, strict=True):
            row.told = before
        return [], anew

    patch.setattr(Batch, "adopt", unclosed)


def carried_called_recomputed(patch: pytest.MonkeyPatch) -> None:
    """A kept context is told as one that was made anew."""

    def carry(self: Any, version: Any, limit: Any) -> bool:
        age = version.number - self.kv.number
        kept = limit is not None and version.epoch == self.kv.epoch and age <= limit
        self.kv, self.context, self.carried_age = version, "recomputed", 0
        return kept

    patch.setattr(Row, "carry", carry)


def age_from_the_last_swap(patch: pytest.MonkeyPatch) -> None:
    """The age of a context counts from the last commit and not from its oldest entry."""
    carry = Row.carry

    def younger(self: Any, version: Any, limit: Any) -> bool:
        kept = carry(self, version, limit)
        self.kv = version
        return kept

    patch.setattr(Row, "carry", younger)


def budget_ignored(patch: pytest.MonkeyPatch) -> None:
    """A context is kept however old it is."""
    carry = Row.carry
    patch.setattr(
        Row, "carry", lambda self, version, limit: carry(self, version, None if limit is None else 99)
    )


def half_a_version(patch: pytest.MonkeyPatch) -> None:
    """One tensor stays what it was, and is reported as if it had been read back."""
    load = Weights.load

    def halved(self: Any, *args: Any, **kwargs: Any) -> str:
        norm = self.packed.views["model.norm.weight"]
        before = norm.clone() if self._held else None
        done = load(self, *args, **kwargs)
        if before is not None:
            norm.copy_(before)
        return done

    patch.setattr(Weights, "load", halved)
    _no_canaries(patch)


def wakes_with_the_staged(patch: pytest.MonkeyPatch) -> None:
    """What is asleep is remembered under the name of what was staged last."""
    stage = ReferenceEngine.stage

    def remembered(self: Any, signed: Any, store: Any) -> Any:
        staged = stage(self, signed, store)
        if self._active() is not None:
            version = opened(signed, self._key)
            self._active().version, self._active().digest = version.version, version.digest()
        return staged

    patch.setattr(ReferenceEngine, "stage", remembered)


def _no_canaries(patch: pytest.MonkeyPatch) -> None:
    """Nobody scores what was staged: the tokens alone must show it."""
    patch.setattr(
        "syncline.rollout.staging._canary_gap", lambda engine, canaries, buffer: 0.0 if canaries else None
    )


MUTANTS: tuple[Mutant, ...] = (
    label_before_load,
    label_without_load,
    one_buffer,
    old_weights_read,
    span_not_closed,
    carried_called_recomputed,
    age_from_the_last_swap,
    budget_ignored,
    half_a_version,
    wakes_with_the_staged,
)
