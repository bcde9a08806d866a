"""From the spec and a micro-batch to what the losses take. Shared by the engines, so that their losses are one."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from syncline.contract.job import JobSpec
from syncline.trainer.corrections import Correction
from syncline.trainer.engine import Sample
from syncline.trainer.loss import LossInputs, LossSettings


def loss_settings(spec: JobSpec) -> LossSettings:
    """The spec's loss branch as the loss functions take it."""
    loss = spec.loss
    return LossSettings(
        kind=loss.kind,
        clip_low=loss.clip_low,
        clip_high=loss.clip_high,
        dual_clip=loss.dual_clip,
        entropy=loss.entropy,
        correction=Correction(
            loss.correction.kind, loss.correction.level, loss.correction.low, loss.correction.high
        ),
        kl=loss.kl.coefficient,
        kl_estimator=loss.kl.estimator,
    )


def loss_inputs(
    lengths_B: Tensor,
    samples: Sequence[Sample],
    logprobs_N: Tensor,
    entropy_N: Tensor,
    reference_N: Tensor | None,
) -> tuple[Tensor, LossInputs]:
    """Which of the sampled tokens [N] are in the loss (bool), and those alone as the losses take them.

    One optimizer step per update: the proximal policy is the present one. `reference_N` has all sampled tokens.
    """
    device = logprobs_N.device
    in_loss_N = torch.tensor(list(b"".join(s.loss_mask for s in samples)), device=device).bool()
    behaviour_N = torch.tensor([p for s in samples for p in s.behaviour], device=device)
    advantages_B = torch.tensor([s.advantage for s in samples], device=device)
    return in_loss_N, LossInputs(
        logprobs_N=logprobs_N[in_loss_N],
        proximal_N=logprobs_N.detach()[in_loss_N],
        behaviour_N=behaviour_N[in_loss_N],
        advantages_N=advantages_B.repeat_interleave(lengths_B)[in_loss_N],
        lengths_B=torch.tensor([sum(s.loss_mask) for s in samples], device=device),
        reference_N=None if reference_N is None else reference_N[in_loss_N],
        entropy_N=entropy_N[in_loss_N],
    )
