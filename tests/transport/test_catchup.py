"""The choice of a chain: the cheapest that is short enough, from what is held, or the reason why there is none."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from syncline.contract.deltas import DeltaEntry, DeltaIndex
from syncline.contract.version_path import VersionId
from syncline.transport.catchup import LINKS, Chain, Ways

CONTENTS = "abcdefgh"  # digests
FULL = 100  # bytes of the tensor


def delta(old: str, new: str, nbytes: int) -> DeltaEntry:
    return DeltaEntry(new=new, old=old, blob=f"{old}{new}{nbytes}", nbytes=nbytes, itemsize=2)


def index(number: int, *deltas: DeltaEntry) -> DeltaIndex:
    return DeltaIndex(job="j", version=VersionId(0, number), manifest="m", before=None, deltas=deltas)


def cheapest(deltas: list[DeltaEntry], wanted: str, held: set[str], most: int) -> int | None:
    """Fewest bytes of any walk of at most `most` links, by trying all of them; None: there is none."""
    costs = {wanted: 0}
    best = None
    for _ in range(most):
        further: dict[str, int] = {}
        for entry in deltas:
            if entry.new in costs:
                cost = costs[entry.new] + entry.nbytes
                further[entry.old] = min(cost, further.get(entry.old, cost))
        costs = further
        best = min(
            [cost for start, cost in costs.items() if start in held] + ([best] if best else []), default=None
        )
    return best


graphs = st.lists(
    st.builds(delta, st.sampled_from(CONTENTS), st.sampled_from(CONTENTS), st.integers(1, 60)), max_size=24
)


@settings(max_examples=400, deadline=None)
@given(graphs, st.sets(st.sampled_from(CONTENTS[1:])), st.integers(1, 6), st.integers(1, 4))
def test_the_cheapest_chain_that_pays_is_found(
    deltas: list[DeltaEntry], held: set[str], most: int, indexes: int
) -> None:
    """Cycles, doubles and dead ends among them. A chain fits together, starts from something held, and pays."""
    parts = [index(number, *deltas[number::indexes]) for number in range(indexes)]
    chain = Ways(parts).chain("a", FULL, held.__contains__, most)
    useful = [entry for entry in deltas if entry.old != entry.new]
    best = cheapest(useful, "a", held, most)
    if best is None or best >= FULL:
        assert chain.links == ()
        assert chain.why in ("no delta", "no base held", "chain too large", "chain too long")
        return
    assert chain.nbytes == best < FULL
    assert len(chain.links) <= most
    assert chain.links[0].old in held
    assert chain.links[-1].new == "a"
    assert all(first.new == second.old for first, second in pairwise(chain.links))
    assert all(link in deltas for link in chain.links)
    assert chain.why == ""


def line(length: int, nbytes: int) -> Ways:
    """Contents "0", "1", ... `length`, each made of the one before."""
    return Ways([index(n, delta(str(n - 1), str(n), nbytes)) for n in range(1, length + 1)])


def test_a_worker_that_missed_versions_catches_up_as_far_as_links_and_bytes_go() -> None:
    def ask(length: int, nbytes: int, held: str) -> Chain:
        return line(length, nbytes).chain(str(length), FULL, {held}.__contains__)

    assert [link.new for link in ask(3, 10, "0").links] == ["1", "2", "3"]
    assert [link.new for link in ask(3, 10, "2").links] == ["3"]
    assert ask(LINKS, 1, "0").nbytes == LINKS
    assert ask(LINKS + 1, 1, "0").why == "chain too long"
    assert ask(3, 34, "0").why == "chain too large"
    assert ask(3, 33, "0").nbytes == 99
    assert ask(3, 10, "other").why == "no base held"
    assert Ways([]).chain("3", FULL, {"2"}.__contains__).why == "no delta"


def test_a_way_around_is_taken_where_it_is_cheaper() -> None:
    ways = Ways(
        [
            index(2, delta("1", "2", 50), delta("0", "2", 45)),
            index(1, delta("0", "1", 10), delta("2", "1", 1)),
        ]
    )
    assert ways.chain("2", FULL, {"0"}.__contains__).nbytes == 45
    assert [link.old for link in ways.chain("2", FULL, {"0", "1"}.__contains__).links] == ["0"]
    assert ways.chain("2", 45, {"0", "1"}.__contains__).why == "chain too large"
