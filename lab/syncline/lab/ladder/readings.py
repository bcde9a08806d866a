"""How failures read: level and words of the first check that fails -> symptom, likely cause, next check (seed 6.1)."""

from __future__ import annotations

from typing import NamedTuple

from syncline.lab.ladder.records import Level


class Reading(NamedTuple):
    """What a failing check of `level` whose name holds `words` means."""

    level: Level
    words: str
    symptom: str
    cause: str
    check_next: str


READINGS: tuple[Reading, ...] = (
    Reading(
        1,
        "baseline",
        "the contract does not say which gap is normal",
        "a low-bit rollout beside a wider trainer has a stable gap that is no fault (K3, GLM-5.2)",
        "measure the same-version gap on a trained policy and state it as `expected`",
    ),
    Reading(
        1,
        "sensitive",
        "a router, an embedding or the output head is in few bits",
        "a pattern of `families.match` is wider than it was meant to be",
        "`syncline precision plan`: name the tensor under `families.keep`",
    ),
    Reading(
        1,
        "lag",
        "the job allows more lag, or another in-flight policy, than its recipe",
        "schedule and recipe were written apart",
        "`schedule.max_lag` and `schedule.in_flight` of the job",
    ),
    Reading(
        2,
        "tensor names",
        "a tensor is missing, left over or renamed",
        "fused names, tied embeddings, or experts that are numbered otherwise",
        "the list of names beside the model's checkpoint index",
    ),
    Reading(
        2,
        "codes",
        "stored codes or scales are not those of the format",
        "scale group, rounding rule, nibble order, padding, or two experts that changed places",
        "the first byte that differs: inside a block rounding, at its edge grouping, everywhere the layout",
    ),
    Reading(
        2,
        "adapter",
        "adapter tensors are not the trainer's",
        "a target is missing, or A and B of another module were written",
        "names and shapes of `lora_A` and `lora_B` of the target that is named",
    ),
    Reading(
        2,
        "wide",
        "a wide tensor is not the trainer's master in BF16",
        "the export took another tensor, or rounded twice",
        "the tensor that is named, beside the trainer's checkpoint",
    ),
    Reading(
        3,
        "kernel",
        "the kernel does not compute what its own codes stand for",
        "a scale that is read for the wrong block, an operand that stays wide, narrow accumulation",
        "the same product with one block, then with scales of one",
    ),
    Reading(
        3,
        "QDQ against BF16",
        "quantization costs more than the format can explain",
        "scales do not belong to their blocks, or the amax was taken of something else",
        "largest error per block beside the block's scale",
    ),
    Reading(
        4,
        "prompt ids",
        "both sides score other tokens",
        "BOS twice, a chat template applied again, or text that was tokenized anew",
        "the first ids of the prompt that is named",
    ),
    Reading(
        4,
        "conventions",
        "log-probs were recorded under another temperature than the job's",
        "the sampling parameters of engine and job differ",
        "`sampling.temperature` and the engine's own default",
    ),
    Reading(
        4,
        "matched",
        "identical weights and numerics score differently",
        "token alignment, temperature, an attention mask, an adapter's scale, or operator coverage",
        "one token apart: alignment; one factor: temperature; only with an adapter: alpha over rank",
    ),
    Reading(
        4,
        "own numerics",
        "the trainer's own numerics are further from rollout than the contract expects",
        "a family is quantised on one side that the contract keeps wide, or the expectation is of another recipe",
        "`syncline precision diagnose`: the gap by component",
    ),
    Reading(
        5,
        "experts",
        "expert ids differ, first in the layer that is named",
        "router inputs or expert selection in that layer; if only in decode, how routes are recorded",
        "the router's logits of that layer on both sides",
    ),
    Reading(
        5,
        "batch",
        "a record scores otherwise beside its neighbours",
        "padding, positions or a mask that reaches across rows",
        "the same record alone, then with a neighbour of its own length",
    ),
    Reading(
        5,
        "grow",
        "the gap grows with the context",
        "KV cache, recurrent state or a position that drifts step by step",
        "decode against prefill at one layer, token by token",
    ),
    Reading(
        5,
        "KV cache:",
        "keys or values after decoding are not those of a prefill",
        "KV cache: a column, a position, or a context that a swap or a neighbour has moved; it grows with the context",
        "the layer that is named, column by column: one column off, or one row of another request",
    ),
    Reading(
        5,
        "recurrent state",
        "the recurrent state after decoding is not that of a prefill",
        "a recurrent state that is begun anew, kept of another request, or fed a pad",
        "the layer that is named after one step, then after two",
    ),
    Reading(
        5,
        "convolution window",
        "the short convolution's window after decoding is not that of a prefill",
        "a convolution window that is shifted or ordered otherwise",
        "the window's columns beside the last inputs of that layer",
    ),
    Reading(
        5,
        "index",
        "sparse attention chooses other tokens of the same context",
        "index keys of another token or scale, or an index that counts pads",
        "the indexer that is named: its keys first, then its scores at the last chosen token",
    ),
    Reading(
        5,
        "decode",
        "decoding step by step is not what a prefill of the same tokens says",
        "KV cache, recurrent state, convolution window or sparse index of the step before",
        "the first token that differs: the second one means a state, one behind the window's width the window",
    ),
    Reading(
        5,
        "context in",
        "the quantised context costs more than the contract expects",
        "scales of keys or values are shared too widely",
        "the same prefill with a wide context, layer by layer",
    ),
    Reading(
        6,
        "changes the scores",
        "bytes arrived, and nothing scores otherwise",
        "what was installed is not read: an adapter or a version that is active by name alone",
        "the manifest's digests, then the active version's name, then what the kernel reads: in this order",
    ),
    Reading(
        6,
        "move",
        "the first load matches, and an update does not score as its weights say",
        "shard reconstruction, tensor fusion, packing or activation: a derived scale, a part of a fused tensor, or some"
        " of an adapter's tensors are of the version before",
        "perturb one tensor at a time: the one that moves nothing is not read",
    ),
    Reading(
        6,
        "cold",
        "an engine that was updated is not one that was started with the same version",
        "something survives a commit: a derived scale, a cache, a tensor that was skipped",
        "tensors of both engines, read back and compared",
    ),
    Reading(
        6,
        "active version",
        "what serves is not what was published",
        "activation flipped a label and not the weights, or the other way round",
        "the manifest's digests beside the engine's own",
    ),
    Reading(
        6,
        "span",
        "tokens behind a commit are not of the version that their span names",
        "the context of the old version was kept under the new one's name",
        "prefix caches and running requests at the commit",
    ),
    Reading(
        7,
        "repeats",
        "the same step gives other bits",
        "an order of additions that depends on threads, or state that is not in the checkpoint",
        "one thread; then the tensors that differ",
    ),
    Reading(
        7,
        "gradient",
        "the forward pass matches and a gradient does not",
        "DGrad or WGrad reads another operand, a token is aligned otherwise in the loss, or a route in replay",
        "the tensor that is named: all of one family means its GEMM, all tensors the loss",
    ),
    Reading(
        7,
        "AdamW",
        "the gradient is right and the update is not",
        "moments of another dtype or step, weight decay, or a rate that is not the spec's",
        "moments and step count of the tensor that is named",
    ),
    Reading(
        7,
        "FP32",
        "optimizer state is narrower than the contract says",
        "moments were cast with the model",
        "`trainer.moments` and the checkpoint's dtypes",
    ),
    Reading(
        7,
        "frozen",
        "something trains that the contract freezes",
        "`requires_grad` of the base, or an adapter target too many",
        "the names that are listed",
    ),
    Reading(
        8,
        "version age",
        "tokens are older than the job allows",
        "a version is published late, or its label moves without it",
        "`syncline versions`: minted to active of each version",
    ),
    Reading(
        8,
        "gap",
        "the same-version gap grows in the course of a run, and holds on a fixed version",
        "labels move on and weights do not, or a state of the trainer that no export carries",
        "level 6 at the version where the gap begins",
    ),
    Reading(
        8,
        "gradient norm",
        "gradients spike while every single step is right",
        "a rate or a clip that a schedule changes, or ratios far from 1",
        "ratios and entropy of the update before the spike",
    ),
    Reading(
        8,
        "entropy",
        "the policy stops exploring within a few updates",
        "steps too large for the task, or an entropy bonus that is lost",
        "`optimizer.lr`, and the gradient norm of the updates before",
    ),
    Reading(
        9,
        "codes made",
        "low precision brings no speed",
        "scales and codes are constructed anew where they could be kept",
        "shares of scale construction, then small or ragged GEMMs, transposes and launch gaps",
    ),
)
