"""What a trainer engine does not carry out of a spec, told before a job begins. Pure, without torch or a model."""

from __future__ import annotations

from collections.abc import Iterator

from syncline.contract.compile import CannotCompile
from syncline.contract.compile.megatron import megatron_flags
from syncline.contract.job import JobSpec, Problem
from syncline.contract.precision import PrecisionContract
from syncline.contract.sharding.grid import BadLayout, Grid
from syncline.contract.sharding.layout import Dimensions, Layout
from syncline.contract.trainer_spec import ParallelSpec

MEGATRON_MODELS = ("llama", "mistral", "qwen2", "qwen3", "qwen3_moe", "deepseek_v3")
"""`model_type`s that the Megatron engine builds exactly, as far as the rest of their config.json permits."""
Refusal = tuple[str, str, str]
"""The contract's key, what is wrong, and what would do."""


def trainer_problems(spec: JobSpec, contract: PrecisionContract) -> Iterator[Problem]:
    """What `spec.trainer` asks of its engine and the engine has not. Paths of contracts count from the contract."""
    trainer = spec.trainer
    if trainer.engine == "torch":
        if trainer.parallel != ParallelSpec():
            message = "has ranks, and the torch engine is one process"
            yield Problem(path="trainer.parallel", message=message, hint="use trainer.engine = 'megatron'")
        if trainer.recompute != "none":
            message = f"{trainer.recompute!r}, and the torch engine keeps what its layers computed"
            hint = "leave it out, or use trainer.engine = 'megatron'"
            yield Problem(path="trainer.recompute", message=message, hint=hint)
        return
    try:
        grid_of(trainer.parallel)
    except BadLayout as error:
        hint = "attention: tp x dp ranks per stage; experts: etp x ep of the same"
        yield Problem(path="trainer.parallel", message=str(error), hint=hint)


def grid_of(parallel: ParallelSpec) -> Grid:
    """The ranks of a Megatron trainer. Raises `BadLayout` naming sizes that do not go together."""
    p = parallel
    etp = p.etp if p.etp is not None else (p.tp if p.ep == 1 else 1)
    return Grid(tp=p.tp, pp=p.pp, ep=p.ep, etp=etp, dp=p.dp)


def layout_of(grid: Grid, model: Dimensions) -> Layout:
    """Where a Megatron trainer's ranks hold what. Raises `BadLayout` naming a size that does not divide."""
    return Layout(engine="megatron_local", grid=grid, model=model, padding="drop")


def topology_refusals(grid: Grid, model: Dimensions, gloo: bool) -> Iterator[str]:
    """Topologies of `model` that do not train right, each with the reason and the way out. `gloo`: there is no CUDA."""
    if model.latent and grid.tp > 1:
        # the gradient of the keys' shared rotary part is split over TP, not summed over the ranks' heads first: the
        # logits are right, and one SGD step moves kv_a_proj_with_mqa by another 4e-4
        yield (
            f"trainer.parallel.tp {grid.tp} with latent attention (MLA) trains wrongly without a word on megatron-core "
            "0.16.1's local layers (part of the gradient of kv_a_proj_with_mqa is not summed over tp); legal: 1"
        )
    if model.experts == 0:
        if grid.ep > 1:
            yield f"trainer.parallel.ep {grid.ep}: the model has no experts; legal: 1 (use dp for more ranks)"
        return
    if grid.tp > grid.etp and grid.ep == 1:
        # the experts are then replicated over TP and their gradients are not summed over it: loss 4.284 instead of
        # 4.366 after two steps of a tiny MoE, and nothing says so. megatron-core 0.19 has it right.
        yield (
            f"trainer.parallel: tp {grid.tp} with etp {grid.etp} and ep 1 trains wrongly without a word on "
            f"megatron-core 0.16.1 (expert gradients are not summed over tp); "
            f"use etp {grid.tp}, or ep {grid.tp} with etp 1"
        )
    if gloo and grid.etp > 1 and grid.ep > 1 and grid.pp > 1:
        yield (
            f"trainer.parallel: etp {grid.etp} with ep {grid.ep} and pp {grid.pp} on CPU: the dispatcher that gloo can "
            "carry takes no sequences of different lengths, and pipeline stages exchange such; use etp 1 or pp 1"
        )


def megatron_refusals(contract: PrecisionContract) -> Iterator[Refusal]:
    """What the Megatron engine does not carry out of `contract`. Low-bit GEMMs are compiled to flags first, so that
    what Megatron could not do either is said by its own name.
    """
    trainer, torch = contract.trainer, "trainer.engine 'torch' does"
    if contract.compute == "bf16" and (trainer.parameters, contract.rollout.wide) != ("bf16", "bf16"):
        yield "compute", "'bf16' needs trainer.parameters and rollout.wide 'bf16' too", "use 'bf16' for both"
    if contract.compute == "bf16" and contract.adapter is not None:
        yield "compute", "'bf16' with an adapter is not offered: its products are FP32", "use 'fp32'"
    if trainer.adam_offload:
        yield "trainer.adam_offload", "the engine keeps Adam where the model is", "set it to false"
    yield from _low_bit_gemms(contract)
    if trainer.gather == "fp32" and trainer.parameters == "bf16":
        yield "trainer.gather", "'fp32' with BF16 parameters: ranks send what the model holds", "use 'bf16'"
    if trainer.gather == "fp8_block":
        yield "trainer.gather", "'fp8_block': owners of masters send BF16 or FP32 values", torch
    if contract.families and contract.convert.where == "trainer_rank":
        yield (
            "convert.place",
            "'trainer_rank': the ranks export wide shards, and sync quantises",
            "use 'sync'",
        )
    for i, family in enumerate(contract.families):
        if family.weight.format == "nvfp4":
            yield (
                f"families.{i}.weight.format",
                "'nvfp4': its outer scale is of a whole tensor, and a rank holds a part of it",
                torch,
            )


def _low_bit_gemms(contract: PrecisionContract) -> Iterator[Refusal]:
    """Codes in a GEMM need Transformer Engine: without it megatron-core fails on FP8 flags, and ignores FP4 flags."""
    trainer = contract.trainer
    gemms = {"fprop": trainer.fprop, "dgrad": trainer.dgrad, "wgrad": trainer.wgrad}
    kinds = {kind for gemm in gemms.values() for kind in (gemm.left, gemm.right)}
    if "codes" not in kinds:
        return
    key = next(name for name, gemm in gemms.items() if "codes" in (gemm.left, gemm.right))
    hint = "trainer.engine 'torch' emulates them"
    if all(family.weight.format != "nvfp4" for family in contract.families):
        hint = f"precision.variant 'qdq' fakes them in this engine; {hint}"
    try:
        flags = " ".join(megatron_flags(contract).flags)
    except CannotCompile as error:
        yield error.key, str(error), hint
        return
    message = (
        f"{flags} need Transformer Engine, whose layers the megatron engine does not build; megatron-core alone "
        "would ignore FP4 flags without a word"
    )
    yield f"trainer.{key}", message, hint
