"""What an SGLang server does not carry out of a spec, told before a job begins. docs/sglang.md has the whole list."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from syncline.contract.job import JobSpec, Problem
from syncline.contract.plan import matches
from syncline.contract.precision import PrecisionContract
from syncline.contract.sglang_spec import SGLangSpec
from syncline.contract.sharding.layout import dimensions

MASK_MOST = 4096
"""Ids of a sampling mask: the server's own bound (`--sampling-mask-max-tokens`), which it asks top_k to be within."""
TP_ON_CPU = (
    "SGLang's ranks add up through CUDA or AMX kernels, and a server without either is one process: 1 on CPU"
)
EXPERTS_ON_CPU = "SGLang runs adapters on routed experts by Triton kernels alone, and there are none on CPU"

_EXPERTS = [
    f"model.layers.{layer}.{block}.experts.0.{leaf}.weight"
    for layer in (0, 1)
    for block, leaves in (
        ("mlp", ("gate_proj", "up_proj", "down_proj")),
        ("block_sparse_moe", ("w1", "w2", "w3")),
    )
    for leaf in leaves
]


def problems(spec: JobSpec) -> Iterator[Problem]:
    """What an SGLang server, with one buffer of weights, cannot do."""
    if spec.rollout.engine != "sglang":
        if spec.rollout.sglang != SGLangSpec():
            message = f"has no meaning for rollout.engine {spec.rollout.engine!r}"
            yield _problem("rollout.sglang", message, "leave it out, or use rollout.engine = 'sglang'")
        return
    yield from _server(spec)
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


def _server(spec: JobSpec) -> Iterator[Problem]:
    server = spec.rollout.sglang
    if server.tp > 1 and spec.device.hardware == "cpu":
        yield _problem("rollout.sglang.tp", f"{server.tp}: {TP_ON_CPU}", "set it to 1")
    if server.update == "group" and spec.device.hardware != "cpu":
        message = "'group' broadcasts from CPU memory over gloo, and this server's weights lie on a GPU"
        yield _problem("rollout.sglang.update", message, "use 'disk' or 'buckets'")


def fits(contract: PrecisionContract, config: Mapping[str, Any], cpu: bool) -> Iterator[Problem]:
    """What a server cannot do with the model of this config.json. Keys of the contract count from it."""
    text = config.get("text_config") or config
    if contract.convert.route == "bf16_bridge":
        message = "'bf16_bridge': SGLang loads the artefact's codes"
        yield _problem("convert.route", message, "use 'artefact'")
    linear = "linear_num_value_heads" in text or "linear_attention" in (text.get("layer_types") or ())
    if cpu and linear:
        message = "its linear attention is Triton and CUDA kernels in SGLang, and there are none on CPU"
        yield _problem(
            "model.name", message, "use rollout.engine = 'reference', or a model with full attention"
        )
    if not cpu or contract.adapter is None or not dimensions(config).experts:
        return
    for i, target in enumerate(contract.adapter.targets):
        if any(matches(target, name) for name in _EXPERTS):
            message = f"{target!r} matches routed experts: {EXPERTS_ON_CPU}"
            yield _problem(f"adapter.targets.{i}", message, "name the attention's weights alone")


def _problem(path: str, message: str, hint: str) -> Problem:
    return Problem(path=path, message=message, hint=hint)
