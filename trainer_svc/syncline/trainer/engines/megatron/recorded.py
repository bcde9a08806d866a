"""Recorded expert ids of an update: checked before a pass, and compared with what the routers would choose."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from syncline.numerics.route_agreement import RouteCounts
from syncline.reference.routes import CannotReplay, Routing
from syncline.trainer.engine import Sample
from syncline.trainer.engines.replay import total


def check_recorded(samples: Sequence[Sample], routing: Routing, replay: bool) -> None:
    """Raise `CannotReplay` naming a sample whose record is wrong, or missing where the job replays."""
    if replay and not routing.layers:
        raise CannotReplay("the model does not route: there is nothing to replay")
    for sample in samples:
        name = f"trajectory {sample.trajectory}"
        if sample.routes is None:
            if replay:
                raise CannotReplay(
                    f"{name} has no expert ids, and trainer.router_replay replays every trajectory"
                )
            continue
        ids_TLK = sample.routes.ids()
        routing.check(ids_TLK, name)
        if len(ids_TLK) != len(sample.tokens) - 1:
            raise CannotReplay(
                f"{name}: expert ids for {len(ids_TLK)} tokens, rollout fed {len(sample.tokens) - 1}"
            )


def counted(
    samples: Sequence[Sample], free: Sequence[Tensor], fed: Sequence[int], replay: bool
) -> RouteCounts | None:
    """How the free choices agree with the records. Raises `MisalignedRoutes` as `replay.total` does."""
    counts = [
        None if s.routes is None else RouteCounts.of(ids_TLK, s.routes.ids()[:length])
        for s, ids_TLK, length in zip(samples, free, fed, strict=True)
    ]
    return total(samples, counts, replay)
