"""The textbook step: a plain `transformers` model, one trajectory at a time, autograd, and AdamW from its paper.

Shares nothing with the trainer but the model's code. What FProp reads through codes is put through them here too,
weights once and activations row by row; gradients pass straight through, wide. Legend: T tokens, S sampled ones.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from syncline.contract.adapters import tensor_names
from syncline.contract.plan import adapter_targets
from syncline.contract.schemes import Scheme
from syncline.contract.token_path import Trajectory
from syncline.lab.ladder.subject import Subject
from syncline.numerics.quantized import dequantize, outer_scale, quantize
from syncline.reference.state import StatePlan, named_windows

EPSILON = 1e-8  # AdamW's, as torch has it


def gradients(
    subject: Subject, records: Sequence[Trajectory], advantages: Sequence[float]
) -> dict[str, Tensor]:
    """Gradient of the clipped objective, a mean over tokens, at the masters of this moment: parameter name -> FP32."""
    masters, adapter = subject.masters(), subject.contract.adapter
    loaded = subject.wide_model(masters)
    model = loaded.model
    views = named_windows(model, loaded.plan)
    with torch.no_grad():
        if subject.contract.trainer.parameters == "bf16":
            for parameter in model.parameters():
                parameter.copy_(parameter.bfloat16().float())
        _through_codes(subject, views)
        merged = {} if adapter is None else _merge(subject, views, masters)
    model.requires_grad_(True)
    model.set_experts_implementation("eager")  # a plain product per expert
    total = sum(sum(record.loss_mask) for record in records)
    for record, advantage in zip(records, advantages, strict=True):
        with _Activations(subject, model, loaded.plan):
            loss = _loss(model, record, advantage, subject, total)
        loss.backward()  # type: ignore[no-untyped-call]
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    if adapter is None:
        return grads
    owners = {name: window.owner for name, window in loaded.plan.windows.items()}
    return _chain(subject, merged, {name: grads[owners[name]] for name in merged})


def _loss(model: nn.Module, record: Trajectory, advantage: float, subject: Subject, total: int) -> Tensor:
    ids_1T = torch.tensor([list(record.tokens)])
    start = record.segments[0].end
    logits_SV = model(input_ids=ids_1T, use_cache=False).logits[0, start - 1 : -1].float()
    logprobs_SV = torch.log_softmax(logits_SV / subject.spec.sampling.temperature, dim=-1)
    now_S = logprobs_SV.gather(1, ids_1T[0, start:, None])[:, 0]
    ratio_S = (now_S - torch.tensor(record.logprobs)).exp()
    loss = subject.spec.loss
    bounded_S = ratio_S.clamp(1 - loss.clip_low, 1 + loss.clip_high)
    each_S = torch.maximum(-advantage * ratio_S, -advantage * bounded_S)
    return (each_S * torch.tensor(list(record.loss_mask), dtype=torch.float32)).sum() / total


def _through_codes(subject: Subject, views: Mapping[str, Tensor]) -> None:
    """What FProp reads of low-bit weights, where the contract's trainer reads their codes at all."""
    if subject.contract.trainer.fprop.right == "original":
        return
    groups: dict[str, list[str]] = {}
    for entry in subject.plan.low_bit():
        groups.setdefault(entry.outer or entry.name, []).append(entry.name)
    schemes = {entry.name: entry.weight for entry in subject.plan.low_bit()}
    for names in groups.values():
        scheme = schemes[names[0]]
        assert scheme is not None
        outer = outer_scale([views[n] for n in names], scheme) if scheme.format == "nvfp4" else None
        for name in names:
            views[name].copy_(dequantize(quantize(views[name], scheme, name, outer)))


class _Activations(TorchFunctionMode):
    """Inside, a linear product with a low-bit weight reads its input through the codes that the contract states."""

    def __init__(self, subject: Subject, model: nn.Module, plan: StatePlan) -> None:
        super().__init__()
        read = subject.contract.trainer.fprop.left != "original"
        own = model.state_dict(keep_vars=True)
        self._schemes: dict[int, Scheme] = {}
        for entry in subject.plan.low_bit():
            if read and entry.activation is not None:
                self._schemes[own[plan.windows[entry.name].owner].untyped_storage().data_ptr()] = (
                    entry.activation
                )

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        if func is torch.nn.functional.linear:
            scheme = self._schemes.get(args[1].untyped_storage().data_ptr())
            if scheme is not None:
                args = (args[0] + (_rows_through(args[0].detach(), scheme) - args[0].detach()), *args[1:])
        return func(*args, **(kwargs or {}))


def _rows_through(x: Tensor, scheme: Scheme) -> Tensor:
    rows = x.reshape(-1, x.shape[-1])
    if not len(rows):
        return x
    through = [
        dequantize(
            quantize(row, scheme, "row", outer_scale([row], scheme) if scheme.format == "nvfp4" else None)
        )
        for row in rows[:, None]
    ]
    return torch.cat(through).view(x.shape)


# ---- adapters ---------------------------------------------------------------------------------------------------
def _merge(
    subject: Subject, views: Mapping[str, Tensor], masters: Mapping[str, Tensor]
) -> dict[str, tuple[str, str, Tensor, Tensor]]:
    """Add scale x B A to each target; target -> (name of A, name of B, A, B)."""
    adapter = subject.contract.adapter
    assert adapter is not None
    out = {}
    for target in adapter_targets(adapter, subject.shapes):
        down, up = (name.removesuffix(".weight") for name in tensor_names(target))
        own = {n: t for n, t in masters.items() if n.endswith((down, up)) or n in (down, up)}
        a_name = next(n for n in own if n.endswith(down))
        b_name = next(n for n in own if n.endswith(up))
        a, b = (own[n].bfloat16().float() for n in (a_name, b_name))
        views[target].add_(adapter.scale() * b @ a)
        out[target] = (a_name, b_name, a, b)
    return out


def _chain(
    subject: Subject, merged: Mapping[str, tuple[str, str, Tensor, Tensor]], grads: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """dA = s B^T dW and dB = s dW A^T."""
    adapter = subject.contract.adapter
    assert adapter is not None
    out = {}
    for target, (a_name, b_name, a, b) in merged.items():
        out[a_name] = adapter.scale() * b.T @ grads[target]
        out[b_name] = adapter.scale() * grads[target] @ a.T
    return out


# ---- AdamW ------------------------------------------------------------------------------------------------------
def adamw(
    weight: Tensor, m: Tensor, v: Tensor, step: int, *, lr: float, betas: tuple[float, float], decay: float
) -> Tensor:
    """The weight after step number `step` whose moments are `m` and `v` (arXiv 1711.05101, algorithm 2), in FP64."""
    w, m, v = weight.double(), m.double(), v.double()
    corrected = (v / (1 - betas[1] ** step)).sqrt() + EPSILON
    return w * (1 - lr * decay) - lr * (m / (1 - betas[0] ** step)) / corrected
