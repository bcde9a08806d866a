"""A contract's patterns resolved against one model: what each checkpoint tensor is, and why. Pure, without torch.

Trainer, converter and engine each resolve the plan from the names and shapes they hold; its digest rides in the
manifest, so two sides that would treat a tensor differently never exchange one.
"""

from __future__ import annotations

import fnmatch
import hashlib
import re
from collections.abc import Mapping

import msgspec

from syncline.contract.precision import Adapter, Family, PrecisionContract
from syncline.contract.schemes import BLOCK, Scheme

SENSITIVE: tuple[tuple[str, str], ...] = (
    ("router", r"(^|\.)(gate|router)\.(weight|bias|e_score_correction_bias)$|shared_expert_gate\.weight$"),
    ("embedding", r"(^|\.)(embed_tokens|wte|word_embeddings|embed_in)\.weight$"),
    ("output head", r"(^|\.)(lm_head|embed_out)\.weight$"),
    ("norm", r"norm[^.]*\.weight$|layernorm[^.]*\.weight$"),
)
"""What stays wide unless a family says `sensitive` (norms always do: they are no linear weights)."""


FUSED: tuple[tuple[str, ...], ...] = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"), ("w1", "w3"))
"""Modules that engines multiply as one: of two-level scales, one outer scale is read for all of them."""


class BadPlan(ValueError):
    """A contract that does not fit the model. Names the family and the pattern or tensor, and what would do.

    `key` is what is wrong in the contract, such as `families.0.match.1`.
    """

    def __init__(self, message: str, key: str) -> None:
        self.key = key
        super().__init__(message)


class PlanEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One checkpoint tensor. `family` empty: wide. `outer`: id of the tensors that share its outer scale."""

    name: str
    shape: tuple[int, ...]
    family: str = ""
    weight: Scheme | None = None
    activation: Scheme | None = None
    outer: str = ""
    reason: str


class PrecisionPlan(msgspec.Struct, frozen=True, kw_only=True):
    """One entry per checkpoint tensor, sorted by name. `contract`: digest of what it was resolved from."""

    contract: str
    entries: tuple[PlanEntry, ...]

    def digest(self) -> str:
        """sha256 hex of the canonical JSON form."""
        return hashlib.sha256(msgspec.json.encode(self)).hexdigest()

    def low_bit(self) -> tuple[PlanEntry, ...]:
        """Entries that a family names."""
        return tuple(entry for entry in self.entries if entry.weight is not None)


def resolve(contract: PrecisionContract, shapes: Mapping[str, tuple[int, ...]]) -> PrecisionPlan:
    """The plan of `contract` for a model with checkpoint tensors `shapes` (name -> shape).

    Raises `BadPlan` for a pattern that matches nothing, a tensor that two families name, one that is no matrix, a
    size that the block does not divide, an outer-scale partner that is missing or not declared, and what
    `adapter_targets` refuses.
    """
    entries = {name: _entry(name, tuple(shape), contract.families) for name, shape in shapes.items()}
    for i, family in enumerate(contract.families):
        _check_patterns(i, family, entries)
    _check_partners(contract.families, entries)
    if contract.adapter is not None:
        adapter_targets(contract.adapter, shapes)
    return PrecisionPlan(contract=contract.digest(), entries=tuple(entries[name] for name in sorted(entries)))


def matches(pattern: str, name: str) -> bool:
    """Whether checkpoint name `name` matches; `*` crosses dots, case matters."""
    return fnmatch.fnmatchcase(name, pattern)


def sensitive(name: str) -> str:
    """Which kind of sensitive tensor `name` is; empty if none."""
    return next((kind for kind, pattern in SENSITIVE if re.search(pattern, name)), "")


def _entry(name: str, shape: tuple[int, ...], families: tuple[Family, ...]) -> PlanEntry:
    naming = [(f, p) for f in families for p in f.match if matches(p, name)]
    for family, _ in naming:
        for pattern in family.keep:
            if matches(pattern, name):
                return PlanEntry(
                    name=name, shape=shape, reason=f"wide: {family.name} keeps it with {pattern!r}"
                )
    kind = sensitive(name)
    kept = [(f, p) for f, p in naming if not kind or (f.sensitive and kind != "norm")]
    if not naming:
        return PlanEntry(name=name, shape=shape, reason=f"wide: {kind or 'no family names it'}")
    if not kept:
        family, pattern = naming[0]
        why = f"wide: {kind}, though {family.name} matches it with {pattern!r}"
        return PlanEntry(name=name, shape=shape, reason=why)
    if len({family.name for family, _ in kept}) > 1:
        names = ", ".join(sorted({family.name for family, _ in kept}))
        key = f"families.{families.index(kept[-1][0])}.match"
        raise BadPlan(f"tensor {name} is named by the families {names}; each tensor belongs to one", key)
    family, pattern = kept[0]
    _check_shape(name, shape, family, families.index(family))
    return PlanEntry(
        name=name,
        shape=shape,
        family=family.name,
        weight=family.weight,
        activation=family.activation,
        outer=_outer(name, family),
        reason=f"{family.weight.format}: {family.name} matches it with {pattern!r}",
    )


def _check_shape(name: str, shape: tuple[int, ...], family: Family, index: int) -> None:
    if len(shape) != 2:
        message = f"family {family.name}: tensor {name} of shape {list(shape)} is no matrix"
        raise BadPlan(message, f"families.{index}.match")
    scheme = family.weight
    step = BLOCK[scheme.format] or scheme.columns
    for axis, size, block in (("rows", shape[0], scheme.rows), ("columns", shape[1], step)):
        if scheme.padding == "refuse" and size % block:
            low = size // block * block
            legal = f"{low} and {low + block}" if low else f"{block}"
            raise BadPlan(
                f"family {family.name}: tensor {name} has {size} {axis}, no multiple of {block}; "
                f"legal near it: {legal}",
                f"families.{index}.weight",
            )


def _check_patterns(index: int, family: Family, entries: Mapping[str, PlanEntry]) -> None:
    for j, pattern in enumerate(family.match):
        if not any(matches(pattern, name) for name in entries):
            shapes = {entry.name: entry.shape for entry in entries.values()}
            raise BadPlan(
                f"family {family.name}: pattern {pattern!r} matches no tensor of the model{_names_like(shapes)}",
                f"families.{index}.match.{j}",
            )
    for j, pattern in enumerate(family.keep):
        named = [n for n in entries if any(matches(p, n) for p in family.match) and matches(pattern, n)]
        if not named:
            raise BadPlan(
                f"family {family.name}: exception {pattern!r} keeps nothing that the family matches: "
                "leave it out, or take a contract that is meant for this model",
                f"families.{index}.keep.{j}",
            )
    if not any(entry.family == family.name for entry in entries.values()):
        first = next(n for n in entries if any(matches(p, n) for p in family.match))
        message = (
            f"family {family.name}: everything that it matches stays wide, such as {first} ({entries[first].reason}); "
            "a family that says sensitive = true quantises routers, embeddings and the head, norms never"
        )
        raise BadPlan(message, f"families.{index}.match")


def _names_like(shapes: Mapping[str, tuple[int, ...]]) -> str:
    """The first linear weights' names, as the rest of a sentence; empty if there are none."""
    near = [name for name, shape in shapes.items() if not sensitive(name) and len(shape) == 2][:3]
    return f", whose names are like {', '.join(near)}" if near else ""


def adapter_targets(adapter: Adapter, shapes: Mapping[str, tuple[int, ...]]) -> tuple[str, ...]:
    """Names of the weights among `shapes` (of the base) that get an adapter, sorted.

    Raises `BadPlan` for a pattern that matches nothing or something else than linear weights, and a rank that a
    matrix cannot have.
    """
    found: set[str] = set()
    for i, pattern in enumerate(adapter.targets):
        key = f"adapter.targets.{i}"
        named = sorted(name for name in shapes if matches(pattern, name))
        if not named:
            raise BadPlan(
                f"adapter: target {pattern!r} matches no tensor of the model{_names_like(shapes)}", key
            )
        for name in named:
            if sensitive(name) or len(shapes[name]) != 2 or not name.endswith(".weight"):
                raise BadPlan(f"adapter: target {pattern!r} matches {name}, which is no linear weight", key)
            if adapter.rank > min(shapes[name]):
                raise BadPlan(
                    f"adapter: rank {adapter.rank} is more than {name} of shape {list(shapes[name])} can have: "
                    f"{min(shapes[name])}",
                    "adapter.rank",
                )
        found.update(named)
    return tuple(sorted(found))


def _outer(name: str, family: Family) -> str:
    stem, _, _ = name.removesuffix(".weight").rpartition(".")
    leaf = name.removesuffix(".weight").rsplit(".", 1)[-1]
    for group in family.fuse:
        if leaf in group:
            return f"{stem}.{'+'.join(group)}"
    return ""


def _check_partners(families: tuple[Family, ...], entries: Mapping[str, PlanEntry]) -> None:
    """Tensors under one outer scale come whole, and what an engine fuses is under one: it would read one for both."""
    for i, family in enumerate(families):
        low = [entry for entry in entries.values() if entry.family == family.name]
        for entry in low:
            if entry.outer:
                _check_whole(entry, entries, f"families.{i}.fuse")
        if family.weight.format == "nvfp4":
            for group in FUSED:
                _check_declared(group, low, f"families.{i}.fuse")


def _check_whole(entry: PlanEntry, entries: Mapping[str, PlanEntry], key: str) -> None:
    stem, _, group = entry.outer.rpartition(".")
    for leaf in group.split("+"):
        partner = entries.get(f"{stem}.{leaf}.weight")
        if partner is not None and partner.outer != entry.outer:
            raise BadPlan(
                f"tensor {entry.name} shares its outer scale with {partner.name}, which is {partner.reason}",
                key,
            )


def _check_declared(group: tuple[str, ...], low: list[PlanEntry], key: str) -> None:
    outers: dict[str, list[PlanEntry]] = {}
    for entry in low:
        stem, _, leaf = entry.name.removesuffix(".weight").rpartition(".")
        if leaf in group:
            outers.setdefault(stem, []).append(entry)
    for found in outers.values():
        if len(found) > 1 and (len({entry.outer for entry in found}) > 1 or not found[0].outer):
            names = ", ".join(entry.name for entry in found)
            raise BadPlan(
                f"tensors {names} are multiplied as one and need one outer scale: fuse = [{list(group)}]", key
            )
