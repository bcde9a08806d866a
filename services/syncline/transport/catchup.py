"""From what a worker holds to what it lacks: chains of deltas through the indexes of some versions. Pure.

Deltas are edges between contents: `old` and the delta's bytes make `new`. A chain is the cheapest way, in bytes that
travel, from anything held to the content that is lacking; it is worth taking where it is smaller than the tensor and
short, since each link costs the time of making the whole tensor anew.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import msgspec

from syncline.contract.deltas import DeltaEntry, DeltaIndex

LINKS = 8  # of a chain at most; more than the versions that retention keeps by default


class Chain(msgspec.Struct, frozen=True, kw_only=True):
    """How to make a lacking content. `why` says why there is no way that pays; then `links` is empty."""

    links: tuple[DeltaEntry, ...] = ()  # oldest first: the first starts from something held
    why: str = ""

    @property
    def nbytes(self) -> int:
        """Bytes that travel."""
        return sum(link.nbytes for link in self.links)


class Ways:
    """The deltas of some versions, to ask chains of."""

    def __init__(self, indexes: Iterable[DeltaIndex]) -> None:
        self._into: dict[str, list[DeltaEntry]] = {}
        for index in indexes:
            for entry in index.deltas:
                if entry.nbytes > 0 and entry.new != entry.old:
                    self._into.setdefault(entry.new, []).append(entry)

    def known(self, digest: str) -> bool:
        """Whether any delta makes `digest`."""
        return digest in self._into

    def chain(self, wanted: str, nbytes: int, held: Callable[[str], bool], most: int = LINKS) -> Chain:
        """The chain of fewest bytes that makes `wanted`, a tensor of `nbytes`, of at most `most` links.

        held    whether a content is there to start from

        Breadth by links, cheapest first: a content that was reached again counts only if it got cheaper. Cycles and
        links that name no end do no harm: nothing is followed beyond `most` links or `nbytes` bytes.
        """
        if wanted not in self._into:
            return Chain(why="no delta")
        found: tuple[DeltaEntry, ...] = ()
        limit, why = nbytes, "no base held"
        cheapest = {wanted: 0}
        front: dict[str, tuple[DeltaEntry, ...]] = {wanted: ()}
        for _ in range(most):
            reached: dict[str, tuple[DeltaEntry, ...]] = {}
            for chain in _longer(front, self._into):
                start, cost = chain[0].old, sum(link.nbytes for link in chain)
                if cost >= limit:
                    why = "chain too large"
                elif held(start):
                    limit, found = cost, chain
                elif cost < cheapest.get(start, nbytes):
                    cheapest[start], reached[start] = cost, chain
            front = reached
        if found:
            return Chain(links=found)
        return Chain(why="chain too long" if any(start in self._into for start in front) else why)


def _longer(
    front: dict[str, tuple[DeltaEntry, ...]], into: dict[str, list[DeltaEntry]]
) -> Iterator[tuple[DeltaEntry, ...]]:
    """Each chain of `front` with one more link before it."""
    for start, chain in front.items():
        for entry in into.get(start, ()):
            yield (entry, *chain)
