"""From a work item to an engine's request: the prompt by its index, as ids of the model's own tokenizer."""

from __future__ import annotations

from functools import lru_cache

import msgspec

from syncline.contract.events import WorkItem
from syncline.contract.job import JobSpec
from syncline.contract.token_path import SamplingConvention
from syncline.environments.environment import Environment
from syncline.reference.model import TextCodec
from syncline.rollout.engine import Request, Sampling
from syncline.rollout.session import turn_tokens


class Prompter:
    """Makes requests. A group's members share their prompt, so a few are remembered."""

    def __init__(self, environment: Environment, codec: TextCodec, spec: JobSpec, experts: bool) -> None:
        self._environment, self._codec, self._spec = environment, codec, spec
        self._experts = experts and spec.rollout.record_experts
        self._sampling = sampling_of(spec)
        self._first = turn_tokens(spec.turns, spec.sampling.max_tokens, 0)
        self._ids = lru_cache(maxsize=256)(self._make_ids)

    def request(self, item: WorkItem, attempt: int) -> Request:
        """The request of `item`. Raises `ValueError` naming the prompt if the model cannot be asked it."""
        prompt = self._ids(item.prompt)
        return Request(
            trajectory=item.trajectory,
            prompt=prompt,
            seed=(self._spec.seeds.sampling, item.group, item.index, attempt),
            sampling=msgspec.structs.replace(self._sampling, max_tokens=self._room(item.prompt, prompt)),
            experts=self._experts,
            traceparent=item.traceparent,
        )

    def _room(self, index: int, prompt: tuple[int, ...]) -> int:
        """Tokens of the first turn: its own limit, or what `turns.context` leaves."""
        context = self._spec.turns.context
        if context is None:
            return self._first
        if len(prompt) >= context:
            raise ValueError(
                f"prompt {index} has {len(prompt)} tokens, and turns.context is {context}: no token can follow"
            )
        return min(self._first, context - len(prompt))

    def _make_ids(self, index: int) -> tuple[int, ...]:
        prompt = self._environment.prompt(index)
        if prompt.messages and self._codec.has_template:
            messages = [{"role": m.role, "content": m.content} for m in prompt.messages]
            return tuple(self._codec.encode_messages(messages))
        if prompt.text is None:
            raise ValueError(f"prompt {index} is a chat, and the model's tokenizer has no chat template")
        return tuple(self._codec.encode(prompt.text))


def sampling_of(spec: JobSpec) -> Sampling:
    """How the job's tokens are drawn."""
    s = spec.sampling
    return Sampling(
        temperature=s.temperature,
        top_p=s.top_p,
        top_k=s.top_k,
        max_tokens=s.max_tokens,
        min_tokens=s.min_tokens,
        length=s.length,
        length_sigma=s.length_sigma,
        length_median=s.length_median,
        record_mask=s.record_mask,
    )


def convention_of(spec: JobSpec) -> SamplingConvention:
    """Under which distribution the engine's log-probs are recorded."""
    s = spec.sampling
    return SamplingConvention(
        logprob="processed" if s.record_mask else "scaled",
        temperature=s.temperature,
        top_p=s.top_p,
        top_k=s.top_k,
    )
