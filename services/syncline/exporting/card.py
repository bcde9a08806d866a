"""The model card: what an export is, where it comes from, and what is known of how good it is. Nothing more.

Pure. Each sentence stands on a record: the manifest, the contract, the spec, the gateway's `Story`. What no record
says is said to be unknown.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import UTC, datetime

import msgspec

from syncline.contract.exported import SCORES, ExportRequest
from syncline.contract.job import JobSpec
from syncline.contract.precision import PrecisionContract
from syncline.contract.precision_words import components, scheme_words
from syncline.contract.version_path import VersionManifest

PARENTS = 12  # versions of the lineage that the card lists; the rest is counted
POINTS = 12  # updates of the reward curve that the card lists


class Told(msgspec.Struct, kw_only=True):
    """What the making of an export adds. `load`: the command that serves it; `base`: digest of an adapter's base."""

    values: str
    load: str
    checks: list[str]
    caveats: list[str] = []
    base: str = ""
    tensors: int = 0


def render(
    request: ExportRequest,
    spec: JobSpec,
    contract: PrecisionContract,
    manifest: VersionManifest | None,
    told: Told,
) -> str:
    """README.md of the export."""
    lines = [
        *_front(request, spec),
        f"# {spec.name}, version {request.version}",
        "",
        f"Written by `syncline export {request.job} --version {request.version} --format {request.format}"
        f"{' --from checkpoint' if request.origin == 'checkpoint' else ''}`. Every statement here is read from the "
        "job's own records; what they do not hold is said to be unknown.",
        "",
        *_section("What this is", _what(request, spec, manifest, told)),
        *_section("How to load it", _load(request, told)),
        *_section("Lineage", _lineage(request)),
        *_section("Precision contract", _contract(contract, manifest)),
        *_section("Task and training", _training(request, spec)),
        *_section("Reward while training", _rewards(request)),
        *_section("Evaluation", _evaluations(request, manifest)),
        *_section("How it was checked", _checks(request, told)),
    ]
    return "\n".join(lines).rstrip() + "\n"


def _front(request: ExportRequest, spec: JobSpec) -> list[str]:
    library = "peft" if request.format == "lora" else "transformers"
    return [
        "---",
        f"library_name: {library}",
        "pipeline_tag: text-generation",
        f"base_model: {json.dumps(spec.model.name)}",
        "tags: [reinforcement-learning, syncline]",
        "---",
        "",
    ]


def _section(title: str, body: Iterator[str]) -> list[str]:
    return [f"## {title}", "", *body, ""]


def _what(
    request: ExportRequest, spec: JobSpec, manifest: VersionManifest | None, told: Told
) -> Iterator[str]:
    weights = (
        "its own pretrained weights"
        if spec.model.weights == "pretrained"
        else (f"random weights of seed {spec.seeds.model}")
    )
    yield f"- model: `{spec.model.name}`, trained from {weights}"
    yield f"- job: `{request.job}` ({spec.name}), which {_state(request.story.state)}"
    yield f"- version: `{request.version}`: the weights after {request.version.number} updates"
    if manifest is not None:
        yield f"- manifest: sha256 `{manifest.digest()}`, signed by the job"
        yield f"- optimizer step: {manifest.optimizer_step}"
        yield f"- representation of the version: {manifest.representation}"
    else:
        yield "- read from a checkpoint of the trainer, which is not signed; optimizer step: " + str(
            request.version.number
        )
    yield f"- tensors: {told.tensors}; values: {told.values}"
    if told.base:
        yield f"- base: digest `{told.base}` over its tensors as rollout held them (name, dtype, shape, sha256)"
    elif request.format == "lora":
        yield "- base: the checkpoint does not say its digest as rollout held it"


def _state(state: str) -> str:
    ended = {"succeeded": "had succeeded", "failed": "had failed", "cancelled": "was cancelled"}
    return ended.get(state, f"was {state}") + " when this was written"


def _load(request: ExportRequest, told: Told) -> Iterator[str]:
    match request.format:
        case "hf":
            yield "```python"
            yield "from transformers import AutoModelForCausalLM, AutoTokenizer"
            yield ""
            yield "model = AutoModelForCausalLM.from_pretrained(DIR)  # dtype=torch.float32: the trainer's arithmetic"
            yield "tokenizer = AutoTokenizer.from_pretrained(DIR)"
            yield "```"
        case "lora":
            yield "`peft.PeftModel.from_pretrained(base, DIR)` puts it on the base named above, and on no other."
        case "sglang":
            yield "```"
            yield told.load
            yield "```"
    for caveat in told.caveats:
        yield f"- caveat: {caveat}"


def _lineage(request: ExportRequest) -> Iterator[str]:
    steps = request.story.lineage
    if not steps:
        yield f"Unknown: no record of version {request.version} or its parents is kept any more."
        return
    yield "| version | parent | optimizer step | manifest | verified on |"
    yield "|---|---|---|---|---|"
    for step in steps[:PARENTS]:
        workers = "; ".join(f"{worker}: {said}" for worker, said in step.verified.items()) or "no worker"
        yield (
            f"| {step.version} | {step.parent or '-'} | {step.optimizer_step} | "
            f"{f'`{step.digest[:12]}`' if step.digest else 'not published'} | {workers} |"
        )
    if len(steps) > PARENTS:
        yield ""
        yield f"{len(steps) - PARENTS} more back to version {steps[-1].version}."


def _contract(contract: PrecisionContract, manifest: VersionManifest | None) -> Iterator[str]:
    yield f"`{contract.name}`, digest `{contract.digest()}`: {contract.about}"
    yield ""
    for component, said in components(contract).items():
        yield f"- {component}: {said}"
    for family in contract.families:
        yield (
            f"- family {family.name}: weights {scheme_words(family.weight)}, activations "
            f"{scheme_words(family.activation)}; {', '.join(f'`{p}`' for p in family.match)}"
        )
    if contract.adapter is not None:
        adapter = contract.adapter
        yield (
            f"- adapter: rank {adapter.rank}, factor {adapter.scale():g}, on "
            f"{', '.join(f'`{t}`' for t in adapter.targets)}"
        )
    if manifest is not None:
        yield f"- precision plan: `{manifest.plan}`"


def _training(request: ExportRequest, spec: JobSpec) -> Iterator[str]:
    options = json.dumps(spec.task.options, sort_keys=True)
    yield f"- environment: `{spec.task.environment}`, options `{options}`, data seed {spec.seeds.data}"
    yield f"- reward: {spec.reward.source}{f' `{spec.reward.function}`' if spec.reward.function else ''}"
    yield (
        f"- {spec.batch.groups} groups of {spec.batch.group_size} trajectories per update, loss {spec.loss.kind}, "
        f"{spec.optimizer.name} at {spec.optimizer.lr:g}, at most lag {spec.schedule.max_lag}"
    )
    sampling = spec.sampling
    yield (
        f"- sampled at temperature {sampling.temperature:g}, top-p {sampling.top_p:g}, top-k {sampling.top_k}, "
        f"at most {sampling.max_tokens} tokens"
    )
    yield f"- spec hash `{spec.hash()}`"


def _rewards(request: ExportRequest) -> Iterator[str]:
    rewards = request.story.rewards
    if not rewards:
        yield "Unknown: no metrics of the updates up to this version are kept."
        return
    step = max(1, -(-len(rewards) // POINTS))
    shown = rewards[::-1][::step][::-1]
    yield "Mean over groups of the group's mean reward, on the prompts that were trained on."
    yield ""
    yield "| update | " + " | ".join(str(update) for update, _ in shown) + " |"
    yield "|---|" + "---|" * len(shown)
    yield "| reward | " + " | ".join("-" if r is None else f"{r:.4g}" for _, r in shown) + " |"


def _evaluations(request: ExportRequest, manifest: VersionManifest | None) -> Iterator[str]:
    if not request.story.evaluations:
        yield "No evaluation of this version is recorded."
        return
    yield "On prompts that the evaluation drew, sampled by rollout workers; intervals are of 95 % over prompts."
    yield ""
    for told in request.story.evaluations:
        interval = "" if told.reward_interval is None else f" ({_range(told.reward_interval)})"
        yield (
            f"- mean reward {_value(told.mean_reward)}{interval} over {told.prompts} prompts from index {told.first} "
            f"on (data seed {told.seed}), {told.samples} samples each"
        )
        for k, found in sorted(told.pass_at.items(), key=lambda item: int(item[0])):
            said = "unknown: no prompt has as many samples that count"
            if found is not None:
                said = f"{_value(found[0])} ({_range(found[1:])}), over {told.pass_prompts.get(k, 0)} prompts"
            yield f"  - pass@{k}: {said}; correct is a reward of at least {told.threshold:g}"
        yield (
            f"  - {told.counted} samples count, {told.correct} of them correct; {told.unscored} unscored, {told.lost} "
            f"lost, {told.foreign} of other weights: none of those counts as wrong"
        )
        yield f"  - sampling `{json.dumps(told.sampling, sort_keys=True)}`; contract `{told.contract[:12]}`"
        same = manifest is not None and told.digest == manifest.digest()
        which = "this manifest" if same else f"manifest `{told.digest[:12]}`"
        ended = datetime.fromtimestamp(told.when, UTC).strftime("%Y-%m-%d %H:%M UTC")
        yield f"  - of {which}, by job `{told.job}`, {ended}"


def _range(ends: tuple[float, ...]) -> str:
    return f"{_value(ends[0])} to {_value(ends[1])}"


def _value(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.4g}"


def _checks(request: ExportRequest, told: Told) -> Iterator[str]:
    yield "Checked while it was written:"
    yield ""
    for check in told.checks:
        yield f"- {check}"
    yield "- the sha256 of each file, which `export.json` lists"
    yield ""
    if request.story.canaries:
        yield (
            f"`{SCORES}` has {len(request.story.canaries)} fixed prefixes with the trainer's own log-probs of this "
            "version, scored with rollout's arithmetic (`tokens[prompt:]` are scored, temperature 1)."
        )
    elif request.origin == "version":
        yield "The trainer's scores of its fixed prefixes at this version are no longer kept."
