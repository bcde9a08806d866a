"""Several reasoning-gym data sets as one environment, drawn by weight.

`options = { datasets = ["chain_sum", "leg_counting"], weights = [2, 1], size = 500, "chain_sum.max_terms" = 3 }`. Which
data set an index belongs to, and which of its items it is, follow from the seed and the index alone.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping
from typing import Annotated, Any

import msgspec

from syncline.contract.job import Problem
from syncline.environments import options as reading
from syncline.environments import reasoning_gym
from syncline.environments.turns import Prompt, SingleTurn, require_index

_ROUND = 1024  # indices within which the shares are exact


class Options(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Ours. An option of one data set is written `dataset.option`."""

    datasets: Annotated[list[str], msgspec.Meta(min_length=1, max_length=64)]
    weights: list[Annotated[float, msgspec.Meta(gt=0)]] = []  # by data set; empty: all the same
    size: Annotated[int, msgspec.Meta(ge=1, le=100_000_000)] = 1000  # items of each data set
    instruction: Annotated[str, msgspec.Meta(max_length=2000)] = ""


def _split(given: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    ours: dict[str, Any] = {}
    theirs: dict[str, dict[str, Any]] = {}
    for key, value in given.items():
        dataset, dot, option = key.partition(".")
        if dot:
            theirs.setdefault(dataset, {})[option] = value
        else:
            ours[key] = value
    return ours, theirs


def check(given: Mapping[str, Any]) -> list[Problem]:
    """Names, weights, and each data set's own options."""
    ours, theirs = _split(given)
    found = reading.check(Options, ours)
    if found:
        return found
    shape = reading.read(Options, ours)
    if shape.weights and len(shape.weights) != len(shape.datasets):
        message = f"has {len(shape.weights)} entries for {len(shape.datasets)} data sets"
        found.append(Problem(path=f"{reading.PATH}.weights", message=message, hint="one per data set"))
    if len(set(shape.datasets)) != len(shape.datasets):
        found.append(Problem(path=f"{reading.PATH}.datasets", message="names one twice", hint="use weights"))
    for name in theirs.keys() - set(shape.datasets):
        found.append(reading.unknown(f"{name}.{next(iter(theirs[name]))}", shape.datasets))
    for name in shape.datasets:
        found += reasoning_gym.check({"dataset": name, **theirs.get(name, {})})
    return found


class Composite(SingleTurn):
    """See the module. Endless: each data set begins anew when it is used up."""

    size = None

    def __init__(self, given: Mapping[str, Any], seed: int) -> None:
        ours, theirs = _split(given)
        shape = reading.read(Options, ours)
        common = {"size": shape.size, "instruction": shape.instruction}
        self._parts = [
            reasoning_gym.ReasoningGym({"dataset": name, **common, **theirs.get(name, {})}, seed)
            for name in shape.datasets
        ]
        self.name = f"composite {' '.join(part.name for part in self._parts)}"
        weights = shape.weights or [1.0] * len(self._parts)
        whole = [round(_ROUND * edge / sum(weights)) for edge in itertools.accumulate(weights)]
        order = [sum(place >= edge for edge in whole) for place in range(_ROUND)]
        random.Random(f"composite:{seed}").shuffle(order)
        self._order, self._before = order, [order[:place].count(part) for place, part in enumerate(order)]

    def _place(self, index: int) -> tuple[reasoning_gym.ReasoningGym, int]:
        turn, place = divmod(require_index(index), _ROUND)
        part = self._order[place]
        return self._parts[part], turn * self._order.count(part) + self._before[place]

    def prompt(self, index: int) -> Prompt:
        """The data set's prompt, with its name in `meta`."""
        part, own = self._place(index)
        prompt = part.prompt(own)
        meta = {**prompt.meta, "dataset": part.options.dataset}
        return msgspec.structs.replace(prompt, index=index, meta=meta)

    def score(self, index: int, text: str) -> float | None:
        """The data set's own."""
        part, own = self._place(index)
        return part.score(own, text)
