"""Recorded expert ids in the trainer's forward pass: replayed if the job asks for it, and always compared.

The rules:

* A record holds one row per token that rollout fed, tool tokens included; that is every token but the last. The
  trainer feeds no token that it does not cover: rows behind its last one (a trajectory that ends with tool tokens)
  stay unused, and a record that is too short is refused.
* A row is of the pass that first fed its token. A context that was recomputed under a newer version keeps the rows
  under which its tokens were sampled.
* Pads go to the first K experts. They take part in nothing: every family routes token by token.
* A replaying job trains nothing unreplayed: a sample without ids is refused by name.
* The reference policy, and weights scored `as_rollout`, route freely: they are not who sampled.

Legend: B rows, T columns, L routing layers, K experts per token.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from syncline.numerics.route_agreement import RouteCounts
from syncline.reference.routes import CannotReplay, RouteTap, check_replayable, replaying
from syncline.trainer.engine import MisalignedRoutes, Sample
from syncline.trainer.engines.forward import fed


class Routes:
    """The routes of one awake model. `replay`: those of the records; otherwise free.

    Raises `CannotReplay` (a `ValueError`) naming the model or router if `replay` is asked of one that cannot.
    """

    def __init__(self, model: nn.Module, replay: bool) -> None:
        if replay:
            check_replayable(model)
        self._model, self._replay = model, replay
        self._tap = RouteTap(model)

    @property
    def tap(self) -> RouteTap:
        """The one tap on the model's routers: its hooks stay for good."""
        return self._tap

    @contextmanager
    def around(self, samples: Sequence[Sample], columns: int) -> Iterator[list[RouteCounts | None]]:
        """Inside, one forward pass over `samples`, padded on the right to `columns`.

        Afterwards the yielded list holds, per sample, how the routes that the model would have chosen freely
        agree with the recorded ones; None: the sample has no record. Under replay "freely" means: given what the
        replayed layers below made of the router's input.
        """
        records = self._records(samples)
        counts: list[RouteCounts | None] = []
        recorded_BTLK = self._padded(records, columns)
        if self._replay:
            device = next(self._model.parameters()).device
            with replaying(self._model, recorded_BTLK.flatten(0, 1).to(device)) as caught:
                yield counts
        else:
            with self._tap.catching(any(r is not None for r in records)) as caught:
                yield counts
        if not caught:
            counts += [None] * len(samples)
            return
        free_BTLK = self._tap.stacked(caught).long().cpu().view(recorded_BTLK.shape)
        lengths_B = torch.tensor([0 if r is None else len(r) for r in records])
        found = RouteCounts.of_rows(free_BTLK, recorded_BTLK, lengths_B)
        counts += [None if r is None else count for r, count in zip(records, found, strict=True)]

    def _records(self, samples: Sequence[Sample]) -> list[Tensor | None]:
        """The samples' ids for the tokens that the trainer feeds, int64 [fed, L, K] on CPU; None: it has none."""
        records = [self._record(sample) for sample in samples]
        there = [ids_TLK for ids_TLK in records if ids_TLK is not None]
        try:
            if there:
                self._tap.routing.check(torch.cat(there), "the update's trajectories")
        except CannotReplay:
            for sample, ids_TLK in zip(samples, records, strict=True):  # which one it is
                if ids_TLK is not None:
                    self._tap.routing.check(ids_TLK, f"trajectory {sample.trajectory}")
            raise
        return [None if r is None else r[: fed(sample)] for r, sample in zip(records, samples, strict=True)]

    def _record(self, sample: Sample) -> Tensor | None:
        """The sample's ids, int64 [tokens, L, K], of the right shape; which experts, nobody has looked."""
        name = f"trajectory {sample.trajectory}"
        if sample.routes is None:
            if self._replay:
                raise CannotReplay(
                    f"{name} has no expert ids, and trainer.router_replay replays every trajectory"
                )
            return None
        ids_TLK, routing = sample.routes.ids(), self._tap.routing
        if ids_TLK.shape[1:] != (routing.layers, routing.topk):
            routing.check(ids_TLK, name)
        if len(ids_TLK) != len(sample.tokens) - 1:
            raise CannotReplay(
                f"{name}: expert ids for {len(ids_TLK)} tokens, rollout fed {len(sample.tokens) - 1}"
            )
        return ids_TLK

    def _padded(self, records: Sequence[Tensor | None], columns: int) -> Tensor:
        """[B, T, L, K]."""
        routing = self._tap.routing
        ids_BTLK = torch.arange(routing.topk).repeat(len(records), columns, routing.layers, 1)
        for b, record in enumerate(records):
            if record is not None:
                ids_BTLK[b, : len(record)] = record
        return ids_BTLK


def total(
    samples: Sequence[Sample], counts: Sequence[RouteCounts | None], replayed: bool
) -> RouteCounts | None:
    """All counts together; None: no sample has a record.

    Raises `MisalignedRoutes` if the records were replayed and fit one token off: the update's as a whole, or one's.
    """
    whole: RouteCounts | None = None
    for sample, part in zip(samples, counts, strict=True):
        if part is None:
            continue
        if replayed and part.shifted:
            raise MisalignedRoutes(
                f"trajectory {sample.trajectory}: its expert ids fit its tokens one token off"
            )
        whole = part if whole is None else whole + part
    if replayed and whole is not None and whole.shifted:
        raise MisalignedRoutes("the expert ids of the update's trajectories fit their tokens one token off")
    return whole
