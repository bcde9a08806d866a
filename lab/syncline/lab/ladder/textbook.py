"""The textbook step: a plain `transformers` model, one trajectory at a time, autograd, and AdamW from its paper.

Shares nothing with the trainer but the model's code. What the contract's GEMMs read through codes is put through them
here too (`gemms.py`): one trajectory at a time, where the trainer's WGrad has a micro-batch's tokens in its blocks.
Legend: T tokens, S sampled ones.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn

from syncline.contract.adapters import tensor_names
from syncline.contract.plan import adapter_targets
from syncline.contract.precision import Trainer
from syncline.contract.token_path import Trajectory
from syncline.lab.ladder.gemms import Gemms, weights_through
from syncline.lab.ladder.subject import Subject
from syncline.reference.routes import RecordedRoutes, replaying
from syncline.reference.state import named_windows

EPSILON = 1e-8  # AdamW's, as torch has it


def gradients(
    subject: Subject, records: Sequence[Trajectory], advantages: Sequence[float], how: Trainer
) -> dict[str, Tensor]:
    """Gradient of the clipped objective, a mean over tokens, at the masters of this moment: parameter name -> FP32.

    how   what the GEMMs of low-bit weights read: the contract's, or with less of it through codes
    """
    masters, adapter = subject.masters(), subject.contract.adapter
    loaded = subject.wide_model(masters)
    model = loaded.model
    views = named_windows(model, loaded.plan)
    with torch.no_grad():
        if subject.contract.trainer.parameters == "bf16":
            for parameter in model.parameters():
                parameter.copy_(parameter.bfloat16().float())
        gemms = Gemms(how, subject.plan, model, loaded.plan)
        if how.fprop.right != "original":
            for name, values in weights_through(subject.plan, views, along_n=False).items():
                views[name].copy_(values)
        merged = {} if adapter is None else _merge(subject, views, masters)
    model.requires_grad_(True)
    model.set_experts_implementation("eager")  # a plain product per expert
    total = sum(sum(record.loss_mask) for record in records)
    for record, advantage in zip(records, advantages, strict=True):
        with gemms:
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
    with _routed(model, record, subject):
        logits_SV = model(input_ids=ids_1T[:, :-1], use_cache=False).logits[0, start - 1 :].float()
    logprobs_SV = torch.log_softmax(logits_SV / subject.spec.sampling.temperature, dim=-1)
    now_S = logprobs_SV.gather(1, ids_1T[0, start:, None])[:, 0]
    ratio_S = (now_S - torch.tensor(record.logprobs)).exp()
    loss = subject.spec.loss
    bounded_S = ratio_S.clamp(1 - loss.clip_low, 1 + loss.clip_high)
    each_S = torch.maximum(-advantage * ratio_S, -advantage * bounded_S)
    return (each_S * torch.tensor(list(record.loss_mask), dtype=torch.float32)).sum() / total


def _routed(model: nn.Module, record: Trajectory, subject: Subject) -> AbstractContextManager[object]:
    """The record's experts, where the job replays them."""
    if not subject.spec.trainer.router_replay:
        return nullcontext()
    assert record.expert_ids is not None
    assert record.expert_shape is not None
    assert record.expert_dtype is not None
    return replaying(model, RecordedRoutes(record.expert_ids, record.expert_shape, record.expert_dtype).ids())


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
