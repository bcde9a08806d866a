"""The ranks of a job's trainer, and the topologies that are refused, each by name."""

from __future__ import annotations

import torch

from syncline.contract import trainer_rules
from syncline.contract.job import JobSpec
from syncline.contract.sharding.grid import BadLayout, Grid
from syncline.contract.sharding.layout import Dimensions


class RefusedTopology(ValueError):
    """A topology that would train wrongly without a word, or that nothing here can run. Names it and the way out."""


def grid_of(spec: JobSpec) -> Grid:
    """The job's ranks. Raises `RefusedTopology` naming sizes that do not go together."""
    try:
        return trainer_rules.grid_of(spec.trainer.parallel)
    except BadLayout as error:
        raise RefusedTopology(f"trainer.parallel: {error}") from None


def check(grid: Grid, model: Dimensions) -> None:
    """Raise `RefusedTopology` for a topology of `model` that does not train right."""
    for why in trainer_rules.topology_refusals(grid, model, gloo=not torch.cuda.is_available()):
        raise RefusedTopology(why)


def dispatcher(grid: Grid) -> str:
    """How tokens come to experts. `alltoall` gathers unevenly over expert TP, which gloo refuses."""
    return "allgather" if uneven_on_gloo(grid) else "alltoall"


def uneven_on_gloo(grid: Grid) -> bool:
    """Whether `alltoall` would need a collective that this machine's backend has not."""
    return grid.etp > 1 and grid.ep > 1 and not torch.cuda.is_available()
