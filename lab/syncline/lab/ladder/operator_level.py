"""Level 3: one operator. The rollout engine's own module and the trainer's, against products that are written anew.

Three products of the same input: wide (BF16 values, FP64 sums), QDQ (both operands through codes and back, FP64 sums)
and what the engines compute. Kernel and QDQ differ by the order of FP32 additions; QDQ and wide by the quantizers.
Legend: S rows, K contraction, N outputs, E experts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from syncline.contract.schemes import Format, Scheme
from syncline.lab.ladder.records import Check
from syncline.lab.ladder.subject import Subject
from syncline.numerics.quantized import dequantize, outer_scale, quantize
from syncline.reference.packed import PackedLinear, Stack
from syncline.rollout.engines.weights import Weights

ROWS = 24
KERNEL = 2e-6
"""Of the largest output: FP32 additions in another order, over at most a few thousand products."""
STEP: dict[Format, float] = {
    "fp8_block": 2**-4,
    "mxfp8": 2**-3,
    "int4": 1 / 14 + 2**-9,
    "mxfp4": 2**-2,
    "nvfp4": 1 / 5,
}
"""Largest error of one value, as a share of its block's largest magnitude. Half a step of E4M3's and int4's coarsest
values, and what int4's BF16 scale loses; E8M0 under the rule `floor` cuts up to an eighth of a value in E4M3 and a
quarter in E2M1; NVFP4: half the gap between 4 and 6, under a scale in E4M3."""


def checks(subject: Subject) -> Iterator[Check]:
    """The first low-bit tensor of each family, on both sides; nothing to compare in a recipe without families."""
    active = subject.serving()
    wide = subject.wide(subject.masters()) if subject.contract.families else {}
    for family in subject.contract.families:
        owner, stack = next(found for found in active.packed.stacks.items() if found[1].family == family.name)
        x_SK, offsets = _input(stack)
        exact_SN = _product(x_SK, _values(stack), offsets, stack.activation)
        wide_SN = _product(x_SK, _wide(wide, stack), offsets, None)
        top = float(exact_SN.abs().max())
        kernel = _apart(_rollout(active, owner, stack, x_SK, offsets), exact_SN) / top
        yield Check(
            name=f"{family.name}: rollout's kernel against QDQ",
            found=kernel,
            bound=KERNEL,
            source="FP32 additions in another order",
            unit="of the largest output",
            where="" if kernel <= KERNEL else owner,
        )
        noise_SN = _most(x_SK, wide, stack, offsets)
        error = _size(exact_SN - wide_SN) / _size(noise_SN)
        yield Check(
            name=f"{family.name}: QDQ against BF16",
            found=error,
            bound=1,
            source=f"the largest rounding error of {stack.scheme.format}, in every operand",
            unit="of it, root mean square",
            where="" if error <= 1 else owner,
        )


def _input(stack: Stack) -> tuple[Tensor, Tensor]:
    """Rows with BF16 values, some experts with none: x [S, K], offsets [E]."""
    experts = stack.size[0]
    generator = torch.Generator().manual_seed(3)
    x_SK = torch.randn(ROWS, stack.size[-1], generator=generator).bfloat16().float()
    cut = torch.sort(torch.randint(0, ROWS + 1, (experts - 1,), generator=generator)).values
    return x_SK, torch.cat((cut, torch.tensor([ROWS]))).to(torch.int32)


def _rollout(active: Weights, owner: str, stack: Stack, x_SK: Tensor, offsets: Tensor) -> Tensor:
    """What the engine's own module computes."""
    module = active.model.get_submodule(owner.rpartition(".")[0])
    with torch.inference_mode():
        if isinstance(module, PackedLinear):
            bias = 0 if module.bias is None else module.bias
            y_SN: Tensor = module(x_SK) - bias
        else:
            y_SN = stack(x_SK, offsets)
    return y_SN.double()


def _values(stack: Stack) -> Tensor:
    """What codes and scales stand for: FP64 [E, P x N, K]."""
    return dequantize(stack.held()).double().flatten(1, 2)


def _wide(wide: Mapping[str, Tensor], stack: Stack) -> Tensor:
    """The trainer's values of the same weights, rounded to BF16."""
    rows = [torch.cat([wide[entry.name] for entry in row]) for row in stack.entries]
    return torch.stack(rows).bfloat16().double()


def _product(x_SK: Tensor, w_ENK: Tensor, offsets: Tensor, activation: Scheme | None) -> Tensor:
    """[S, N] in FP64, the input through `activation`'s codes row by row where there are any."""
    held_SK = x_SK.double()
    if activation is not None:
        held_SK = torch.stack([_through(row_K, activation) for row_K in x_SK])
    starts = [0, *offsets.tolist()[:-1]]
    parts = [
        held_SK[start:end] @ w_NK.T for start, end, w_NK in zip(starts, offsets.tolist(), w_ENK, strict=True)
    ]
    return torch.cat(parts)


def _through(row_K: Tensor, scheme: Scheme) -> Tensor:
    outer = outer_scale([row_K], scheme) if scheme.format == "nvfp4" else None
    return dequantize(quantize(row_K[None], scheme, "row", outer))[0].double()


def _most(x_SK: Tensor, wide: Mapping[str, Tensor], stack: Stack, offsets: Tensor) -> Tensor:
    """[S, N]: what errors as large as formats allow in every operand come to, where signs are by chance: the root of a
    sum of squares. Rows of the input are independent and have mean 0, so that no sum of errors is expected above it.
    """
    x_SK, w_ENK = x_SK.double(), _wide(wide, stack)
    masters = [[wide[entry.name].bfloat16().double() for entry in row] for row in stack.entries]
    edge_ENK = torch.stack([torch.cat([_edges(w, stack.scheme) for w in row]) for row in masters])
    edge_SK = torch.zeros_like(x_SK) if stack.activation is None else _edges(x_SK, stack.activation)
    pairs = ((x_SK, edge_ENK), (edge_SK, w_ENK), (edge_SK, edge_ENK))
    return torch.stack([_product(a**2, b**2, offsets, None) for a, b in pairs]).sum(0).sqrt()


def _edges(values: Tensor, scheme: Scheme) -> Tensor:
    """The largest rounding error of each of `values` [N, K], from its block's largest magnitude."""
    n, k = values.shape
    padded = F.pad(values.abs(), (0, -k % scheme.columns, 0, -n % scheme.rows))
    blocks = padded.view(padded.shape[0] // scheme.rows, scheme.rows, -1, scheme.columns)
    most = blocks.amax((1, 3), keepdim=True).expand(blocks.shape).reshape(padded.shape)
    return STEP[scheme.format] * most[:n, :k]


def _size(values: Tensor) -> float:
    return float(values.square().mean().sqrt())


def _apart(a: Tensor, b: Tensor) -> float:
    return float((a - b).abs().max())
