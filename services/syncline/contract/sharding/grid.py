"""The ranks of one engine. One rule gives each rank its place among dense ranks and its place among expert ranks."""

from __future__ import annotations

import msgspec


class BadLayout(ValueError):
    """A layout that cannot be, or a model that it cannot cut. Names the key or the tensor, and the legal sizes."""


class Rank(msgspec.Struct, frozen=True, forbid_unknown_fields=True, order=True):
    """`index` in the whole engine, and the place in each group. Stamped on every shard that the rank exports."""

    index: int
    pp: int
    tp: int
    ep: int
    etp: int

    def __str__(self) -> str:
        return f"rank {self.index} (pp {self.pp}, tp {self.tp}, ep {self.ep}, etp {self.etp})"


class Grid(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Sizes of the groups. Attention and dense layers: tp x dp ranks per stage; experts: etp x ep x copies of the same.

    Innermost first, ranks are numbered tp, dp, pp for dense layers and etp, ep, copies, pp for experts, which is
    Megatron's order (`tp-cp-ep-dp-pp` without context parallelism) and, with dp 1 and etp = tp / ep, SGLang's.
    """

    tp: int = 1
    pp: int = 1
    ep: int = 1
    etp: int = 1
    dp: int = 1

    def __post_init__(self) -> None:
        for key in self.__struct_fields__:
            if (size := int(msgspec.structs.asdict(self)[key])) < 1:
                raise BadLayout(f"{key} {size}: use at least 1")
        if (self.tp * self.dp) % (self.etp * self.ep):
            raise BadLayout(
                f"etp {self.etp} x ep {self.ep} does not divide the {self.tp * self.dp} ranks of a stage "
                f"(tp {self.tp} x dp {self.dp})"
            )

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.tp * self.dp * self.pp

    def rank(self, index: int) -> Rank:
        """The place of rank `index`. Raises `BadLayout` for one that the grid does not have."""
        if not 0 <= index < self.size:
            raise BadLayout(f"rank {index}: the grid has ranks 0 to {self.size - 1}")
        pp, inside = divmod(index, self.tp * self.dp)
        return Rank(
            index=index,
            pp=pp,
            tp=inside % self.tp,
            ep=inside // self.etp % self.ep,
            etp=inside % self.etp,
        )

    def ranks(self) -> tuple[Rank, ...]:
        """All ranks by index."""
        return tuple(self.rank(index) for index in range(self.size))
