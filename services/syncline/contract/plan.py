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

from syncline.contract.precision import Family, PrecisionContract
from syncline.contract.schemes import BLOCK, Scheme

SENSITIVE: tuple[tuple[str, str], ...] = (
    ("router", r"(^|\.)(gate|router)\.(weight|bias|e_score_correction_bias)$|shared_expert_gate\.weight$"),
    ("embedding", r"(^|\.)(embed_tokens|wte|word_embeddings|embed_in)\.weight$"),
    ("output head", r"(^|\.)(lm_head|embed_out)\.weight$"),
    ("norm", r"norm[^.]*\.weight$|layernorm[^.]*\.weight$"),
)
"""What stays wide unless a family says `sensitive` (norms always do: they are no linear weights)."""


class BadPlan(ValueError):
    """A contract that does not fit the model. Names the family and the pattern or tensor, and what would do."""


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
    size that the block does not divide, and an outer-scale partner that is missing.
    """
    entries = {name: _entry(name, tuple(shape), contract.families) for name, shape in shapes.items()}
    for family in contract.families:
        _check_patterns(family, entries)
    _check_partners(contract.families, entries)
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
        raise BadPlan(f"tensor {name} is named by the families {names}; each tensor belongs to one")
    family, pattern = kept[0]
    _check_shape(name, shape, family)
    return PlanEntry(
        name=name,
        shape=shape,
        family=family.name,
        weight=family.weight,
        activation=family.activation,
        outer=_outer(name, family),
        reason=f"{family.weight.format}: {family.name} matches it with {pattern!r}",
    )


def _check_shape(name: str, shape: tuple[int, ...], family: Family) -> None:
    if len(shape) != 2:
        raise BadPlan(f"family {family.name}: tensor {name} of shape {list(shape)} is no matrix")
    scheme = family.weight
    step = BLOCK[scheme.format] or scheme.columns
    for axis, size, block in (("rows", shape[0], scheme.rows), ("columns", shape[1], step)):
        if scheme.padding == "refuse" and size % block:
            low = size // block * block
            legal = f"{low} and {low + block}" if low else f"{block}"
            raise BadPlan(
                f"family {family.name}: tensor {name} has {size} {axis}, no multiple of {block}; legal near it: {legal}"
            )


def _check_patterns(family: Family, entries: Mapping[str, PlanEntry]) -> None:
    for pattern in family.match:
        if not any(matches(pattern, name) for name in entries):
            near = [name for name in entries if not sensitive(name) and len(entries[name].shape) == 2][:3]
            raise BadPlan(
                f"family {family.name}: pattern {pattern!r} matches no tensor of the model, whose names are like "
                f"{', '.join(near)}"
            )
    for pattern in family.keep:
        named = [n for n in entries if any(matches(p, n) for p in family.match) and matches(pattern, n)]
        if not named:
            raise BadPlan(
                f"family {family.name}: exception {pattern!r} keeps nothing that the family matches"
            )
    if not any(entry.family == family.name for entry in entries.values()):
        raise BadPlan(f"family {family.name}: everything that it matches is sensitive and stays wide")


def _outer(name: str, family: Family) -> str:
    stem, _, _ = name.removesuffix(".weight").rpartition(".")
    leaf = name.removesuffix(".weight").rsplit(".", 1)[-1]
    for group in family.fuse:
        if leaf in group:
            return f"{stem}.{'+'.join(group)}"
    return ""


def _check_partners(families: tuple[Family, ...], entries: Mapping[str, PlanEntry]) -> None:
    """Tensors under one outer scale come whole: a lone gate would be scaled as no kernel fuses it."""
    sizes = {len(group) for family in families for group in family.fuse}
    if not sizes:
        return
    members: dict[str, list[str]] = {}
    for entry in entries.values():
        if entry.outer:
            members.setdefault(entry.outer, []).append(entry.name)
    for outer, names in members.items():
        wanted = outer.rsplit(".", 1)[-1].split("+")
        if len(names) != len(wanted):
            raise BadPlan(
                f"tensor {names[0]} shares its outer scale with {' and '.join(wanted)}, and the plan has only "
                f"{len(names)} of them"
            )
