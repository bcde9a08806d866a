"""Which prompt is drawn next: a pure function of what was drawn so far and of what became of it.

`Drawn` is all there is to remember, apart from measured rewards (`Rates`); it is saved in one transaction with the
machine's state, before what was drawn is submitted. So a successor draws what its predecessor would have drawn.

The n-th regular draw depends on n and the spec alone, unless the spec asks for rewards (`prompts.measures`): which
data set (exact shares in each round, in an order drawn from the seed), which epoch and which item of it. A prompt that
is drawn again goes before, in the order in which its groups ended.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import lru_cache
from hashlib import blake2b
from typing import Literal

import msgspec

from syncline.contract.drawn import Lost, PromptAccount, Tally, told
from syncline.contract.prompts_spec import PromptsSpec

_ROUNDS = 6  # of the Feistel network


class Source(msgspec.Struct, frozen=True, kw_only=True):
    """One data set as the scheduler needs it. Made by `sources.sources` from the spec and the data."""

    name: str
    weight: int = 1
    first: int = 0
    items: int | None = None  # that an epoch draws, from `first` on; None: endless
    whole: int | None = None  # items of the data set, after which indices begin anew; None: they do not
    order: Literal["given", "shuffled", "easiest_first"] = "given"
    difficulties: tuple[float, ...] = ()  # of the items drawn, from `first` on; empty: none are given


class Draw(msgspec.Struct, frozen=True, array_like=True):
    """A group and what it samples."""

    group: int
    prompt: int  # index for `environment.prompt`
    epoch: int  # of its data set


class Drawn(msgspec.Struct, kw_only=True):
    """What was drawn and what became of it. Small: open groups and prompts in trouble, never the data set."""

    count: int = 0  # regular draws, over all data sets
    places: list[int] = []  # by data set: places of its sequence that were drawn or passed over
    again: list[Draw] = []  # to be drawn again, oldest first; `group` is the one that ended
    tries: dict[int, int] = {}  # prompt -> how often it was drawn again
    epochs: dict[int, int] = {}  # open group -> epoch; kept only where rewards are measured
    pending: list[Draw] = []  # decided and saved, perhaps not submitted yet
    cursor: str = "0"  # of the outcomes folded
    barren: int = 0  # groups filtered since one was trained
    tallies: list[Tally] = []
    lost: list[Lost] = []  # the newest


Rates = dict[str, tuple[int, float]]
"""`source:item` -> epoch in which its group ended newest, mean reward of that group."""


class Sequences:
    """The sequences of a job's data sets. Holds the spec, and the present orders that follow from rewards.

    orders   `source` -> (epoch, order of that epoch's places), where rewards decide it; saved with `Rates`
    """

    def __init__(self, sources: Sequence[Source], prompts: PromptsSpec, seed: int) -> None:
        self.sources, self.prompts, self.seed = tuple(sources), prompts, seed
        self.orders: dict[int, tuple[int, list[int]]] = {}
        self._weights = [source.weight for source in self.sources]
        self._round = sum(self._weights)
        self._turns = lru_cache(maxsize=2)(self._make_turns)
        self._sorted = lru_cache(maxsize=2 * len(self.sources))(self._make_sorted)

    def begin(self, drawn: int) -> Drawn:
        """The state before anything was drawn; or, of a job of one data set in its given order, after `drawn`."""
        places = [0] * len(self.sources)
        places[0] = drawn
        return Drawn(count=drawn, places=places, tallies=[Tally(name=source.name) for source in self.sources])

    def next(self, drawn: Drawn, group: int, rates: Rates) -> Draw:
        """Draw the prompt of `group`. Changes `drawn`, and `orders` where a new epoch is ordered by rewards."""
        if drawn.again:
            before = drawn.again.pop(0)
            draw = Draw(group, before.prompt, before.epoch)
            drawn.tallies[self.source_of(draw.prompt)].again += 1
        else:
            turn, place = divmod(drawn.count, self._round)
            drawn.count += 1
            draw = self._regular(drawn, group, self._turns(turn)[place], rates)
        tally = drawn.tallies[self.source_of(draw.prompt)]
        tally.drawn += 1
        tally.epoch = max(tally.epoch, draw.epoch)
        if self.prompts.measures:
            drawn.epochs[group] = draw.epoch
        return draw

    def source_of(self, prompt: int) -> int:
        """Which data set a prompt is of: those of a mix take turns, as `environments/mix.py` has it."""
        return prompt % len(self.sources)

    def item_of(self, prompt: int) -> str:
        """The prompt's key in `Rates`."""
        own, which = divmod(prompt, len(self.sources))
        whole = self.sources[which].whole
        return f"{which}:{own if whole is None else own % whole}"

    def _regular(self, drawn: Drawn, group: int, which: int, rates: Rates) -> Draw:
        """The next item of data set `which` that does not rest. Ends: an item rests `rest` epochs at most."""
        while True:
            epoch, item = self._at(which, drawn.places[which], rates)
            drawn.places[which] += 1
            if not self._rests(which, epoch, item, rates):
                break
            drawn.tallies[which].rested += 1
        whole = self.sources[which].whole
        own = item if whole is None else epoch * whole + item
        return Draw(group, own * len(self.sources) + which, epoch)

    def _at(self, which: int, place: int, rates: Rates) -> tuple[int, int]:
        """Epoch and item at this place of the data set's sequence."""
        source = self.sources[which]
        if source.items is None:
            return 0, source.first + place
        epoch, place = divmod(place, source.items)
        match source.order:
            case "given":
                inside = place
            case "shuffled":
                inside = shuffled(place, source.items, self._key(which, epoch))
            case "easiest_first" if source.difficulties:
                inside = self._sorted(which, epoch)[place]
            case "easiest_first":
                inside = self._by_reward(which, epoch, rates)[place]
        return epoch, source.first + inside

    def _rests(self, which: int, epoch: int, item: int, rates: Rates) -> bool:
        easiest, hardest = self.prompts.easiest, self.prompts.hardest
        measured = rates.get(f"{which}:{item}")
        if measured is None or epoch - measured[0] > self.prompts.rest:
            return False
        too_easy = easiest is not None and measured[1] > easiest
        return too_easy or (hardest is not None and measured[1] < hardest)

    def _by_reward(self, which: int, epoch: int, rates: Rates) -> list[int]:
        """An epoch's order, fixed when its first item is drawn: highest reward first, the unmeasured in the middle."""
        held = self.orders.get(which)
        if held is None or held[0] != epoch:
            source = self.sources[which]
            inside = range(source.items or 0)
            known = {i: rates[key][1] for i in inside if (key := f"{which}:{source.first + i}") in rates}
            middle = sum(known.values()) / len(known) if known else 0.0
            lot = self._key(which, epoch)
            order = sorted(inside, key=lambda i: (-known.get(i, middle), shuffled(i, len(inside), lot)))
            held = self.orders[which] = (epoch, order)
        return held[1]

    def _make_sorted(self, which: int, epoch: int) -> list[int]:
        hard, key = self.sources[which].difficulties, self._key(which, epoch)
        return sorted(range(len(hard)), key=lambda i: (hard[i], shuffled(i, len(hard), key)))

    def _make_turns(self, turn: int) -> list[int]:
        """Whose turn it is in this round: each data set `weight` times."""
        order = [which for which, weight in enumerate(self._weights) for _ in range(weight)]
        if len(self.sources) > 1:
            random.Random(f"mix:{self.seed}:{turn}").shuffle(order)
        return order

    def _key(self, which: int, epoch: int) -> bytes:
        return f"{self.seed}:{which}:{epoch}".encode()


def shuffled(place: int, size: int, key: bytes) -> int:
    """Where `place` goes in a permutation of `size` places that `key` chooses; nothing is held.

    A Feistel network over the next power of four, walked until it is inside (Black and Rogaway, CT-RSA 2002).
    """
    half = max(1, ((size - 1).bit_length() + 1) // 2)
    mask = (1 << half) - 1
    while True:
        left, right = place >> half, place & mask
        for number in range(_ROUNDS):
            mixed = blake2b(b"%d:%d" % (number, right), key=key, digest_size=8).digest()
            left, right = right, left ^ (int.from_bytes(mixed, "little") & mask)
        place = left << half | right
        if place < size:
            return place


def account(drawn: Drawn) -> PromptAccount:
    """What people are told: per data set, and the prompts that were given up."""
    return PromptAccount(sources=tuple(map(told, drawn.tallies)), lost=tuple(drawn.lost))
