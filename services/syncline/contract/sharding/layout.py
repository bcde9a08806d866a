"""`Layout`: everything that decides which piece of which full tensor lies where, in one value with one digest."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from syncline.contract.sharding.grid import BadLayout, Grid, Rank

Engine = Literal["megatron_local", "megatron_te", "sglang"]
Unit = Literal["", "heads", "kv_heads"]
SGLANG_VOCAB = 64
"""SGLang pads the vocabulary to a multiple of this, or of tp times this where tp does not divide the result."""


class Rule(msgspec.Struct, frozen=True, kw_only=True):
    """One parameter of an engine, and the full tensors that it is made of.

    name        of the parameter on its rank; `{layer}`: index within the stage, `{slot}`: expert's index on the rank
    sources     checkpoint names in the order in which they lie in it; `{layer}`, `{expert}`: indices in the whole model
    axis        along which the sources are cut, and lie behind one another
    over        group whose ranks hold a part each; "": every rank holds all of it
    units       per source, what one rank holds whole; empty: any equal parts
    join        parts: this rank's part of each source, one after the other (gate/up; SGLang's q/k/v)
                groups: for each KV head its q, k and v rows, then cut as one matrix (Megatron's linear_qkv)
                shared: all sources are equal, and the parameter is one of them (A of an adapter on a fused matrix)
    replicate   where there are more ranks than KV heads, neighbours hold the same one
    pad         zero rows are added at the end, up to `Layout.padded`
    held        by which stages
    stacked     the rank's experts lie in one parameter with a leading axis
    beside      only in layers that have one of these tensors; empty: in all
    adapter     how LoRA on it lies: as the weight's axes are cut, or whole on every rank; none: it has none here
    """

    name: str
    sources: tuple[str, ...]
    axis: int = 0
    over: Literal["", "tp", "etp"] = ""
    units: tuple[Unit, ...] = ()
    join: Literal["parts", "groups", "shared"] = "parts"
    replicate: bool = False
    pad: bool = False
    held: Literal["first", "layer", "last"] = "layer"
    stacked: bool = False
    beside: tuple[str, ...] = ()
    adapter: Literal["cut", "whole", "none"] = "cut"


class Dimensions(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What of a model's config.json decides where tensors are cut."""

    layers: int
    heads: int
    kv_heads: int
    experts: int = 0  # routed experts; 0: none
    latent: bool = False  # multi-head latent attention (MLA)
    tied: bool = False  # the output head is the embedding


def dimensions(config: Mapping[str, Any]) -> Dimensions:
    """The dimensions in a checkpoint's config.json. Raises `BadLayout` naming a key that is missing or no number."""
    nested = config.get("text_config")
    text: Mapping[str, Any] = nested if isinstance(nested, Mapping) else config
    heads = _number(text, "num_attention_heads")
    tied = text.get("tie_word_embeddings", config.get("tie_word_embeddings", False))
    if not isinstance(tied, bool):
        raise BadLayout(f"config.json: tie_word_embeddings is {tied!r}")
    return Dimensions(
        layers=_number(text, "num_hidden_layers"),
        heads=heads,
        kv_heads=_number(text, "num_key_value_heads", heads),
        experts=_number(text, ("n_routed_experts", "num_experts", "num_local_experts"), 0),
        latent=text.get("kv_lora_rank") is not None,
        tied=tied,
    )


def _number(config: Mapping[str, Any], keys: str | tuple[str, ...], default: int | None = None) -> int:
    for key in (keys,) if isinstance(keys, str) else keys:
        value = config.get(key)
        if value is not None:
            if not isinstance(value, int) or isinstance(value, bool) or value < 0:
                raise BadLayout(f"config.json: {key} is {value!r}")
            return value
    if default is None:
        raise BadLayout(f"config.json has no {keys}")
    return default


class Layout(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Where an engine on `grid` holds the tensors of a model with `model`'s dimensions.

    stages      layers per pipeline stage; empty: equal numbers
    experts_of  expert ids per ep rank, in the order of their slots; empty: equal runs
    vocab       Megatron: the vocabulary is padded to a multiple of tp times this; SGLang's rule is fixed
    padding     what padding rows of a shard may hold when it is gathered: zeros, or anything (it is dropped)
    fused       SGLang: the engine's own parameters (qkv_proj, gate_up_proj, w13_weight); False: this rank's part of
                each checkpoint tensor under its own name
    adapters    LoRA on a fused matrix of the trainer: an A and B per projection, or one A shared by all of them
    """

    engine: Engine
    grid: Grid
    model: Dimensions
    stages: tuple[int, ...] = ()
    experts_of: tuple[tuple[int, ...], ...] = ()
    vocab: int = 1
    padding: Literal["zero", "drop"] = "zero"
    fused: bool = True
    adapters: Literal["separate", "shared"] = "separate"

    def __post_init__(self) -> None:
        _check_stages(self)
        _check_experts(self)
        if self.vocab < 1:
            raise BadLayout(f"vocab {self.vocab}: use at least 1")

    def digest(self) -> str:
        """sha256 hex of the canonical JSON form. Two sides with another layout never exchange a shard."""
        return hashlib.sha256(msgspec.json.encode(self)).hexdigest()

    def layers(self, pp: int) -> range:
        """Layers of stage `pp`, as numbered in the whole model."""
        counts = self.stages or (self.model.layers // self.grid.pp,) * self.grid.pp
        return range(sum(counts[:pp]), sum(counts[: pp + 1]))

    def experts(self, ep: int) -> tuple[int, ...]:
        """Ids of the experts on ep rank `ep`, by slot."""
        if self.experts_of:
            return self.experts_of[ep]
        each = self.model.experts // self.grid.ep
        return tuple(range(ep * each, (ep + 1) * each))

    def padded(self, rows: int) -> int:
        """Rows of a vocabulary tensor of `rows` with its padding, over all ranks."""
        multiple = self.vocab * self.grid.tp
        if self.engine == "sglang":
            multiple = SGLANG_VOCAB
            if -(-rows // multiple) * multiple % self.grid.tp:
                multiple *= self.grid.tp
        return -(-rows // multiple) * multiple

    def parts(self, rule: Rule, rank: Rank) -> tuple[int, int]:
        """Into how many parts `rule` cuts, and which of them `rank` holds."""
        match rule.over:
            case "":
                return 1, 0
            case "tp":
                return self.grid.tp, rank.tp
            case "etp":
                return self.grid.etp, rank.etp


def _check_stages(layout: Layout) -> None:
    layers, pp = layout.model.layers, layout.grid.pp
    if layout.stages:
        if len(layout.stages) != pp or sum(layout.stages) != layers or min(layout.stages) < 0:
            raise BadLayout(f"stages {list(layout.stages)}: they must be {pp} and hold {layers} layers")
    elif layers % pp:
        raise BadLayout(
            f"pp {pp} does not divide {layers} layers; legal: {_divisors(layers)}, or state stages"
        )


def _check_experts(layout: Layout) -> None:
    experts, ep = layout.model.experts, layout.grid.ep
    if not layout.experts_of:
        if experts % ep:
            raise BadLayout(f"ep {ep} does not divide {experts} experts; legal: {_divisors(experts)}")
        return
    if len(layout.experts_of) != ep:
        raise BadLayout(f"experts_of has {len(layout.experts_of)} ranks, ep is {ep}")
    seen: dict[int, int] = {}
    for at, ids in enumerate(layout.experts_of):
        for expert in ids:
            if expert in seen:
                raise BadLayout(f"expert {expert} is on ep rank {seen[expert]} and on ep rank {at}")
            if not 0 <= expert < experts:
                raise BadLayout(f"expert {expert} on ep rank {at}: the model has experts 0 to {experts - 1}")
            seen[expert] = at
    if missing := sorted(set(range(experts)) - seen.keys()):
        raise BadLayout(f"expert {missing[0]} is on no ep rank")


def _divisors(number: int) -> str:
    return ", ".join(str(n) for n in range(1, number + 1) if number % n == 0) or "1"
