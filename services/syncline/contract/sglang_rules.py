"""What an SGLang server does not carry out of a spec, told before a job begins. docs/sglang.md has the whole list."""

from __future__ import annotations

from collections.abc import Iterator

from syncline.contract.job import JobSpec, Problem

MASK_MOST = 4096
"""Ids of a sampling mask: the server's own bound (`--sampling-mask-max-tokens`), which it asks top_k to be within."""


def problems(spec: JobSpec) -> Iterator[Problem]:
    """What an SGLang server, with one buffer of weights, cannot do."""
    if spec.rollout.engine != "sglang":
        return
    schedule, sampling = spec.schedule, spec.sampling
    if schedule.in_flight == "continue_old":
        message = "'continue_old' needs two versions in one engine, and SGLang holds one"
        yield _problem("schedule.in_flight", message, "use 'drain' or 'in_place'")
    if schedule.kv == "carried":
        message = "'carried': a server frozen with its contexts cannot score the canaries of a version"
        yield _problem("schedule.kv", message, "use 'recomputed'")
    if sampling.length == "stop" and sampling.min_tokens > 0:
        message = "SGLang masks stop tokens before it takes log-probs, which are then of another distribution"
        yield _problem("sampling.min_tokens", message, "set it to 0")
    if sampling.top_k == 1 and sampling.temperature != 1.0:
        message = "1 with a temperature: SGLang reports log-probs of greedy tokens without it"
        yield _problem("sampling.top_k", message, "set sampling.temperature = 1")
    if sampling.record_mask and not 2 <= sampling.top_k <= MASK_MOST:
        message = f"{sampling.top_k}: SGLang records the mask of a top_k from 2 to {MASK_MOST} alone"
        yield _problem("sampling.top_k", message, "set one; top_p may cut further")


def _problem(path: str, message: str, hint: str) -> Problem:
    return Problem(path=path, message=message, hint=hint)
