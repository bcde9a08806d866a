"""A layout carried out on a model's shapes: for each rank, its shards, and the pieces of full tensors in each.

Pure integers and names. Gathering and scattering are the same pieces read in the two directions.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator

import msgspec

from syncline.contract.sharding.adapters import adapters
from syncline.contract.sharding.cuts import Piece, Shapes, cut
from syncline.contract.sharding.grid import BadLayout, Rank
from syncline.contract.sharding.layout import Layout, Rule
from syncline.contract.sharding.megatron import megatron
from syncline.contract.sharding.sglang import sglang


class Shard(msgspec.Struct, frozen=True, kw_only=True):
    """One parameter on one rank. Shards with equal pieces are replicas. `like`: a full tensor that gives the dtype."""

    name: str
    rank: Rank
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]
    like: str

    def __str__(self) -> str:
        return f"{self.name} on {self.rank}"


class Placed(msgspec.Struct, frozen=True, kw_only=True):
    """A rule in one place of a model: the full names of its sources, slot by slot (one, unless experts are stacked)."""

    rule: Rule
    name: str
    slots: tuple[tuple[str, ...], ...]


@functools.lru_cache(maxsize=16)
def rules(layout: Layout) -> tuple[Rule, ...]:
    """All rules of `layout`, adapters' included. One without its sources in a model has no effect there."""
    base = tuple(sglang(layout) if layout.engine == "sglang" else megatron(layout))
    return (*base, *(derived for rule in base for derived in adapters(rule, layout)))


def shards(layout: Layout, shapes: Shapes, rank: Rank) -> tuple[Shard, ...]:
    """What `rank` holds of the full tensors `shapes` (checkpoint name -> shape), in the order of rules and layers.

    Raises `BadLayout` naming the tensor, the group, its size and the legal ones.
    """
    return tuple(_shard(layout, placed, shapes, rank) for placed in placed_on(layout, shapes, rank))


def check(layout: Layout, shapes: Shapes) -> None:
    """Raises `BadLayout` for a full tensor that no rule of `layout` covers, and for what `shards` refuses."""
    if layout.model.tied and "lm_head.weight" in shapes:
        raise BadLayout("tensor lm_head.weight: the model ties it to the embedding, and it is there")
    covered: set[str] = set()
    seen: set[tuple[int, int]] = set()
    for rank in layout.grid.ranks():
        if (rank.pp, rank.ep) not in seen:
            seen.add((rank.pp, rank.ep))
            covered.update(p.source for s in shards(layout, shapes, rank) for p in s.pieces)
    for name in sorted(shapes):
        if name not in covered:
            raise BadLayout(
                f"tensor {name}: {layout.engine} has no rule for it{_partner(layout, shapes, name)}"
            )


def placed_on(layout: Layout, shapes: Shapes, rank: Rank) -> Iterator[Placed]:
    """Each rule in each place of the model that `rank` holds and `shapes` has. The first rule for a source counts."""
    ends = {"first": 0, "last": layout.grid.pp - 1}
    for rule in rules(layout):
        if rule.held != "layer" and ends[rule.held] == rank.pp and all(s in shapes for s in rule.sources):
            yield Placed(rule=rule, name=rule.name, slots=(rule.sources,))
    for local, layer in enumerate(layout.layers(rank.pp)):
        claimed: set[str] = set()
        for rule in rules(layout):
            if rule.held == "layer":
                yield from _in_layer(layout, rule, shapes, rank, (local, layer), claimed)


def _in_layer(
    layout: Layout, rule: Rule, shapes: Shapes, rank: Rank, layer: tuple[int, int], claimed: set[str]
) -> Iterator[Placed]:
    if rule.beside and not any(_filled(name, layer[1]) in shapes for name in rule.beside):
        return
    experts: tuple[int | None, ...] = layout.experts(rank.ep) if "{expert}" in rule.sources[0] else (None,)
    slots = [tuple(_filled(source, layer[1], expert) for source in rule.sources) for expert in experts]
    if not slots or any(source not in shapes or source in claimed for slot in slots for source in slot):
        return
    claimed.update(source for slot in slots for source in slot)
    # SGLang numbers layers and experts as the model does, Megatron as its stage and its rank do
    shown = layer[1] if layout.engine == "sglang" else layer[0]
    if rule.stacked:
        yield Placed(rule=rule, name=_filled(rule.name, shown), slots=tuple(slots))
        return
    for at, slot in enumerate(slots):
        name = _filled(rule.name, shown, experts[at]).replace("{slot}", str(at))
        yield Placed(rule=rule, name=name, slots=(slot,))


def _shard(layout: Layout, placed: Placed, shapes: Shapes, rank: Rank) -> Shard:
    parts, part = layout.parts(placed.rule, rank)
    pieces: list[Piece] = []
    found: set[tuple[int, ...]] = set()
    for slot, sources in enumerate(placed.slots):
        held, shape = cut(layout, placed.rule, sources, shapes, parts, part)
        pieces += [msgspec.structs.replace(p, slot=slot) if placed.rule.stacked else p for p in held]
        found.add(shape)
        if len(found) > 1:
            raise BadLayout(
                f"tensor {sources[0]} has shape {list(shapes[sources[0]])}, {placed.slots[0][0]} "
                f"{list(shapes[placed.slots[0][0]])}; {placed.name} stacks them"
            )
    (shape,) = found
    whole = (len(placed.slots), *shape) if placed.rule.stacked else shape
    return Shard(name=placed.name, rank=rank, shape=whole, pieces=tuple(pieces), like=placed.slots[0][0])


def _partner(layout: Layout, shapes: Shapes, name: str) -> str:
    """Which missing tensor is the reason that `name` has no rule; empty: another reason."""
    for rule in rules(layout):
        for source in rule.sources:
            place = _pattern(source).fullmatch(name)
            for other in rule.sources if place else ():
                fields = place.groupdict() if place else {}
                full = functools.reduce(lambda text, f: text.replace("{" + f + "}", fields[f]), fields, other)
                if full not in shapes:
                    return f" without {full}"
    return ""


@functools.lru_cache(maxsize=4096)
def _pattern(source: str) -> re.Pattern[str]:
    text = re.escape(source)
    for field in ("layer", "expert"):
        text = text.replace(re.escape("{" + field + "}"), rf"(?P<{field}>\d+)")
    return re.compile(text)


def _filled(name: str, layer: int, expert: int | None = None) -> str:
    return name.replace("{layer}", str(layer)).replace("{expert}", str(expert))
