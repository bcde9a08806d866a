"""A model's tensors under their Hugging Face checkpoint names, as views into the live parameters.

`transformers` keeps some tensors in another form in memory than in a checkpoint (all experts of a layer in
one tensor, three convolutions in one, ...) and converts on save and on load. Here that conversion is learned
once per architecture by sending element numbers through the library's own save path: each checkpoint tensor
then turns out to be a strided window of one tensor in memory, read (export) and written (load) in place.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping

import msgspec
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion


class Window(msgspec.Struct, frozen=True):
    """Where a checkpoint tensor lies in memory: `torch.as_strided(owner, shape, stride, offset)`."""

    owner: str  # name in `model.state_dict()`
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


class StatePlan(msgspec.Struct, frozen=True):
    """All checkpoint tensors of one architecture. `ties`: (absent name, name of the tensor it equals)."""

    windows: dict[str, Window]  # by checkpoint name, sorted
    ties: tuple[tuple[str, str], ...]


class UnknownLayout(ValueError):
    """`transformers` converts a tensor in a way that is not a window of one tensor in memory."""


def state_plan(model: PreTrainedModel) -> StatePlan:
    """The plan of `model`'s architecture. Raises `UnknownLayout` naming the tensor.

    Needs 8 bytes per parameter for the moment that it takes.
    """
    own = model.state_dict(keep_vars=True)
    ties = _ties(model, own)
    ignored = set(model._keys_to_ignore_on_save or ())
    owners = {name: t for name, t in own.items() if name not in ties and name not in ignored}
    starts: dict[str, int] = {}
    total = 0
    for name, tensor in owners.items():
        starts[name] = total
        total += tensor.numel()
    numbers = {
        name: torch.arange(starts[name], starts[name] + t.numel()).reshape(t.shape)
        for name, t in owners.items()
    }
    for name, tensor in owners.items():
        if not tensor.is_contiguous():
            raise UnknownLayout(f"tensor {name} is not contiguous in memory")
    names = list(starts)
    edges = torch.tensor([*starts.values(), total])
    windows: dict[str, Window] = {}
    for name, index in sorted(revert_weight_conversion(model, numbers).items()):
        first = int(index.reshape(-1)[0]) if index.numel() else 0
        owner = names[int(torch.searchsorted(edges, first, right=True)) - 1]
        windows[name] = _window(name, owner, index - starts[owner], owners[owner].numel())
    _check_cover(windows, owners)
    return StatePlan(windows=windows, ties=tuple(sorted(ties.items())))


def _ties(model: PreTrainedModel, own: Mapping[str, Tensor]) -> dict[str, str]:
    """Name -> name of the tensor whose memory it shares, as this very model is tied."""
    declared: Mapping[str, str] = model.all_tied_weights_keys
    return {
        name: source
        for name, source in declared.items()
        if name in own and source in own and own[name].data_ptr() == own[source].data_ptr()
    }


def _window(name: str, owner: str, index: Tensor, numel: int) -> Window:
    offset = int(index.reshape(-1)[0]) if index.numel() else 0
    stride = tuple(
        int(index.select(d, 1).reshape(-1)[0] - index.select(d, 0).reshape(-1)[0]) if size > 1 else 1
        for d, size in enumerate(index.shape)
    )
    affine = torch.full((), offset, dtype=index.dtype)
    for d, (size, step) in enumerate(zip(index.shape, stride, strict=True)):
        affine = affine + (torch.arange(size) * step).reshape(
            [-1 if i == d else 1 for i in range(index.dim())]
        )
    inside = not index.numel() or (int(index.min()) >= 0 and int(index.max()) < numel)
    if not inside or any(s < 0 for s in stride) or not torch.equal(affine.expand_as(index), index):
        raise UnknownLayout(f"tensor {name} is no strided window of {owner}")
    return Window(owner=owner, shape=tuple(index.shape), stride=stride, offset=offset)


def _check_cover(windows: Mapping[str, Window], owners: Mapping[str, Tensor]) -> None:
    """Each element of each tensor has one name, so that a complete load leaves nothing of the old weights."""
    covered: dict[str, int] = {}
    for window in windows.values():
        count = 1
        for size in window.shape:
            count *= size
        covered[window.owner] = covered.get(window.owner, 0) + count
    for name, tensor in owners.items():
        if covered.get(name, 0) != tensor.numel():
            raise UnknownLayout(
                f"checkpoint names cover {covered.get(name, 0)} of {tensor.numel()} elements of {name}"
            )


def named_windows(model: nn.Module, plan: StatePlan) -> dict[str, Tensor]:
    """Checkpoint name -> live view into `model` (no copy, no gradient)."""
    own = model.state_dict()
    return {
        name: torch.as_strided(own[w.owner], w.shape, w.stride, own[w.owner].storage_offset() + w.offset)
        for name, w in plan.windows.items()
    }


def export_state(model: PreTrainedModel, plan: StatePlan | None = None) -> Iterator[tuple[str, Tensor]]:
    """(checkpoint name, contiguous tensor), sorted by name; tied names are left out.

    A tensor that is contiguous in memory is a live view: copy it before the model changes.
    """
    for name, view in named_windows(model, plan or state_plan(model)).items():
        yield name, view.contiguous()


def load_state(model: PreTrainedModel, tensors: Mapping[str, Tensor], plan: StatePlan | None = None) -> None:
    """Write all `tensors` (by checkpoint name, any float dtype) into `model`, or nothing.

    Raises `ValueError` naming the tensor that is missing, unexpected, of another shape, or, where the model
    ties two names and both are given, different from its twin.
    """
    plan = plan or state_plan(model)
    check_names(plan, {name: tuple(t.shape) for name, t in tensors.items()})
    for absent, source in plan.ties:
        if absent in tensors and not torch.equal(tensors[absent], tensors[source]):
            raise ValueError(f"tensor {absent} differs from {source}, and the model ties them")
    with torch.no_grad():
        for name, view in named_windows(model, plan).items():
            view.copy_(tensors[name])


def check_names(plan: StatePlan, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Raise `ValueError` naming a missing, unexpected or misshapen tensor. Tied names may be left out."""
    tied = {absent: plan.windows[source].shape for absent, source in plan.ties}
    for name, window in plan.windows.items():
        if name not in shapes:
            raise ValueError(f"tensor {name} is missing")
        if tuple(shapes[name]) != window.shape:
            raise ValueError(f"tensor {name} has shape {list(shapes[name])}, the model {list(window.shape)}")
    for name, shape in shapes.items():
        if name in plan.windows:
            continue
        if name not in tied:
            raise ValueError(f"tensor {name} is not part of the model")
        if tuple(shape) != tied[name]:
            raise ValueError(f"tensor {name} has shape {list(shape)}, the model {list(tied[name])}")


def round_to_bf16(model: nn.Module, keep: Container[str] = ()) -> None:
    """Round each floating tensor of `model` to the nearest BF16 value in place; dtypes stay as they are.

    keep   names in `model.state_dict()` that stay as they are
    """
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            if tensor.is_floating_point() and name not in keep:
                tensor.copy_(tensor.to(torch.bfloat16))


def compute_in_bf16(model: PreTrainedModel) -> None:
    """Hold the parameters of `model` as BF16, so that its wide operations give BF16; buffers stay as they are.

    For a contract whose `compute` says so. Parameters with BF16 values lose nothing. Attention is the plain one: the
    fused kernels for one query and for many round differently in BF16, so that decode and a full forward differed on
    nearly every token (by 2e-3 in the mean), where the plain one gives the same numbers.
    """
    model.set_attn_implementation("eager")
    for parameter in model.parameters():
        if parameter.dtype == torch.float32:
            parameter.data = parameter.data.to(torch.bfloat16)
