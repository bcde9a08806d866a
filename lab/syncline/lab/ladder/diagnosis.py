"""From the first failing boundary and its pattern to a likely cause and the next check (seed section 6.1). Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from syncline.lab.ladder.records import TITLES, Check, Diagnosis, Result

Rule = tuple[int, Callable[[Check], bool], Diagnosis]


def _named(*words: str) -> Callable[[Check], bool]:
    return lambda check: all(word in check.name for word in words)


def _says(symptom: str, cause: str, check_next: str) -> Diagnosis:
    return Diagnosis(symptom=symptom, cause=cause, check_next=check_next)


RULES: tuple[Rule, ...] = (
    (
        1,
        _named("baseline"),
        _says(
            "the contract does not say which gap is normal",
            "a low-bit rollout beside a wider trainer has a stable gap that is no fault (K3, GLM-5.2)",
            "measure the same-version gap on a trained policy and state it as `expected`",
        ),
    ),
    (
        1,
        _named("sensitive"),
        _says(
            "a router, an embedding or the output head is in few bits",
            "a pattern of `families.match` is wider than it was meant to be",
            "`syncline precision plan`: name the tensor under `families.keep`",
        ),
    ),
    (
        1,
        _named("lag"),
        _says(
            "the job allows more lag, or another in-flight policy, than its recipe",
            "schedule and recipe were written apart",
            "`schedule.max_lag` and `schedule.in_flight` of the job",
        ),
    ),
    (
        2,
        _named("tensor names"),
        _says(
            "a tensor is missing, left over or renamed",
            "fused names, tied embeddings, or experts that are numbered otherwise",
            "the list of names beside the model's checkpoint index",
        ),
    ),
    (
        2,
        _named("codes"),
        _says(
            "stored codes or scales are not those of the format",
            "scale group, rounding rule, nibble order, padding, or two experts that changed places",
            "the first byte that differs: inside a block rounding, at its edge grouping, everywhere the layout",
        ),
    ),
    (
        2,
        _named("adapter"),
        _says(
            "adapter tensors are not the trainer's",
            "a target is missing, or A and B of another module were written",
            "names and shapes of `lora_A` and `lora_B` of the target that is named",
        ),
    ),
    (
        2,
        _named("wide"),
        _says(
            "a wide tensor is not the trainer's master in BF16",
            "the export took another tensor, or rounded twice",
            "the tensor that is named, beside the trainer's checkpoint",
        ),
    ),
    (
        3,
        _named("kernel"),
        _says(
            "the kernel does not compute what its own codes stand for",
            "a scale that is read for the wrong block, an operand that stays wide, narrow accumulation",
            "the same product with one block, then with scales of one",
        ),
    ),
    (
        3,
        _named("QDQ against BF16"),
        _says(
            "quantization costs more than the format can explain",
            "scales do not belong to their blocks, or the amax was taken of something else",
            "largest error per block beside the block's scale",
        ),
    ),
    (
        4,
        _named("prompt ids"),
        _says(
            "both sides score other tokens",
            "BOS twice, a chat template applied again, or text that was tokenized anew",
            "the first ids of the prompt that is named",
        ),
    ),
    (
        4,
        _named("conventions"),
        _says(
            "log-probs were recorded under another temperature than the job's",
            "the sampling parameters of engine and job differ",
            "`sampling.temperature` and the engine's own default",
        ),
    ),
    (
        4,
        _named("matched"),
        _says(
            "identical weights and numerics score differently",
            "token alignment, temperature, an attention mask, an adapter's scale, or operator coverage",
            "one token apart: alignment; one factor: temperature; only with an adapter: alpha over rank",
        ),
    ),
    (
        4,
        _named("own numerics"),
        _says(
            "the trainer's own numerics are further from rollout than the contract expects",
            "a family is quantised on one side that the contract keeps wide, or the expectation is of another recipe",
            "`syncline precision diagnose`: the gap by component",
        ),
    ),
    (
        5,
        _named("experts"),
        _says(
            "expert ids differ, first in the layer that is named",
            "router inputs or expert selection in that layer; if only in decode, how routes are recorded",
            "the router's logits of that layer on both sides",
        ),
    ),
    (
        5,
        _named("batch"),
        _says(
            "a record scores otherwise beside its neighbours",
            "padding, positions or a mask that reaches across rows",
            "the same record alone, then with a neighbour of its own length",
        ),
    ),
    (
        5,
        _named("grow"),
        _says(
            "the gap grows with the context",
            "KV cache, recurrent state or a position that drifts step by step",
            "decode against prefill at one layer, token by token",
        ),
    ),
    (
        5,
        _named("decode"),
        _says(
            "decoding step by step is not what a prefill of the same tokens says",
            "KV cache, recurrent state, convolution window or sparse index of the step before",
            "the first token that differs: the second one means a state, one behind the window's width the window",
        ),
    ),
    (
        5,
        _named("context in"),
        _says(
            "the quantised context costs more than the contract expects",
            "scales of keys or values are shared too widely",
            "the same prefill with a wide context, layer by layer",
        ),
    ),
    (
        6,
        _named("move"),
        _says(
            "the installed version does not score as its weights say",
            "a derived scale, a fused tensor or an adapter of the version before; bytes arrived and are not read",
            "perturb one tensor at a time: the one that moves nothing is not read",
        ),
    ),
    (
        6,
        _named("cold"),
        _says(
            "an engine that was updated is not one that was started with the same version",
            "something survives a commit: a derived scale, a cache, a tensor that was skipped",
            "tensors of both engines, read back and compared",
        ),
    ),
    (
        6,
        _named("active version"),
        _says(
            "what serves is not what was published",
            "activation flipped a label and not the weights, or the other way round",
            "the manifest's digests beside the engine's own",
        ),
    ),
    (
        6,
        _named("span"),
        _says(
            "tokens behind a commit are not of the version that their span names",
            "the context of the old version was kept under the new one's name",
            "prefix caches and running requests at the commit",
        ),
    ),
    (
        7,
        _named("repeats"),
        _says(
            "the same step gives other bits",
            "an order of additions that depends on threads, or state that is not in the checkpoint",
            "one thread; then the tensors that differ",
        ),
    ),
    (
        7,
        _named("gradient"),
        _says(
            "the forward pass matches and a gradient does not",
            "DGrad or WGrad reads another operand, a token is aligned otherwise in the loss, or a route in replay",
            "the tensor that is named: all of one family means its GEMM, all tensors the loss",
        ),
    ),
    (
        7,
        _named("AdamW"),
        _says(
            "the gradient is right and the update is not",
            "moments of another dtype or step, weight decay, or a rate that is not the spec's",
            "moments and step count of the tensor that is named",
        ),
    ),
    (
        7,
        _named("FP32"),
        _says(
            "optimizer state is narrower than the contract says",
            "moments were cast with the model",
            "`trainer.moments` and the checkpoint's dtypes",
        ),
    ),
    (
        7,
        _named("frozen"),
        _says(
            "something trains that the contract freezes",
            "`requires_grad` of the base, or an adapter target too many",
            "the names that are listed",
        ),
    ),
)


def diagnose(results: Sequence[Result]) -> Diagnosis | None:
    """Of the first level that fails; None: none does."""
    failed = next((result for result in results if not result.holds), None)
    if failed is None:
        return None
    if failed.broke:
        return _says(
            f"level {failed.level} ({TITLES[failed.level][0]}) could not compare: {failed.broke}",
            TITLES[failed.level][1],
            "the message names what was refused",
        )
    first = failed.failed[0]
    for level, fits, said in RULES:
        if level == failed.level and fits(first):
            return said
    return _says(first.name, TITLES[failed.level][1], first.where or "the check's own figures")
