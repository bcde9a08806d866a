"""What conversion reads: full tensors one at a time, whether a trainer wrote them whole or as its ranks' shards."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any, Protocol

import msgspec

from syncline.contract.exports import SHARDS_FILE, ConvertedExport, ShardedExport, rank_file
from syncline.contract.plan import BadPlan, PrecisionPlan, resolve
from syncline.contract.precision import PrecisionContract
from syncline.contract.sharding.grid import BadLayout
from syncline.contract.sharding.layout import Dimensions, dimensions
from syncline.contract.sharding.pieces import Sharding
from syncline.sync.export import BadExport, Export, Fact, RawTensor
from syncline.sync.reshard.gather import Gathering
from syncline.sync.reshard.raw import array_of, tensor_of
from syncline.sync.reshard.scatter import BadShards


class Source(Protocol):
    """Tensors under checkpoint names. Threads may read at once."""

    def config(self) -> dict[str, Any]:
        """`config.json`. Raises `BadExport`."""
        ...

    def facts(self) -> Mapping[str, Fact]:
        """Dtype and shape of each tensor by name; touches no weight. Raises `BadExport`."""
        ...

    def converted(self) -> ConvertedExport | None:
        """What the trainer says of codes and scales that it made; None: values are wide. Raises `BadExport`."""
        ...

    def read(self, name: str) -> RawTensor:
        """Tensor `name`, to be dropped before the next is asked for. Raises `BadExport` naming it."""
        ...

    def copied(self, name: str) -> int:
        """Bytes of memory that `read(name)` takes beyond mapped files."""
        ...

    @property
    def ranks(self) -> int:
        """Ranks whose shards it is made of; 0: the export is whole."""
        ...

    @property
    def gather_seconds(self) -> float:
        """Time that `read` took so far, added up over threads."""
        ...


class Shards:
    """A sharded export: each tensor is gathered from the ranks' files when it is asked for.

    plan   of an export whose ranks hold codes and scales; None: wide values
    Raises `BadExport` naming file, tensor or rank for what is missing, unexpected or not as stamped.
    """

    def __init__(self, export: Export, plan: PrecisionPlan | None = None) -> None:
        self._export = export
        told = export.told(SHARDS_FILE, ShardedExport)
        ranks = sorted({stamp.rank.index for stamp in told.stamp.shards})
        self.ranks = len(ranks)
        self._gathers: list[float] = []  # seconds of each read; appending is safe in threads
        stamped = {rank_file(index) for index in ranks}
        there = {name for name in export.files if name.endswith(".safetensors")}
        if wrong := sorted(stamped ^ there):
            why = "is missing" if wrong[0] in stamped else f"has no shard that {SHARDS_FILE} stamps"
            raise BadExport(f"{wrong[0]} {why}")
        _check_model(told, dimensions_of(export.config()))
        held = {i: {t.name: array_of(t) for t in export.tensors_of(rank_file(i))} for i in ranks}
        try:
            self._whole = Gathering(held, told.stamp, Sharding(told.layout, told.shapes, plan))
        except (BadLayout, BadShards) as error:
            raise BadExport(str(error)) from None

    def config(self) -> dict[str, Any]:
        return self._export.config()

    def converted(self) -> ConvertedExport | None:
        return self._export.converted()

    def facts(self) -> dict[str, Fact]:
        try:
            return {name: Fact(self._whole.dtype(name), shape) for name, shape in self._whole.shapes.items()}
        except BadShards as error:
            raise BadExport(str(error)) from None

    def read(self, name: str) -> RawTensor:
        began = time.perf_counter()
        try:
            found = tensor_of(name, self._whole.dtype(name), self._whole[name])
        except BadShards as error:
            raise BadExport(str(error)) from None
        self._gathers.append(time.perf_counter() - began)
        return found

    def copied(self, name: str) -> int:
        if self._whole.is_view(name):
            return 0
        return Fact(self._whole.dtype(name), self._whole.shapes[name]).nbytes

    @property
    def gather_seconds(self) -> float:
        return sum(self._gathers)


def source_of(export: Export, contract: PrecisionContract) -> Export | Shards:
    """The source in an opened export. Raises `BadExport`."""
    if SHARDS_FILE not in export.files:
        return export
    plan = None
    if (told := export.converted()) is not None:
        try:
            plan = resolve(contract, told.shapes)
        except BadPlan as error:
            raise BadExport(str(error)) from None
    return Shards(export, plan)


def dimensions_of(config: dict[str, Any]) -> Dimensions:
    """`dimensions`, raising `BadExport`."""
    try:
        return dimensions(config)
    except BadLayout as error:
        raise BadExport(str(error)) from None


def _check_model(told: ShardedExport, model: Dimensions) -> None:
    """The layout cuts the model that config.json describes; whether heads are tied, config.json may leave out."""
    mine, theirs = msgspec.structs.asdict(told.layout.model), msgspec.structs.asdict(model)
    for key, one in mine.items():
        other = theirs[key]
        if one != other and not (key == "tied" and not other):
            raise BadExport(
                f"{SHARDS_FILE}: the layout is of a model with {key} {one}, config.json says {other}"
            )
