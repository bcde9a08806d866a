"""FP32 masters and optimizer state of one rank, and how gradients and new values travel between ranks.

Who holds the same piece of the same full tensor is read from the layout alone. Replicas add their gradients up (data
parallel ranks saw other samples, sequence parallel ones other tokens, attention ranks other heads); one of them, the
owner, keeps master and moments, steps, and sends the new value to the others. So each master exists once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn

from syncline.contract.job import OptimizerSpec
from syncline.contract.sharding.pieces import Shard, Sharding
from syncline.trainer.engines.megatron.build import device
from syncline.trainer.engines.state import make_optimizer

Ranks = tuple[int, ...]
Rounding = Callable[[str, Tensor], Tensor]
Groups = Callable[[Ranks], dist.ProcessGroup]


class Replicas:
    """For each shard of one rank, the ranks that hold an equal one, and which of them owns it."""

    def __init__(self, sharding: Sharding, rank: int) -> None:
        held: dict[object, list[tuple[int, Shard]]] = {}
        for place in sharding.layout.grid.ranks():
            for shard in sharding.on(place.index):
                held.setdefault(shard.pieces, []).append((place.index, shard))
        self.ranks: dict[str, Ranks] = {}
        self.owner: dict[str, int] = {}
        load = dict.fromkeys(range(sharding.layout.grid.size), 0)
        for found in sorted(held.values(), key=lambda f: (-_size(f[0][1]), f[0][0], f[0][1].name)):
            where = tuple(sorted(index for index, _ in found))
            owner = min(where, key=lambda index: (load[index], index))
            load[owner] += _size(found[0][1])
            for index, shard in found:
                if index == rank:
                    self.ranks[shard.name] = where
                    self.owner[shard.name] = owner
        self.sets = sorted({tuple(sorted(i for i, _ in f)) for f in held.values() if len(f) > 1})


class Masters:
    """What this rank owns of the trained parameters `model` (name -> live parameter of the rank's model).

    rounding   (name, FP32 master) -> the values that the model holds of it
    """

    def __init__(
        self,
        model: Mapping[str, nn.Parameter],
        replicas: Replicas,
        rank: int,
        spec: OptimizerSpec,
        rounding: Rounding,
        groups: Groups,
    ) -> None:
        self._model, self._replicas, self._rank = dict(model), replicas, rank
        self._spec, self._rounding = spec, rounding
        self._groups = {ranks: groups(ranks) for ranks in replicas.sets}
        self.owned: dict[str, nn.Parameter] = {
            name: nn.Parameter(p.detach().float().clone())
            for name, p in self._model.items()
            if replicas.owner[name] == rank
        }
        # a rank may own nothing: torch refuses an optimizer of nothing
        self.optimizer = make_optimizer(list(self.owned.values()), spec) if self.owned else None

    # ---- gradients --------------------------------------------------------------------------------------
    def clear(self) -> None:
        """Forget gradients."""
        for p in self._model.values():
            p.grad = None
        for p in self.owned.values():
            p.grad = None

    def reduce(self) -> list[str]:
        """Add the replicas' gradients up; owners take them. Returns names of those that are not finite."""
        for p in self._model.values():
            if p.grad is None:  # an expert without a token
                p.grad = torch.zeros_like(p)
        for ranks, group in self._groups.items():
            mine = [self._model[n].grad for n in self._of(ranks)]
            if flat := [g.float().flatten() for g in mine if g is not None]:
                whole = torch.cat(flat)
                dist.all_reduce(whole, group=group)
                for gradient, part in zip(mine, torch.split(whole, [f.numel() for f in flat]), strict=True):
                    assert gradient is not None
                    gradient.copy_(part.view_as(gradient))
        bad = []
        for name, master in self.owned.items():
            gradient = self._model[name].grad
            assert gradient is not None
            master.grad = gradient.float()
            if not bool(gradient.isfinite().all()):
                bad.append(name)
        return bad

    def _of(self, ranks: Ranks) -> list[str]:
        """Trained parameters with exactly these replicas, in one order on all of them."""
        return [name for name in self._model if self._replicas.ranks[name] == ranks]

    # ---- one step ---------------------------------------------------------------------------------------
    def apply(self, update: int) -> float:
        """Clip by the norm over all ranks, step number `update` (from 1), send. Returns the norm before clipping."""
        squares = torch.zeros((), dtype=torch.float64)
        for p in self.owned.values():
            assert p.grad is not None
            squares += p.grad.double().square().sum().cpu()
        squares = self._summed(squares)
        norm = float(squares.sqrt())
        scale = min(1.0, self._spec.clip_norm / (norm + 1e-6))
        rate = self._spec.lr * min(1.0, update / self._spec.warmup) if self._spec.warmup else self._spec.lr
        for p in self.owned.values():
            assert p.grad is not None
            p.grad.mul_(scale)
        if self.optimizer is not None:
            for group in self.optimizer.param_groups:
                group["lr"] = rate
            self.optimizer.step()
        self.clear()
        self.send()
        return norm

    def _summed(self, value: Tensor) -> Tensor:
        if dist.get_world_size() > 1:
            value = value.to(device())
            dist.all_reduce(value)
        return value.cpu()

    @torch.no_grad()
    def send(self) -> None:
        """The owners' values, rounded, into every replica's model."""
        for name, master in self.owned.items():
            self._model[name].copy_(self._rounding(name, master.detach()))
        for ranks, group in self._groups.items():
            for owner in ranks:
                mine = [n for n in self._of(ranks) if self._replicas.owner[n] == owner]
                if not mine:
                    continue
                whole = torch.cat([self._model[n].detach().flatten() for n in mine])
                dist.broadcast(whole, src=owner, group=group)
                sizes = [self._model[n].numel() for n in mine]
                for name, part in zip(mine, torch.split(whole, sizes), strict=True):
                    self._model[name].copy_(part.view_as(self._model[name]))

    def moments(self) -> list[Tensor]:
        """The optimizer's tensors of the parameters' shapes."""
        state = {} if self.optimizer is None else self.optimizer.state
        return [t for of in state.values() for t in of.values() if isinstance(t, Tensor) and t.dim()]

    # ---- disk -------------------------------------------------------------------------------------------
    def _named_state(self) -> dict[str, dict[str, Tensor]]:
        if self.optimizer is None:
            return {}
        return {
            name: {field: v for field, v in self.optimizer.state.get(p, {}).items() if isinstance(v, Tensor)}
            for name, p in self.owned.items()
        }

    def state(self) -> dict[str, Tensor]:
        """The optimizer's tensors as `FIELD.PARAMETER`."""
        return {f"{field}.{name}": v for name, of in self._named_state().items() for field, v in of.items()}

    def fields(self) -> tuple[str, ...]:
        """Names of what the optimizer holds per parameter; none before its first step."""
        return tuple(sorted({field for of in self._named_state().values() for field in of}))

    def restore(self, moments: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Inverse of `state`: name -> field -> tensor; a parameter without fields never stepped."""
        for name, p in self.owned.items():
            assert self.optimizer is not None
            self.optimizer.state.pop(p, None)
            if moments.get(name):
                self.optimizer.state[p] = dict(moments[name])

    def broken(self) -> list[str]:
        """Names of owned masters that are not finite."""
        return [name for name, p in self.owned.items() if not bool(p.isfinite().all())]


def _size(shard: Shard) -> int:
    size = 1
    for axis in shard.shape:
        size *= axis
    return size
