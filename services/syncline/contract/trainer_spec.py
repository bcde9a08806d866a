"""The part of a job spec that says who trains, and over how many ranks."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from syncline.contract.spec_part import Part


class ParallelSpec(Part):
    """Ranks of the `megatron` trainer. Attention and dense layers: tp x dp per stage; experts: etp x ep of the same."""

    tp: int = Field(1, ge=1, le=1024, description="tensor-parallel ranks")
    pp: int = Field(1, ge=1, le=1024, description="pipeline stages")
    ep: int = Field(1, ge=1, le=1024, description="expert-parallel ranks; they are among tp x dp")
    etp: int | None = Field(
        None, ge=1, le=1024, description="tensor-parallel ranks of experts; null: tp without ep, else 1"
    )
    dp: int = Field(1, ge=1, le=1024, description="data-parallel ranks")
    deadline: float = Field(
        600.0, gt=0, description="seconds a rank may keep the others waiting before the step fails, naming it"
    )


class TrainerSpec(Part):
    engine: Literal["torch", "megatron"] = Field(
        "torch", description="torch: one process, any causal LM; megatron: megatron-core, over `parallel`"
    )
    parallel: ParallelSpec = ParallelSpec()
    router_replay: bool = Field(
        False,
        description="route each token as rollout did, by its recorded expert ids; needs rollout.record_experts",
    )
    recompute: Literal["none", "layers"] = Field(
        "none",
        description="layers: the megatron engine keeps each layer's input alone, and runs the layer again in the "
        "backward pass: less memory, a third more time, the same bits",
    )
