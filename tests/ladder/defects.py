"""Named defects, each of which breaks one thing in the system from outside, for tests alone.

Levels 1 to 4 are here, the others in `defects_above`. A defect has the level at which it must be found: not later, and
with every earlier level holding.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from typing import Any

import msgspec
import torch
from breaking import Broken, around, result
from breaking import Defect as Defect
from defects_above import ABOVE
from torch import Tensor

from syncline.contract import plan
from syncline.contract.job import JobSpec
from syncline.contract.precision import PrecisionContract
from syncline.contract.recipes import RECIPES
from syncline.numerics import blockwise, fp8_block, gemm, mxfp, nvfp4
from syncline.reference import packed
from syncline.reference.model import TextCodec
from syncline.rollout.engines import weights
from syncline.trainer.engines import state
from syncline.trainer.engines import torch as torch_engine


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
        around(plan, "sensitive", lambda original, name: "" if ".gate." in name else original(name)),
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

    return around(state, "write_wide", change)


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
        "wrong scale group", 2, "int4_qat_w4a16", "tiny-moe", around(blockwise, "block_amax", _wide_groups)
    ),
    Defect(
        "swapped nibbles", 2, "mxfp4_qat_w4a16", "tiny-moe", result(mxfp, "encode_e2m1", _swapped_nibbles)
    ),
    Defect("transposed scales", 2, "mxfp8", "tiny-moe", result(mxfp, "encode_under", _transposed_scales)),
    Defect(
        "another rounding rule",
        2,
        "mxfp4_qat_w4a16",
        "tiny-moe",
        around(
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
        result(nvfp4, "outer_scale", lambda scale: scale * 2),
    ),
    Defect(
        "codes a step too large",
        2,
        "unified_fp8",
        "tiny-dense",
        around(
            fp8_block, "encode_under", lambda original, x, amax, scheme: original(x * 1.0625, amax, scheme)
        ),
    ),
    Defect("mis-mapped expert", 2, "int4_qat_w4a16", "tiny-moe", _exchanged("experts.0.", "experts.1.")),
    Defect(
        "swapped tensor-parallel shards",
        2,
        "bf16",
        "tiny-dense",
        around(state, "write_wide", _swapped_halves),
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
        around(gemm, "_partial_sums", _neighbours_scale),
    ),
    Defect(
        "an activation that stays wide",
        3,
        "unified_fp8",
        "tiny-dense",
        around(packed, "quantize_rows", lambda original, x, scheme, name: x),
    ),
    Defect(
        "accumulation in BF16",
        3,
        "int4_qat_w4a16",
        "tiny-moe",
        result(packed, "wide", lambda y: y.bfloat16().float()),
    ),
    Defect(
        "rows of the neighbouring expert",
        3,
        "mxfp4_qat_w4a16",
        "tiny-moe",
        result(packed, "values", lambda w: w.roll(1, 0)),
    ),
)


# ---- 4: fixed prefixes ------------------------------------------------------------------------------------------
def _trainer_reads(change: Callable[[Any], Any]) -> Broken:
    return result(torch_engine, "rows_of", change)


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
        around(weights.Weights, "__init__", _experts_swapped),
    ),
    Defect("token shift", 4, "bf16", "tiny-dense", _trainer_reads(_earlier)),
    Defect("temperature mismatch", 4, "unified_fp8", "tiny-moe", _trainer_reads(_hotter)),
    Defect("padded position ids", 4, "bf16", "tiny-moe", _trainer_reads(_padded_positions)),
    Defect("BOS twice", 4, "bf16", "tiny-dense", result(TextCodec, "encode", lambda ids: [ids[0], *ids])),
    Defect("alpha lost", 4, "lora_frozen_mxfp4", "tiny-kimi", around(weights, "attach", _alpha_lost)),
)

DEFECTS = (*CONTRACTS, *CONVERSION, *OPERATORS, *PREFIXES, *ABOVE)
