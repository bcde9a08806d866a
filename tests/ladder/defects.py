"""Named defects, each of which breaks one thing in the system from outside, for tests alone.

A defect has the level at which it must be found: not later, and with every earlier level holding.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import msgspec
import numpy as np
import torch
from torch import Tensor

from syncline.contract import plan
from syncline.contract.job import JobSpec
from syncline.contract.precision import Gemm, PrecisionContract
from syncline.contract.recipes import RECIPES
from syncline.lab.ladder.records import Level
from syncline.numerics import blockwise, fp8_block, gemm, linear, mxfp, nvfp4
from syncline.reference import low_bit, packed
from syncline.reference.model import TextCodec
from syncline.rollout.engines import batching, rows, slots, weights
from syncline.trainer import batch
from syncline.trainer.engines import state
from syncline.trainer.engines import torch as torch_engine

Broken = Callable[[], AbstractContextManager[Any]]


@dataclasses.dataclass(frozen=True)
class Defect:
    """`broken`: the context in which the system has it. `asked`: the spec with it, for those of a contract."""

    name: str
    level: Level
    recipe: str
    model: str
    broken: Broken = nullcontext
    asked: Callable[[JobSpec], JobSpec] = lambda spec: spec


def _around(owner: Any, name: str, change: Callable[..., Any]) -> Broken:
    """`owner.name` replaced by `change(original, *args)`."""

    @contextmanager
    def broken() -> Iterator[None]:
        original = getattr(owner, name)

        def changed(*args: Any, **kwargs: Any) -> Any:
            return change(original, *args, **kwargs)

        with patch.object(owner, name, changed):
            yield

    return broken


def _result(owner: Any, name: str, after: Callable[[Any], Any]) -> Broken:
    """What `owner.name` returns, changed."""
    return _around(owner, name, lambda original, *args, **kwargs: after(original(*args, **kwargs)))


# ---- 1: contracts -----------------------------------------------------------------------------------------------
def contract_with(**changes: Any) -> Callable[[JobSpec], JobSpec]:
    """The spec with its recipe's contract changed and written out."""

    def asked(spec: JobSpec) -> JobSpec:
        assert spec.precision.recipe is not None
        changed = msgspec.structs.replace(RECIPES[spec.precision.recipe], **changes)
        precision = spec.precision.model_copy(
            update={"recipe": None, "custom": json.loads(msgspec.json.encode(changed))}
        )
        return spec.model_copy(update={"precision": precision})

    return asked


def _family(recipe: str, **changes: Any) -> Callable[[JobSpec], JobSpec]:
    contract: PrecisionContract = RECIPES[recipe]
    return contract_with(
        families=(msgspec.structs.replace(contract.families[0], **changes), *contract.families[1:])
    )


def _lag(spec: JobSpec) -> JobSpec:
    limited = contract_with(max_lag=0)(spec)
    return limited.model_copy(update={"schedule": limited.schedule.model_copy(update={"max_lag": 2})})


CONTRACTS = (
    Defect(
        "no baseline stated",
        1,
        "unified_fp8",
        "tiny-dense",
        asked=contract_with(expected=type(RECIPES["bf16"].expected)()),
    ),
    Defect(
        "a pattern that matches nothing",
        1,
        "unified_fp8",
        "tiny-dense",
        asked=_family("unified_fp8", match=("model.layers.*.linear.weight",)),
    ),
    Defect(
        "a group that does not divide",
        1,
        "int4_qat_w4a16",
        "tiny-moe",
        asked=_family(
            "int4_qat_w4a16",
            weight=msgspec.structs.replace(RECIPES["int4_qat_w4a16"].families[0].weight, columns=48),
        ),
    ),
    Defect(
        "missing exception: the router in few bits",
        1,
        "int4_qat_w4a16",
        "tiny-moe",
        _around(plan, "sensitive", lambda original, name: "" if ".gate." in name else original(name)),
        asked=_family("int4_qat_w4a16", match=("model.layers.*.mlp.*weight",)),
    ),
    Defect("more lag than the recipe allows", 1, "glm52", "tiny-glm", asked=_lag),
)


# ---- 2: quantizers and converter --------------------------------------------------------------------------------
def _wide_groups(original: Callable[..., Tensor], x: Tensor, n: int, columns: int) -> Tensor:
    """Two groups share what each should have alone."""
    amax = original(x, n, columns)
    return (
        amax.view(*amax.shape[:-1], -1, 2)
        .amax(-1, keepdim=True)
        .expand(*amax.shape[:-1], -1, 2)
        .reshape(amax.shape)
    )


def _swapped_nibbles(codes: Tensor) -> Tensor:
    return (codes >> 4) | (codes << 4)


def _transposed_scales(found: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    codes, scale = found
    return codes, scale.transpose(-1, -2).contiguous().view(scale.shape)


def _exchanged(one: str, other: str) -> Broken:
    """The trainer's export writes two tensors under each other's name."""

    def change(
        original: Callable[..., str], path: Any, tensors: Mapping[str, Tensor], dtype: torch.dtype
    ) -> str:
        found = dict(tensors)
        for name in tensors:
            if one in name and name.replace(one, other) in tensors:
                partner = name.replace(one, other)
                found[name], found[partner] = tensors[partner], tensors[name]
        return original(path, found, dtype)

    return _around(state, "write_wide", change)


def _swapped_halves(
    original: Callable[..., str], path: Any, tensors: Mapping[str, Tensor], dtype: torch.dtype
) -> str:
    """The two tensor-parallel shards of one projection in each other's place."""
    found = {
        name: torch.roll(tensor, len(tensor) // 2, 0)
        if "layers.1." in name and "q_proj.weight" in name
        else tensor
        for name, tensor in tensors.items()
    }
    return original(path, found, dtype)


CONVERSION = (
    Defect(
        "wrong scale group", 2, "int4_qat_w4a16", "tiny-moe", _around(blockwise, "block_amax", _wide_groups)
    ),
    Defect(
        "swapped nibbles", 2, "mxfp4_qat_w4a16", "tiny-moe", _result(mxfp, "encode_e2m1", _swapped_nibbles)
    ),
    Defect("transposed scales", 2, "mxfp8", "tiny-moe", _result(mxfp, "encode_under", _transposed_scales)),
    Defect(
        "another rounding rule",
        2,
        "mxfp4_qat_w4a16",
        "tiny-moe",
        _around(
            mxfp,
            "scale_bytes",
            lambda original, amax, scheme: original(amax, msgspec.structs.replace(scheme, rule="floor")),
        ),
    ),
    Defect(
        "outer scale of half the range",
        2,
        "nvfp4_w4a4",
        "tiny-moe",
        _result(nvfp4, "outer_scale", lambda scale: scale * 2),
    ),
    Defect(
        "codes a step too large",
        2,
        "unified_fp8",
        "tiny-dense",
        _around(
            fp8_block, "encode_under", lambda original, x, amax, scheme: original(x * 1.0625, amax, scheme)
        ),
    ),
    Defect("mis-mapped expert", 2, "int4_qat_w4a16", "tiny-moe", _exchanged("experts.0.", "experts.1.")),
    Defect(
        "swapped tensor-parallel shards",
        2,
        "bf16",
        "tiny-dense",
        _around(state, "write_wide", _swapped_halves),
    ),
    Defect("gate written as up", 2, "bf16", "tiny-dense", _exchanged("gate_proj", "up_proj")),
    Defect(
        "adapter of another module", 2, "lora_frozen_mxfp4", "tiny-kimi", _exchanged("layers.0.", "layers.1.")
    ),
)


# ---- 3: one operator --------------------------------------------------------------------------------------------
def _neighbours_scale(original: Callable[..., Tensor], x: Any, w: Any, offsets: Tensor) -> Tensor:
    return original(x, w._replace(scale=w.scale.roll(1, -1)), offsets)


OPERATORS = (
    Defect(
        "a kernel that reads the neighbour's scale",
        3,
        "mxfp8",
        "tiny-moe",
        _around(gemm, "_partial_sums", _neighbours_scale),
    ),
    Defect(
        "an activation that stays wide",
        3,
        "unified_fp8",
        "tiny-dense",
        _around(packed, "quantize_rows", lambda original, x, scheme, name: x),
    ),
    Defect(
        "accumulation in BF16",
        3,
        "int4_qat_w4a16",
        "tiny-moe",
        _result(packed, "wide", lambda y: y.bfloat16().float()),
    ),
    Defect(
        "rows of the neighbouring expert",
        3,
        "mxfp4_qat_w4a16",
        "tiny-moe",
        _result(packed, "values", lambda w: w.roll(1, 0)),
    ),
)


# ---- 4: fixed prefixes ------------------------------------------------------------------------------------------
def _trainer_reads(change: Callable[[Any], Any]) -> Broken:
    return _result(torch_engine, "rows_of", change)


def _earlier(found: Any) -> Any:
    return dataclasses.replace(found, column_N=(found.column_N - 1).clamp(min=0))


def _hotter(found: Any) -> Any:
    return dataclasses.replace(found, temperature_N=found.temperature_N * 1.1)


def _padded_positions(found: Any) -> Any:
    """A hole in the positions, as where pads were counted."""
    return dataclasses.replace(found, positions_BT=found.positions_BT + 3 * (found.positions_BT > 4))


def _alpha_lost(original: Callable[..., Any], model: Any, plan_: Any, adapter: Any, seed: int) -> Any:
    return original(model, plan_, msgspec.structs.replace(adapter, alpha=float(adapter.rank)), seed)


def _experts_swapped(original: Callable[..., None], self: Any, *args: Any, **kwargs: Any) -> None:
    """Two experts of the first layer lie in each other's place, where they are written and where they are read back."""
    original(self, *args, **kwargs)
    views = self.packed.views
    for name in [name for name in views if "layers.0.mlp.experts.0." in name]:
        other = name.replace("experts.0.", "experts.1.")
        views[name], views[other] = views[other], views[name]


PREFIXES = (
    Defect(
        "experts of one layer packed in another order",
        4,
        "bf16",
        "tiny-moe",
        _around(weights.Weights, "__init__", _experts_swapped),
    ),
    Defect("token shift", 4, "bf16", "tiny-dense", _trainer_reads(_earlier)),
    Defect("temperature mismatch", 4, "unified_fp8", "tiny-moe", _trainer_reads(_hotter)),
    Defect("padded position ids", 4, "bf16", "tiny-moe", _trainer_reads(_padded_positions)),
    Defect("BOS twice", 4, "bf16", "tiny-dense", _result(TextCodec, "encode", lambda ids: [ids[0], *ids])),
    Defect("alpha lost", 4, "lora_frozen_mxfp4", "tiny-kimi", _around(weights, "attach", _alpha_lost)),
)


# ---- 5: routes and request state --------------------------------------------------------------------------------
def _state_of(kind: str, change: Callable[[Tensor], Tensor]) -> Broken:
    """What a slot keeps of a prefill, changed."""

    def placed(original: Callable[..., None], self: Any, to: Tensor, source: Any, index: Tensor) -> None:
        original(self, to, source, index)
        for key, buffer in self.buffers.items():
            if key[0] == kind:
                buffer[to] = change(buffer[to])

    return _around(slots.StateLayer, "place", placed)


def _repeated_key(original: Callable[..., None], self: Any, to: Tensor, source: Any, index: Tensor) -> None:
    """The context's last token stands where the one before it was, as if it had been written one column early."""
    original(self, to, source, index)
    end = self.geometry.column
    for buffer in self.buffers.values():
        for row in to.tolist():
            buffer[row].select(-2, end - 2).copy_(buffer[row].select(-2, end - 1))


def _index_off_by_one(
    original: Callable[..., None], self: Any, to: Tensor, source: Any, index: Tensor
) -> None:
    """Index keys of the token before: another choice from the first step on, while keys and values are right."""
    original(self, to, source, index)
    for name, buffer in self.buffers.items():
        if name.startswith("indexer_keys"):
            buffer[to] = buffer[to].roll(1, -2)


def _fades(original: Callable[..., None], self: Any) -> None:
    """A state that loses a part of itself in every step."""
    original(self)
    for layer in self.slot_layers:
        for key, buffer in layer.buffers.items():
            if key[0] == "recurrent":
                buffer *= 0.9


REQUESTS = (
    Defect(
        "recurrent state that drifts",
        5,
        "lora_frozen_mxfp4",
        "tiny-kimi",
        _around(slots.SlotCache, "advance", _fades),
    ),
    Defect(
        "sparse-attention index off by one",
        5,
        "glm52",
        "tiny-glm",
        _around(slots.ColumnLayer, "place", _index_off_by_one),
    ),
    Defect(
        "convolution window off by one",
        5,
        "qwen38",
        "tiny-hybrid",
        _state_of("conv", lambda s: s.roll(1, -1)),
    ),
    Defect(
        "recurrent state lost", 5, "lora_frozen_mxfp4", "tiny-kimi", _state_of("recurrent", torch.zeros_like)
    ),
    Defect("context off by one", 5, "bf16", "tiny-dense", _around(slots.ColumnLayer, "place", _repeated_key)),
    Defect(
        "routes recorded for another layer",
        5,
        "bf16",
        "tiny-moe",
        _around(
            rows.RowTable,
            "record_routes",
            lambda original, self, n, routes: original(self, n, routes[:, ::-1]),
        ),
    ),
    Defect(
        "routes recorded for the neighbouring row",
        5,
        "unified_fp8",
        "tiny-moe",
        _around(
            rows.RowTable,
            "record_routes",
            lambda original, self, n, routes: original(self, n, routes[[*range(1, n), 0]]),
        ),
    ),
    Defect(
        "neighbours in the batch are attended to",
        5,
        "bf16",
        "tiny-dense",
        _around(batching.Batch, "_mask", lambda original, self, n: None),
    ),
)


# ---- 6: live updates --------------------------------------------------------------------------------------------
def _kept(chosen: Callable[[str], bool]) -> Broken:
    """From an engine's third version on, the tensors that are `chosen` stay those of the version before."""

    def load(original: Callable[..., str], self: Any, *args: Any, **kwargs: Any) -> str:
        held = {**self.packed.slots, **self.packed.views}
        before = {name: t.clone() for name, t in held.items() if chosen(name)} if self._held else {}
        done = original(self, *args, **kwargs)
        for name, tensor in before.items():
            held[name].copy_(tensor)
        return done

    return _around(weights.Weights, "load", load)


def _unread(chosen: Callable[[str], bool]) -> Broken:
    """From the third version on, the tensors that are `chosen` stay those of the second, in whatever buffer."""

    @contextmanager
    def broken() -> Iterator[None]:
        kept: list[dict[str, Tensor]] = []

        def load(original: Callable[..., str], self: Any, *args: Any, **kwargs: Any) -> str:
            done = original(self, *args, **kwargs)
            held = {n: t for n, t in {**self.packed.slots, **self.packed.views}.items() if chosen(n)}
            if len(kept) < 2:
                kept.append({name: t.clone() for name, t in held.items()})
            for name, tensor in kept[-1].items():
                held[name].copy_(tensor)
            return done

        with _around(weights.Weights, "load", load)():
            yield

    return broken


UPDATES = (
    Defect(
        "stale derived scale",
        6,
        "int4_qat_w4a16",
        "tiny-moe",
        _kept(lambda name: name.endswith("experts.1.down_proj.weight_scale")),
    ),
    Defect(
        "adapter installed and not read",
        6,
        "lora_frozen_mxfp4",
        "tiny-kimi",
        _unread(lambda name: ".lora_" in name),
    ),
    Defect(
        "mixed adapter version",
        6,
        "lora_frozen_mxfp4",
        "tiny-kimi",
        _kept(lambda name: ".lora_" in name and "layers.0." in name),
    ),
    Defect("a version that is a label alone", 6, "bf16", "tiny-dense", _unread(lambda name: True)),
    Defect(
        "one fused tensor of the version before", 6, "bf16", "tiny-moe", _kept(lambda name: "k_proj" in name)
    ),
    Defect(
        "context of the version before, called recomputed",
        6,
        "bf16",
        "tiny-dense",
        _around(batching.Batch, "_recompute", lambda original, self, which: None),
    ),
)


# ---- 7: one training step ---------------------------------------------------------------------------------------
def _original_weight(original: Callable[..., Tensor], g: Tensor, offsets: Tensor, weight: Any) -> Tensor:
    """DGrad through the masters where FProp read their codes."""
    return original(
        g, offsets, dataclasses.replace(weight, how=dataclasses.replace(weight.how, dgrad=Gemm()))
    )


def _narrow_moments(original: Callable[..., float], self: Any, update: int) -> float:
    norm = original(self, update)
    for kept in self.optimizer.state.values():
        for name in ("exp_avg", "exp_avg_sq"):
            kept[name] = kept[name].bfloat16().float()
    return norm


def _without_last(
    original: Callable[..., Tensor], g: Tensor, saved: Any, offsets: Tensor, weight: Any
) -> Tensor:
    """WGrad without the last row, as where a tile was cut off."""
    g = g.clone()
    g[-len(g) // 4 :] = 0
    return original(g, saved, offsets, weight)


def _negated(found: Any) -> Any:
    return None if found is None else [None if a is None else -a for a in found]


def _replays(spec: JobSpec) -> JobSpec:
    return spec.model_copy(update={"trainer": spec.trainer.model_copy(update={"router_replay": True})})


def _two_tokens_off(sample: Any) -> Any:
    """What is trained on goes to the experts of other tokens; what is scored does not."""
    assert sample.routes is not None
    ids = np.frombuffer(sample.routes.data, np.uint8).reshape(sample.routes.shape)
    return dataclasses.replace(
        sample, routes=dataclasses.replace(sample.routes, data=np.roll(ids, 2, 0).tobytes())
    )


STEPS = (
    Defect(
        "router replay misaligned",
        7,
        "bf16",
        "tiny-moe",
        _result(batch, "sample_of", _two_tokens_off),
        asked=_replays,
    ),
    Defect(
        "DGrad through the wrong weight",
        7,
        "int4_qat_w4a16",
        "tiny-moe",
        _around(linear, "_dgrad", _original_weight),
    ),
    Defect(
        "WGrad without its last tile",
        7,
        "unified_fp8",
        "tiny-dense",
        _around(linear, "_wgrad", _without_last),
    ),
    Defect(
        "advantages with the sign turned",
        7,
        "bf16",
        "tiny-dense",
        _result(batch, "group_advantages", _negated),
    ),
    Defect("moments rounded to BF16", 7, "bf16", "tiny-moe", _around(state.Live, "apply", _narrow_moments)),
    Defect(
        "betas exchanged",
        7,
        "bf16",
        "tiny-dense",
        _around(
            state,
            "make_optimizer",
            lambda original, masters, spec: original(
                masters, spec.model_copy(update={"betas": spec.betas[::-1]})
            ),
        ),
    ),
    Defect(
        "the adapter's gradient without its scale",
        7,
        "lora_frozen_mxfp4",
        "tiny-kimi",
        _around(state.Live, "apply", lambda original, self, update: _scaled(original, self, update)),
    ),
)


def _scaled(original: Callable[..., float], self: Any, update: int) -> float:
    for parameter in self._model.values():
        if parameter.grad is not None:
            parameter.grad *= 0.5
    return original(self, update)


# ---- 8: a run ---------------------------------------------------------------------------------------------------
def _falls_behind() -> Broken:
    """From the tenth version on, exports are those of the eighth: labels move on and weights do not."""
    kept: dict[str, Mapping[str, Tensor]] = {}

    def change(
        original: Callable[..., str], path: Any, tensors: Mapping[str, Tensor], dtype: torch.dtype
    ) -> str:
        number = int(path.parent.name.partition(".")[2])
        if number <= 8:
            kept[path.name] = {name: tensor.clone() for name, tensor in tensors.items()}
        return original(path, tensors if number < 10 else kept[path.name], dtype)

    return _around(state, "write_wide", change)


def _runaway_rate(original: Callable[..., float], self: Any, update: int) -> float:
    """A learning rate that a schedule multiplies late in the run."""
    if update >= 9:
        self._spec = self._spec.model_copy(update={"lr": 1.0})
    return original(self, update)


RUNS = (
    Defect("versions that fall behind their labels", 8, "bf16", "tiny-dense", _falls_behind()),
    Defect(
        "a learning rate that runs away",
        8,
        "int4_qat_w4a16",
        "tiny-moe",
        _around(state.Live, "apply", _runaway_rate),
    ),
)

# ---- 9: performance ---------------------------------------------------------------------------------------------
PROFILES = (
    Defect(
        "scales constructed anew for every product",
        9,
        "unified_fp8",
        "tiny-dense",
        _around(low_bit.LowBit, "copies", lambda original, self: self.fresh(self.how)),
    ),
)

DEFECTS = (*CONTRACTS, *CONVERSION, *OPERATORS, *PREFIXES, *REQUESTS, *UPDATES, *STEPS, *RUNS, *PROFILES)
