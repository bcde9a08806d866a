"""A layout carried out on a model's shapes: for each rank, its shards, and the pieces of full tensors in each.

Pure integers and names. Gathering and scattering are the same pieces read in the two directions.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator

import msgspec

from syncline.contract.artefact import parts
from syncline.contract.plan import PrecisionPlan
from syncline.contract.sharding.adapters import adapters
from syncline.contract.sharding.cuts import Piece, Shapes, cut
from syncline.contract.sharding.grid import BadLayout, Rank
from syncline.contract.sharding.layout import Layout, Rule
from syncline.contract.sharding.lowbit import check_blocks, cut_parts, entries_of
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


class Sharding:
    """`layout` on a model: what each rank holds, computed when asked for.

    shapes  checkpoint name -> shape of the full tensors: base, adapter or both; low-bit weights as they were before
    plan    says which of them are low-bit and lie as codes and scales; None: none
    """

    def __init__(self, layout: Layout, shapes: Shapes, plan: PrecisionPlan | None = None) -> None:
        self.layout = layout
        self.weights = dict(shapes)
        self._low = {e.name: e for e in plan.low_bit() if e.name in shapes} if plan else {}
        for name, entry in self._low.items():
            if entry.shape != tuple(shapes[name]):
                raise BadLayout(f"tensor {name} has shape {list(shapes[name])}, the plan {list(entry.shape)}")
        self._on = functools.lru_cache(maxsize=4)(self._computed)

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Checkpoint name -> shape of the full tensors as they lie in the artefact."""
        found = {name: shape for name, shape in self.weights.items() if name not in self._low}
        return found | {part.name: part.shape for entry in self._low.values() for part in parts(entry)}

    def on(self, index: int) -> tuple[Shard, ...]:
        """What rank `index` holds, in the order of rules and layers.

        Raises `BadLayout` naming the tensor, the group, its size and the legal ones.
        """
        return self._on(index)

    def pairs(self, index: int) -> Iterator[tuple[Shard, tuple[Shard, ...]]]:
        """What rank `index` holds before quantisation, and of low-bit weights the shards of codes and scales of it.

        Raises as `on`.
        """
        rank = self.layout.grid.rank(index)
        for placed in placed_on(self.layout, self.weights, rank):
            yield _shard(self.layout, placed, self.weights, rank), self._low_bit(placed, rank)

    def check(self) -> None:
        """Raises `BadLayout` for a full tensor that no rule of the layout covers, and for what `on` refuses."""
        if self.layout.model.tied and "lm_head.weight" in self.weights:
            raise BadLayout("tensor lm_head.weight: the model ties it to the embedding, and it is there")
        covered: set[str] = set()
        seen: set[tuple[int, int]] = set()
        for rank in self.layout.grid.ranks():
            if (rank.pp, rank.ep) not in seen:
                seen.add((rank.pp, rank.ep))
                covered.update(
                    s for p in placed_on(self.layout, self.weights, rank) for slot in p.slots for s in slot
                )
                self.on(rank.index)
        for name in sorted(self.weights):
            if name not in covered:
                why = _partner(self.layout, self.weights, name)
                raise BadLayout(f"tensor {name}: {self.layout.engine} has no rule for it{why}")

    def _computed(self, index: int) -> tuple[Shard, ...]:
        return tuple(shard for wide, low in self.pairs(index) for shard in low or (wide,))

    def _low_bit(self, placed: Placed, rank: Rank) -> tuple[Shard, ...]:
        """Codes and scales of the weights in `placed`; empty: they are wide."""
        base = _shard(self.layout, placed, self.weights, rank)
        low = [entry for slot in placed.slots for entry in entries_of(slot, self._low)]
        if not low:
            return ()
        each = len(placed.slots[0])
        if len(low) < each * len(placed.slots):
            raise BadLayout(f"tensor {low[0].name} is low-bit, and others in {placed.name} are wide")
        for at in range(0, len(low), each):
            check_blocks(
                self.layout, placed.rule, tuple(low[at : at + each]), self.layout.parts(placed.rule, rank)[0]
            )
        cuts = cut_parts(base.name, base.shape, base.pieces, tuple(low), each)
        return tuple(
            Shard(name=name, rank=rank, shape=shape, pieces=pieces, like=like)
            for name, shape, pieces, like in cuts
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
    if not experts or any(_filled(source, layer[1], experts[0]) not in shapes for source in rule.sources):
        return
    slots = [tuple(_filled(source, layer[1], expert) for source in rule.sources) for expert in experts]
    if any(source not in shapes or source in claimed for slot in slots for source in slot):
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
