"""What a tool said is context and never a target: the loss does not know which ids were observed."""

from __future__ import annotations

from array import array

import msgspec
import torch
from trainer_records import trajectory

from syncline.contract.token_path import Segment, check
from syncline.trainer.batch import sample_of


def test_an_observed_token_is_nobodys_label() -> None:
    """Flipping it changes no label, no mask and no count: under fixed logits the loss and its gradient are the same."""
    plain = trajectory(sampled=6)
    start = plain.segments[0].end
    tokens = [*plain.tokens[: start + 4], 40, 41, *plain.tokens[start + 4 :]]
    segments = (
        Segment(kind="prompt", start=0, end=start),
        Segment(kind="sampled", start=start, end=start + 4),
        Segment(kind="observed", start=start + 4, end=start + 6),
        Segment(kind="sampled", start=start + 6, end=start + 8),
    )
    told = check(msgspec.structs.replace(plain, tokens=array("i", tokens), segments=segments))
    flipped = array("i", tokens)
    flipped[start + 4] = 77
    other = check(msgspec.structs.replace(told, tokens=flipped))
    logits = torch.randn(len(tokens), 100, generator=torch.Generator().manual_seed(0))
    found = []
    for record in (told, other):
        sample = sample_of(record, record.loss_mask, 1.0)
        leaf = logits.clone().requires_grad_()
        places = torch.tensor(list(sample.positions))
        labels = torch.tensor(list(sample.tokens))[places]
        loss = -leaf.log_softmax(-1)[places - 1, labels].mean()
        (gradient,) = torch.autograd.grad(loss, leaf)
        found.append((loss, gradient, list(sample.positions)))
    (first, mine, positions), (again, same, _) = found
    assert first == again
    assert torch.equal(mine, same)
    assert start + 4 not in positions
    assert not mine[start + 3].any(), "the place that would predict the observed token gets no gradient"
    assert not mine[start + 4].any()
