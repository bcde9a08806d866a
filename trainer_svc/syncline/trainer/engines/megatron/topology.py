"""The ranks of a job's trainer, and the topologies that are refused, each by name."""

from __future__ import annotations

import torch

from syncline.contract.job import JobSpec
from syncline.contract.sharding.grid import BadLayout, Grid
from syncline.contract.sharding.layout import Dimensions, Layout
from syncline.contract.trainer_rules import grid_of as rules_grid_of


class RefusedTopology(ValueError):
    """A topology that would train wrongly without a word, or that nothing here can run. Names it and the way out."""


def grid_of(spec: JobSpec) -> Grid:
    """The job's ranks. Raises `RefusedTopology` naming sizes that do not go together."""
    try:
        return rules_grid_of(spec.trainer.parallel)
    except BadLayout as error:
        raise RefusedTopology(f"trainer.parallel: {error}") from None


def check(grid: Grid, model: Dimensions) -> None:
    """Raise `RefusedTopology` for a topology of `model` that does not train right."""
    if model.latent and grid.tp > 1:
        # the gradient of the keys' shared rotary part is split over TP, not summed over the ranks' heads first: the
        # logits are right, and one SGD step moves kv_a_proj_with_mqa by another 4e-4
        raise RefusedTopology(
            f"trainer.parallel.tp {grid.tp} with latent attention (MLA) trains wrongly without a word on megatron-core "
            "0.16.1's local layers (part of the gradient of kv_a_proj_with_mqa is not summed over tp); legal: 1"
        )
    if model.experts == 0:
        if grid.ep > 1:
            raise RefusedTopology(
                f"trainer.parallel.ep {grid.ep}: the model has no experts; legal: 1 (use dp for more ranks)"
            )
        return
    if grid.tp > grid.etp and grid.ep == 1:
        # the experts are then replicated over TP and their gradients are not summed over it: loss 4.284 instead of
        # 4.366 after two steps of a tiny MoE, and nothing says so. megatron-core 0.19 has it right.
        raise RefusedTopology(
            f"trainer.parallel: tp {grid.tp} with etp {grid.etp} and ep 1 trains wrongly without a word on "
            f"megatron-core 0.16.1 (expert gradients are not summed over tp); "
            f"use etp {grid.tp}, or ep {grid.tp} with etp 1"
        )
    if uneven_on_gloo(grid) and grid.pp > 1:
        raise RefusedTopology(
            f"trainer.parallel: etp {grid.etp} with ep {grid.ep} and pp {grid.pp} on CPU: the dispatcher that gloo can "
            "carry takes no sequences of different lengths, and pipeline stages exchange such; use etp 1 or pp 1"
        )


def dispatcher(grid: Grid) -> str:
    """How tokens come to experts. `alltoall` gathers unevenly over expert TP, which gloo refuses."""
    return "allgather" if uneven_on_gloo(grid) else "alltoall"


def uneven_on_gloo(grid: Grid) -> bool:
    """Whether `alltoall` would need a collective that this machine's backend has not."""
    return grid.etp > 1 and grid.ep > 1 and not torch.cuda.is_available()


def layout_of(grid: Grid, model: Dimensions) -> Layout:
    """Where the ranks hold what. Raises `BadLayout` naming a size that does not divide."""
    return Layout(engine="megatron_local", grid=grid, model=model, padding="drop")
