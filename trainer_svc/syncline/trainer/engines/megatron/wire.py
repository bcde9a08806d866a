"""What rank 0 tells the other ranks, and what every rank answers: msgpack, never pickle."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import asdict
from typing import Literal

import msgspec

from syncline.contract.exports import RankExport
from syncline.contract.recorded import SamplingMask
from syncline.contract.sharding.layout import Layout
from syncline.reference.routes import RecordedRoutes, Routing
from syncline.trainer.engine import Sample
from syncline.trainer.loss import Tally


class SampleWire(msgspec.Struct, frozen=True, array_like=True):
    """`engine.Sample` as bytes."""

    trajectory: str
    tokens: bytes
    positions: bytes
    behaviour: bytes
    loss_mask: bytes
    advantage: bytes  # one float64: msgpack has no infinity on all sides
    temperature: float
    routes: tuple[bytes, tuple[int, int, int], Literal["u1", "u2"]] | None
    mask: tuple[bytes, bytes] | None  # sizes, ids


class Build(msgspec.Struct, frozen=True, tag=True):
    """Make engine `engine` of a job spec (JSON), asleep."""

    engine: int
    spec: str
    models: str
    scratch: str


class Act(msgspec.Struct, frozen=True, tag=True):
    """One method of `rank_model.RankModel`, on every rank.

    what     its name
    folder   of `export`, `save` and `load`
    update   of `apply`
    flag     of `score`: as rollout; of `export`: with the base
    """

    engine: int
    what: Literal["wake", "sleep", "score", "gradients", "apply", "drop", "routes", "export", "save", "load"]
    samples: tuple[SampleWire, ...] = ()
    folder: str = ""
    update: int = 0
    flag: bool = False


class Leave(msgspec.Struct, frozen=True, tag=True):
    """The last command: every rank ends."""


Command = Build | Act | Leave


class Told(msgspec.Struct, frozen=True):
    """A command with the numbers of engines that nobody holds any more."""

    command: Command
    dropped: tuple[int, ...] = ()


class Micro(msgspec.Struct, frozen=True):
    """What one pass gave on the last stage; lists hold one entry per sample of `indices`."""

    indices: tuple[int, ...]
    logprobs: list[bytes]
    weights: list[bytes] = []
    loss: bytes = b""  # one float64
    tally: dict[str, float] = {}
    non_finite: tuple[str, ...] = ()


class Caught(msgspec.Struct, frozen=True):
    """Expert ids (int16) that one rank's routers chose freely in one pass.

    shape   [columns of this rank, B, routing layers of this rank, K], from column `column` and layer `layer` on
    """

    indices: tuple[int, ...]
    column: int
    layer: int
    shape: tuple[int, int, int, int]
    ids: bytes


class ModelFacts(msgspec.Struct, frozen=True):
    """What a rank knows of the whole model once it is awake. `values`: what the parameters' numbers are."""

    shapes: dict[str, tuple[int, ...]]
    trained: tuple[str, ...]
    layout: Layout
    vocab: int
    device: str
    dtype: str
    values: str
    routed: tuple[int, int, int]  # layers, topk, experts

    @property
    def routing(self) -> Routing:
        """As `reference.routes` has it."""
        return Routing(*self.routed)


class Ran(msgspec.Struct, frozen=True):
    """One of the three GEMMs of one low-bit checkpoint tensor, as `numerics.operands.Ran` tells it."""

    which: Literal["fprop", "dgrad", "wgrad"]
    tensor: str
    family: str
    operands: str
    kernel: str
    encoded: str


class Answer(msgspec.Struct, frozen=True):
    """What one rank answers. `error`: class name and message of a refusal; everything else is then empty."""

    error: tuple[str, str] | None = None
    micros: tuple[Micro, ...] = ()
    caught: tuple[Caught, ...] = ()
    bad: tuple[str, ...] = ()
    norm: float = 0.0
    export: RankExport | None = None
    files: dict[str, str] = {}
    model: ModelFacts | None = None
    held: dict[str, int] = {}  # bytes of masters, moments, gradients, wide, adapter
    ran: tuple[Ran, ...] = ()
    unreadable: tuple[str, ...] = ()  # operands that no format can hold


def packed(samples: Sequence[Sample]) -> tuple[SampleWire, ...]:
    """Samples for the wire."""
    return tuple(
        SampleWire(
            s.trajectory,
            s.tokens.tobytes(),
            s.positions.tobytes(),
            s.behaviour.tobytes(),
            s.loss_mask,
            array("d", [s.advantage]).tobytes(),
            s.temperature,
            None if s.routes is None else (s.routes.data, s.routes.shape, s.routes.dtype),
            None if s.mask is None else (s.mask.sizes.tobytes(), s.mask.ids.tobytes()),
        )
        for s in samples
    )


def unpacked(wires: Sequence[SampleWire]) -> list[Sample]:
    """Inverse of `packed`."""
    return [
        Sample(
            trajectory=w.trajectory,
            tokens=array("i", w.tokens),
            positions=array("i", w.positions),
            behaviour=array("f", w.behaviour),
            loss_mask=w.loss_mask,
            advantage=array("d", w.advantage)[0],
            temperature=w.temperature,
            routes=None if w.routes is None else RecordedRoutes(*w.routes),
            mask=None if w.mask is None else SamplingMask(*(array("i", part) for part in w.mask)),
        )
        for w in wires
    ]


def tally_fields(tally: Tally) -> dict[str, float]:
    """A tally for the wire."""
    return {name: float(value) for name, value in asdict(tally).items()}
