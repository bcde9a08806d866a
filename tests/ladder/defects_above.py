"""Named defects of levels 5 to 9: request state, live updates, training steps, runs, performance. See `defects`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from breaking import Broken, Defect, around, result
from torch import Tensor

from syncline.contract.job import JobSpec
from syncline.contract.precision import Gemm
from syncline.numerics import linear
from syncline.reference import low_bit
from syncline.rollout.engines import batching, rows, slots, states, weights
from syncline.trainer import batch
from syncline.trainer.engines import state


# ---- 5: routes and request state --------------------------------------------------------------------------------
def _state_of(kind: str, change: Callable[[Tensor], Tensor]) -> Broken:
    """What a slot keeps of a prefill, changed."""

    def placed(original: Callable[..., None], self: Any, to: Tensor, source: Any, index: Tensor) -> None:
        original(self, to, source, index)
        for key, buffer in self.buffers.items():
            if key[0] == kind:
                buffer[to] = change(buffer[to])

    return around(states.StateLayer, "place", placed)


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
        around(slots.SlotCache, "advance", _fades),
    ),
    Defect(
        "sparse-attention index off by one",
        5,
        "glm52",
        "tiny-glm",
        around(slots.ColumnLayer, "place", _index_off_by_one),
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
    Defect("context off by one", 5, "bf16", "tiny-dense", around(slots.ColumnLayer, "place", _repeated_key)),
    Defect(
        "routes recorded for another layer",
        5,
        "bf16",
        "tiny-moe",
        around(
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
        around(
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
        around(batching.Batch, "_starts", lambda original, self, n: np.zeros(n, np.int64)),
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

    return around(weights.Weights, "load", load)


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

        with around(weights.Weights, "load", load)():
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
        around(batching.Batch, "_recompute", lambda original, self, which: None),
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
        result(batch, "sample_of", _two_tokens_off),
        asked=_replays,
    ),
    Defect(
        "DGrad through the wrong weight",
        7,
        "int4_qat_w4a16",
        "tiny-moe",
        around(linear, "_dgrad", _original_weight),
    ),
    Defect(
        "WGrad without its last tile",
        7,
        "unified_fp8",
        "tiny-dense",
        around(linear, "_wgrad", _without_last),
    ),
    Defect(
        "advantages with the sign turned",
        7,
        "bf16",
        "tiny-dense",
        result(batch, "group_advantages", _negated),
    ),
    Defect("moments rounded to BF16", 7, "bf16", "tiny-moe", around(state.Live, "apply", _narrow_moments)),
    Defect(
        "betas exchanged",
        7,
        "bf16",
        "tiny-dense",
        around(
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
        around(state.Live, "apply", lambda original, self, update: _scaled(original, self, update)),
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

    return around(state, "write_wide", change)


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
        around(state.Live, "apply", _runaway_rate),
    ),
)

# ---- 9: performance ---------------------------------------------------------------------------------------------
PROFILES = (
    Defect(
        "scales constructed anew for every product",
        9,
        "unified_fp8",
        "tiny-dense",
        around(low_bit.LowBit, "copies", lambda original, self: self.fresh(self.how)),
    ),
)

ABOVE = (*REQUESTS, *UPDATES, *STEPS, *RUNS, *PROFILES)
