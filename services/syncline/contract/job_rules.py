"""Combinations of a job spec that are well-typed and impossible. Each rule is one function; all run at submit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from urllib.parse import urlsplit

from syncline.contract import (
    evaluation_rules,
    pool_spec,
    prompts_spec,
    secrets_rules,
    sglang_rules,
    support,
    validation_spec,
)
from syncline.contract.job import JobSpec, Problem, RewardSpec
from syncline.contract.precision import PrecisionContract
from syncline.contract.precision_rules import contradictions
from syncline.contract.recipes import RECIPES, BadContract
from syncline.contract.trainer_rules import megatron_refusals, trainer_problems
from syncline.contract.turns_rules import branch_problems


def problems(spec: JobSpec) -> list[Problem]:
    """Everything wrong with `spec`. Empty: it can run."""
    return [problem for rule in RULES for problem in rule(spec)]


def _problem(path: str, message: str, hint: str) -> Problem:
    return Problem(path=path, message=message, hint=hint)


def _batch(spec: JobSpec) -> Iterator[Problem]:
    size = spec.batch.group_size
    if size < 2 and spec.kind == "train":
        yield _problem(
            "batch.group_size",
            f"{size} sample per group leaves a group-relative advantage undefined",
            "use at least 2",
        )


def _sampling(spec: JobSpec) -> Iterator[Problem]:
    sampling = spec.sampling
    cut = sampling.top_p < 1 or sampling.top_k > 0
    corrects = spec.loss.correction.kind != "none" or spec.loss.kind in ("cispo", "gspo", "decoupled_ppo")
    if cut and corrects and not sampling.record_mask:
        yield _problem(
            "sampling.top_p" if sampling.top_p < 1 else "sampling.top_k",
            "an importance correction needs the true sampling distribution, and the cut support is not recorded",
            "set sampling.record_mask = true, or top_p = 1 and top_k = 0, or loss.correction.kind = 'none' with "
            "loss.kind = 'ppo'",
        )
    if sampling.record_mask and not cut:
        yield _problem(
            "sampling.record_mask", "top_p 1 and top_k 0 cut nothing: there is no mask", "set it to false"
        )
    if sampling.record_mask and sampling.top_k == 1:
        message = (
            "1 leaves one id at each token: its log-prob is 0 whatever the weights are, and trains nothing"
        )
        yield _problem("sampling.top_k", message, "at least 2, or record_mask = false")
    if sampling.min_tokens > sampling.max_tokens:
        yield _problem(
            "sampling.min_tokens", "is larger than sampling.max_tokens", f"use at most {sampling.max_tokens}"
        )


def _lag(spec: JobSpec) -> Iterator[Problem]:
    schedule = spec.schedule
    modes = {schedule.mode, *(switch.mode for switch in schedule.switches)}
    if ("disjoint" in modes or schedule.policy == "measured") and schedule.max_lag < 1:
        yield _problem(
            "schedule.max_lag",
            "0 leaves disjoint pools nothing to overlap",
            "use at least 1, or stay colocated",
        )


def _switches(spec: JobSpec) -> Iterator[Problem]:
    last, mode, updates = 0, spec.schedule.mode, spec.schedule.updates
    for i, switch in enumerate(spec.schedule.switches):
        path = f"schedule.switches.{i}"
        if switch.at_update <= last:
            yield _problem(f"{path}.at_update", "does not rise", f"use more than {last}")
        if switch.at_update >= updates:
            yield _problem(f"{path}.at_update", "is not before the last update", f"use less than {updates}")
        if switch.mode == mode:
            yield _problem(f"{path}.mode", f"the job is {mode} already at that update", "name the other mode")
        last, mode = switch.at_update, switch.mode


def _reward(spec: JobSpec) -> Iterator[Problem]:
    reward = spec.reward
    needs = {"function": "python", "url": "http"}
    given = {"function": reward.function, "url": reward.url}
    for key, source in needs.items():
        if reward.source == source and given[key] is None:
            what = "give module:function" if key == "function" else "give the scorer's URL"
            yield _problem(f"reward.{key}", f"is missing for source {source!r}", what)
        if reward.source != source and given[key] is not None:
            hint = f"leave it out or use source {source!r}"
            yield _problem(f"reward.{key}", f"has no meaning for source {reward.source!r}", hint)
    yield from _judge(spec)


def _judge(spec: JobSpec) -> Iterator[Problem]:
    reward = spec.reward
    if reward.source != "http":
        for key in ("batch", "parallel", "breaker", "budget"):
            if getattr(reward, key) != RewardSpec.model_fields[key].default:
                message = f"has no meaning for source {reward.source!r}"
                yield _problem(f"reward.{key}", message, "leave it out or use source 'http'")
        return
    if reward.url is not None and not _names_a_host(reward.url):
        yield _problem("reward.url", "names no host and port", "http://host:port/path")
    wait = spec.limits.batch_wait
    if reward.budget is not None and reward.budget >= wait:
        message = f"{reward.budget:g} s is not below limits.batch_wait ({wait:g} s), at which the job fails"
        yield _problem("reward.budget", message, f"less than {wait:g}, or a longer limits.batch_wait")
    budget = reward.within(wait)
    if reward.timeout >= budget:
        message = f"{reward.timeout:g} s is not below the {budget:g} s in which a response must be judged"
        yield _problem("reward.timeout", message, f"less than {budget:g}, or a longer reward.budget")


def _prompts(spec: JobSpec) -> Iterator[Problem]:
    """Which prompts are drawn, and whether what is drawn beyond a batch can be used."""
    schedule = spec.schedule
    for path, message, hint in (
        *prompts_spec.mixing(spec.task),
        *prompts_spec.contradictions(spec.prompts, spec.task),
        *prompts_spec.crowding(spec.prompts, spec.batch.groups, schedule.max_lag, schedule.lag_policy),
    ):
        yield _problem(path, message, hint)


def _names_a_host(url: str) -> bool:
    try:
        parts = urlsplit(url)
        return bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port that is no number, or too large
        return False


def _rest(spec: JobSpec) -> Iterator[Problem]:
    if spec.trainer.router_replay and not spec.rollout.record_experts:
        yield _problem(
            "trainer.router_replay",
            "there is nothing to replay: rollout.record_experts is false",
            "set rollout.record_experts = true, or leave it out",
        )
    if len(spec.rollout.pace) not in (0, spec.rollout.most):
        yield _problem(
            "rollout.pace",
            f"has {len(spec.rollout.pace)} entries for {spec.rollout.most} workers",
            "one per worker",
        )
    if spec.loss.correction.low >= spec.loss.correction.high:
        yield _problem("loss.correction.low", "is not below loss.correction.high", "low < high")
    if spec.loss.kind == "cispo" and spec.loss.dual_clip is not None:
        yield _problem(
            "loss.dual_clip",
            "has no meaning for loss.kind 'cispo', whose clipped ratio is a weight",
            "leave it out, or use another kind",
        )


def _transfer(spec: JobSpec) -> Iterator[Problem]:
    transfer = spec.transfer
    if transfer.kind == "objects" and transfer.url is None:
        yield _problem(
            "transfer.url", "is missing for kind 'objects'", "give an address, such as s3://bucket/folder"
        )
    if transfer.kind != "objects" and transfer.url is not None:
        hint = "leave it out or use kind 'objects'"
        yield _problem("transfer.url", f"has no meaning for kind {transfer.kind!r}", hint)
    if transfer.deltas and transfer.kind == "files":
        message = "a worker that maps the store has the whole tensor nearer than any delta"
        yield _problem("transfer.deltas", message, "leave it out, or use another transfer.kind")
    order = spec.limits.activation_wait / 2
    if transfer.kind != "files" and transfer.timeout >= order:
        message = f"{transfer.timeout:g} s is not below the {order:g} s that an order to stage may take"
        yield _problem("transfer.timeout", message, f"less than half of limits.activation_wait ({order:g})")


def _precision(spec: JobSpec) -> Iterator[Problem]:
    """The contract is there, says nothing that contradicts itself or the schedule, and the hardware can run it."""
    named = list(_named(spec))
    if named:
        yield from named
        return
    try:
        contract = spec.contract()
    except BadContract as error:
        yield _problem(error.key, error.message, "a custom contract has the form of a recipe file")
        return
    if spec.precision.variant != "contract" and not contract.families:
        message = (
            f"{spec.precision.variant!r}, and contract {contract.name} quantises nothing: it has no variants"
        )
        yield _problem("precision.variant", message, "leave it out, or choose a recipe with families")
        return
    found = contradictions(contract)
    for problem in found:
        yield _problem(contract_key(spec, problem.path), problem.message, problem.hint)
    if found:
        return
    yield from _limits(spec, contract)
    yield from _trainer(spec, contract)
    decision = support.decide(contract, spec.device.hardware, rollout=spec.rollout.engine)
    for problem in support.problems(decision, spec.precision.emulation):
        yield _problem(contract_key(spec, problem.path), problem.message, problem.hint)


def _named(spec: JobSpec) -> Iterator[Problem]:
    recipe, custom = spec.precision.recipe, spec.precision.custom
    names = ", ".join(sorted(RECIPES))
    if custom is not None:
        if recipe is not None:
            yield _problem("precision.recipe", "precision.custom is given too", "keep one of them")
        if isinstance(name := custom.get("name"), str) and name in RECIPES:
            yield _problem(
                "precision.custom.name",
                f"{name!r} is a shipped recipe",
                "give the contract a name of its own, or use precision.recipe",
            )
    elif recipe is None:
        yield _problem("precision.recipe", "is null, and there is no precision.custom", f"one of {names}")
    elif recipe not in RECIPES:
        yield _problem("precision.recipe", f"there is no recipe {recipe!r}", f"one of {names}")


def contract_key(spec: JobSpec, path: str) -> str:
    """Where in the spec a contract's own key is. A shipped recipe contradicts itself under a variant alone."""
    if path.startswith("precision."):
        return path
    if spec.precision.custom is not None:
        return f"precision.custom.{path}"
    return "precision.recipe" if spec.precision.variant == "contract" else "precision.variant"


def _trainer(spec: JobSpec, contract: PrecisionContract) -> Iterator[Problem]:
    """What the trainer's engine does not carry out of spec and contract."""
    yield from trainer_problems(spec, contract)
    if spec.trainer.engine == "megatron":
        for key, message, hint in megatron_refusals(contract):
            yield _problem(contract_key(spec, key), f"trainer.engine 'megatron': {key} {message}", hint)


def _limits(spec: JobSpec, contract: PrecisionContract) -> Iterator[Problem]:
    """What a recipe asks of the schedule."""
    schedule = spec.schedule
    if contract.max_lag is not None and schedule.max_lag > contract.max_lag:
        message = f"{schedule.max_lag} is more than contract {contract.name} allows"
        yield _problem("schedule.max_lag", message, f"use at most {contract.max_lag}")
    if contract.in_flight is not None and schedule.in_flight != contract.in_flight:
        message = f"{schedule.in_flight!r}, and contract {contract.name} asks for {contract.in_flight!r}"
        yield _problem("schedule.in_flight", message, f"set it to {contract.in_flight!r}")


def _pool(spec: JobSpec) -> Iterator[Problem]:
    """What the pool's bounds contradict. A request may switch any job whose lag bound lets the sides overlap."""
    trains, disjoint = spec.kind == "train", spec.schedule.max_lag >= 1
    for path, message, hint in pool_spec.contradictions(spec.rollout, trains, disjoint):
        yield _problem(path, message, hint)


def _validation(spec: JobSpec) -> Iterator[Problem]:
    for path, message, hint in validation_spec.contradictions(
        spec.validation, spec.kind, spec.rollout.engine
    ):
        yield _problem(path, message, hint)


RULES: tuple[Callable[[JobSpec], Iterator[Problem]], ...] = (
    _batch,
    branch_problems,
    _sampling,
    _lag,
    _switches,
    _reward,
    _prompts,
    _transfer,
    _precision,
    sglang_rules.problems,
    _rest,
    _pool,
    _validation,
    evaluation_rules.problems,
    secrets_rules.problems,
)
