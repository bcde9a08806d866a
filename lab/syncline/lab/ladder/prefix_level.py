"""Level 4: fixed-prefix scoring. The same ids first, then the same log-probs for identical weights.

Three scores of each sampled token, one record at a time: the trainer's as rollout multiplies (matched), the trainer's
own, and rollout's by prefill. Matched and rollout differ by the order of FP32 additions alone, whatever the format; the
trainer's own differs by what the contract expects.
"""

from __future__ import annotations

from collections.abc import Iterator

from tokenizers import Tokenizer

from syncline.lab.ladder.apart import SUMS, SUMS_SOURCE, gap
from syncline.lab.ladder.records import Check, same
from syncline.lab.ladder.subject import Subject
from syncline.reference.model import model_folder

FREE = 0.5
"""Nats, mean: what no shipped recipe's numerics reach (the widest expectation ends at 0.3)."""


def checks(subject: Subject) -> Iterator[Check]:
    """Prompt ids, conventions, then the scores."""
    yield same("prompt ids", _ids(subject), "the model's tokenizer.json, read by `tokenizers`")
    yield same("conventions", _conventions(subject), "sampling.temperature of the job")
    names, rollout = subject.names, [score.logprobs for score in subject.prefill("wide")]
    matched = subject.trainer_alone(as_rollout=True)
    yield gap("matched numerics", matched, rollout, names, bound=SUMS, source=SUMS_SOURCE)
    high = subject.contract.expected.high
    bound = SUMS if not subject.contract.families else FREE if high is None else high
    own = subject.trainer_alone(as_rollout=False)
    source = "expected.high of the contract"
    yield gap("the trainer's own numerics", own, rollout, names, bound=bound, source=source)


def _ids(subject: Subject) -> list[str]:
    """Prompt ids of the records against the tokenizer's file, read by another library."""
    folder = model_folder(subject.models, subject.spec.model.name)
    tokenizer = Tokenizer.from_file(str(folder.path / "tokenizer.json"))
    wrong = []
    for record in subject.records:
        prompt = subject.pair.environment.prompt(record.prompt)
        if prompt.text is None:  # a chat: its template is the model's own, and has one reader
            continue
        wanted = tokenizer.encode(prompt.text).ids
        found = list(record.tokens[: record.segments[0].end])
        if found != wanted:
            wrong.append(f"{record.trajectory}: {found[:4]}... for {wanted[:4]}...")
    return wrong


def _conventions(subject: Subject) -> list[str]:
    wanted = subject.spec.sampling.temperature
    return [
        f"{record.trajectory}: temperature {record.convention.temperature}"
        for record in subject.records
        if record.convention.temperature != wanted
    ]
