"""A model whose low-bit weights are held in few bits, and nowhere else.

`pack` takes the wide parameters out of an architecture and puts a `Stack` in the place of each: codes and scales of all
the checkpoint tensors that the parameter was made of, in memory exactly as a checkpoint holds them. `slots` are
writable views of them by checkpoint name, so that what is loaded and what is multiplied are the same bytes. Values are
decoded in each call and not kept.

Legend: E experts (1 for a linear layer), P checkpoint tensors side by side in one expert (gate and up), N outputs of
each, K inputs, S rows of activations sorted by expert.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from syncline.contract.artefact import Part, parts
from syncline.contract.plan import PlanEntry, PrecisionPlan
from syncline.contract.precision import PrecisionContract
from syncline.numerics.gemm import Kernel, from_codes, kernel_of, quantize_rows, values, wide
from syncline.numerics.quantized import Quantized, dequantize, quantize
from syncline.reference.state import StatePlan, Window

EXPERTS = "syncline_packed"
"""Name under which the forward of packed experts is known to `transformers`."""
DTYPES = {
    "F8_E4M3": torch.float8_e4m3fn,
    "U8": torch.uint8,
    "I32": torch.int32,
    "I64": torch.int64,
    "F32": torch.float32,
    "BF16": torch.bfloat16,
}
"""torch dtypes of the safetensors names that occur in a version."""


class CannotPack(ValueError):
    """A plan that names a tensor which this model cannot hold in few bits. The message names it."""


class Stack(nn.Module):
    """One parameter in few bits. `entries` are its checkpoint tensors: [E][P] of one scheme and shape.

    kernel   "codes": a product of codes and scales; "dequantised": of decoded values
    """

    def __init__(self, entries: Sequence[Sequence[PlanEntry]], kernel: str) -> None:
        super().__init__()
        first = entries[0][0]
        if first.weight is None:
            raise CannotPack(f"tensor {first.name} is wide")
        self.entries = entries
        self.family, self.scheme, self.activation = first.family, first.weight, first.activation
        self.kernel = kernel
        self.size = (len(entries), len(entries[0]), *first.shape)
        self.roles: list[str] = []
        self.ran: Kernel | None = None  # what multiplied last
        for part in parts(first):
            # an outer scale meets its matrix: [E, P, 1, 1]
            own = (1, 1) if part.role == "outer" else part.shape
            stored = torch.empty(*self.size[:2], *own, dtype=DTYPES[part.dtype])
            self.roles.append(part.role)
            self.register_buffer(part.role, stored)

    @property
    def dtype(self) -> torch.dtype:
        """What a product takes and gives: model code asks a weight for it."""
        return torch.float32

    @property
    def device(self) -> torch.device:
        """Where codes and scales lie."""
        return self.stored("codes").device

    def stored(self, role: str) -> Tensor:
        """The buffer of a role: [E, P, ...]."""
        return self.get_buffer(role)

    def held(self) -> Quantized:
        """Codes and scales as they lie here, of shape [E, P, N, K]."""
        outer = self.stored("outer") if "outer" in self.roles else None
        return Quantized(self.scheme, self.stored("codes"), self.stored("scale"), outer, self.size)

    def slots(self) -> Iterator[tuple[Part, Tensor]]:
        """Each checkpoint tensor with the writable view of its bytes."""
        for e, row in enumerate(self.entries):
            for p, entry in enumerate(row):
                for part in parts(entry):
                    yield part, self.stored(part.role)[e, p].view(part.shape)

    def forward(self, x_SK: Tensor, offsets: Tensor) -> Tensor:
        """x [S, K] times the weights of its expert: [S, P x N]. `offsets` int32 [E]: where each expert's rows end."""
        held = self.held()
        x: Tensor | Quantized = x_SK
        if self.activation is not None:
            x = quantize_rows(x_SK, self.activation, f"input of {self.entries[0][0].name}")
        if self.kernel == "codes":
            self.ran = kernel_of(x, held)
            return from_codes(x, held, offsets, x_SK.dtype)
        self.ran = "wide"
        left = dequantize(x) if isinstance(x, Quantized) else x
        return wide(left, values(held, torch.float32), offsets, x_SK.dtype)

    def operands(self) -> str:
        """What the product reads, in words."""
        how = "codes" if self.kernel == "codes" else "reconstructed"
        left = "X original"
        if self.activation is not None:
            left = f"X {how} {self.activation.rows}x{self.activation.columns}"
        return f"{left}, W {how} {self.scheme.rows}x{self.scheme.columns}"


class PackedLinear(nn.Module):
    """A linear layer over a `Stack` of one weight; its bias stays a wide parameter of the same name."""

    def __init__(self, source: nn.Linear, stack: Stack) -> None:
        super().__init__()
        self.in_features, self.out_features = source.in_features, source.out_features
        self.weight = stack
        self.register_parameter("bias", source.bias)

    def forward(self, x: Tensor) -> Tensor:
        """[.., K] to [.., N]."""
        rows = x.reshape(-1, self.in_features)
        y = self.weight(rows, torch.tensor([len(rows)], dtype=torch.int32, device=x.device))
        y = y if self.bias is None else y + self.bias
        return cast(Tensor, y).view(*x.shape[:-1], self.out_features)


def packed_experts(experts: Any, hidden_NK: Tensor, ids_NJ: Tensor, weights_NJ: Tensor) -> Tensor:
    """Forward of fused experts of which at least one parameter is a `Stack`; each is decoded once, for all experts.

    `transformers` calls it for a module whose config names `EXPERTS`: J experts `ids_NJ` with `weights_NJ` per token.
    """
    expert_S, order_S = torch.sort(ids_NJ.reshape(-1), stable=True)
    offsets = torch.searchsorted(
        expert_S, torch.arange(experts.num_experts, device=expert_S.device), right=True
    ).to(torch.int32)
    x_SK = hidden_NK[order_S // ids_NJ.shape[1]]
    if experts.has_gate:
        y_SI = experts._apply_gate(_product(experts.gate_up_proj, x_SK, offsets))
    else:
        y_SI = experts.act_fn(_product(experts.up_proj, x_SK, offsets))
    y_SK = _product(experts.down_proj, y_SI, offsets)
    y_SK = y_SK * weights_NJ.reshape(-1)[order_S, None]
    back_SK = torch.empty_like(y_SK)
    back_SK[order_S] = y_SK
    return back_SK.view(*ids_NJ.shape, -1).sum(dim=1).to(hidden_NK.dtype)


ALL_EXPERTS_FUNCTIONS.register(EXPERTS, packed_experts)


def _product(weight: Stack | Tensor, x_SK: Tensor, offsets: Tensor) -> Tensor:
    if isinstance(weight, Stack):
        return cast(Tensor, weight(x_SK, offsets))
    return wide(x_SK, weight, offsets, x_SK.dtype)


class PackedModel:
    """A packed model and what lies where.

    stacks   low-bit parameters by their name in the model
    slots    checkpoint tensors of low-bit weights: name -> view of its bytes
    views    wide checkpoint tensors: name -> live view into the model
    """

    def __init__(
        self, model: PreTrainedModel, stacks: Mapping[str, Stack], views: Mapping[str, Tensor]
    ) -> None:
        self.model = model
        self.stacks, self.views = stacks, dict(views)
        self.slots: dict[str, Tensor] = {}
        self.parts: dict[str, Part] = {}
        for stack in stacks.values():
            for part, slot in stack.slots():
                self.slots[part.name], self.parts[part.name] = slot, part

    def quantise(self, entry: PlanEntry, weight: Tensor, outer: Tensor | None) -> dict[str, Tensor]:
        """Write low-bit `entry` from its wide `weight`; returns what was written, by checkpoint name.

        Raises `NotQuantizable` naming it.
        """
        if entry.weight is None:
            raise CannotPack(f"tensor {entry.name} is wide")
        made = quantize(weight, entry.weight, f"tensor {entry.name}", outer)
        roles = {
            "codes": made.codes,
            "scale": made.scale,
            "outer": made.outer,
            "shape": torch.tensor(entry.shape),
        }
        written = {}
        for part in parts(entry):
            tensor = roles[part.role]
            if tensor is None:
                raise CannotPack(f"tensor {part.name}: {entry.weight.format} without an outer scale")
            self.slots[part.name].copy_(tensor)
            written[part.name] = tensor
        return written

    def nbytes(self) -> dict[str, int]:
        """Bytes of weights that the model holds: codes, scales (shapes included), wide."""
        held = {"codes": 0, "scales": 0}
        for slot in self.slots:
            size = self.slots[slot].numel() * self.slots[slot].element_size()
            held["codes" if self.parts[slot].role == "codes" else "scales"] += size
        every = {t.data_ptr(): t for t in (*self.model.parameters(), *self.model.buffers())}
        total = sum(t.numel() * t.element_size() for t in every.values())
        return held | {"wide": total - held["codes"] - held["scales"]}


def pack(
    model: PreTrainedModel, state: StatePlan, plan: PrecisionPlan, contract: PrecisionContract
) -> PackedModel:
    """Exchange the low-bit parameters of `model` for codes and scales with undefined contents. Raises `CannotPack`."""
    low = {entry.name: entry for entry in plan.low_bit()}
    owners: dict[str, dict[str, Window]] = {}
    for name, window in state.windows.items():
        owners.setdefault(window.owner, {})[name] = window
    stacks: dict[str, Stack] = {}
    for owner, windows in owners.items():
        named = [name for name in windows if name in low]
        if not named:
            continue
        whole = [name for name in windows if name not in low]
        if whole:
            raise CannotPack(
                f"tensor {whole[0]} stays wide, and {named[0]} lies in the same parameter {owner}"
            )
        stack = Stack(_stacked(owner, model.get_parameter(owner), windows, low), contract.rollout.kernel)
        _exchange(model, owner, stack)
        stacks[owner] = stack
    own = model.state_dict()
    views = {
        name: torch.as_strided(own[w.owner], w.shape, w.stride, own[w.owner].storage_offset() + w.offset)
        for name, w in state.windows.items()
        if name not in low
    }
    return PackedModel(model, stacks, views)


def _stacked(
    owner: str, parameter: Tensor, windows: Mapping[str, Window], low: Mapping[str, PlanEntry]
) -> list[list[PlanEntry]]:
    """The entries of one parameter, expert by expert and in the order in which they lie there."""
    ordered = sorted(windows, key=lambda name: windows[name].offset)
    entries = [low[name] for name in ordered]
    first = entries[0]
    experts = parameter.shape[0] if parameter.dim() == 3 else 1
    for entry in entries:
        window = windows[entry.name]
        if window.stride != (parameter.shape[-1], 1) or entry.shape[1] != parameter.shape[-1]:
            raise CannotPack(f"tensor {entry.name} does not lie in whole rows of {owner}")
        if (entry.shape, entry.weight, entry.activation) != (first.shape, first.weight, first.activation):
            raise CannotPack(
                f"tensors {first.name} and {entry.name} lie in one parameter and differ in precision"
            )
    width, rest = divmod(len(entries), experts)
    if rest or width * first.shape[0] * experts != parameter.numel() // parameter.shape[-1]:
        raise CannotPack(f"the tensors of {owner} are not the same for each of its {experts} experts")
    return [entries[e * width : (e + 1) * width] for e in range(experts)]


def _exchange(model: PreTrainedModel, owner: str, stack: Stack) -> None:
    path, _, leaf = owner.rpartition(".")
    module: Any = model.get_submodule(path)
    name = stack.entries[0][0].name
    if type(module) is nn.Linear and leaf == "weight":
        above, _, last = path.rpartition(".")
        setattr(model.get_submodule(above), last, PackedLinear(module, stack))
        return
    fused = isinstance(module, nn.Module) and "is_transposed" in vars(module)
    if not fused:
        raise CannotPack(
            f"tensor {name} lies in {path}, a {type(module).__name__}: linear layers and fused experts can be packed"
        )
    for what in ("is_transposed", "has_bias", "has_post_expert_norm", "_is_expert_parallel"):
        if vars(module)[what]:
            raise CannotPack(f"tensor {name}: experts {path} with {what.removeprefix('_')} cannot be packed")
    delattr(module, leaf)
    setattr(module, leaf, stack)
    module.config = copy.deepcopy(module.config)  # the folder's own config serves other models
    module.config._experts_implementation = EXPERTS
