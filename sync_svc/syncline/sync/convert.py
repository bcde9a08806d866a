"""A trainer's export becomes the contract's rollout representation, tensor by tensor, always the same bytes.

The plan says which tensors are low-bit; those are `lowbit.py`'s, or come ready from the trainer (`ready.py`). The
others are `values.py`'s. Tensors are worked on by a few threads; neither their number nor the order of tensors, files
or shards changes a byte. Memory beyond mapped files: at most two of the largest tensors, and a few bounded chunks.
"""

from __future__ import annotations

import os
from collections.abc import Container, Iterable, Mapping
from functools import partial
from math import prod
from typing import Any

import msgspec

from syncline.contract.artefact import Part, padding, parts
from syncline.contract.plan import BadPlan, PlanEntry, PrecisionPlan, resolve
from syncline.contract.precision import Place, PrecisionContract
from syncline.contract.precision_trace import ComponentTrace, Held
from syncline.contract.version_path import TensorEntry
from syncline.runtime.store import BlobStore, Buffer
from syncline.sync import ready, values
from syncline.sync.export import BadExport, Fact, RawTensor
from syncline.sync.source import Source
from syncline.sync.ties import tied
from syncline.sync.traced import traced
from syncline.sync.work import Job, Pool

THREADS = max(1, min(4, len(os.sched_getaffinity(0))))
SMALL = 16 << 20  # bytes of an export that one thread converts before several have begun
_BAND = 8 << 20  # bytes that quantising a band takes, about


class Converted(msgspec.Struct, frozen=True, kw_only=True):
    """What conversion put into the store. `new_bytes`: of blobs that the store did not hold before."""

    representation: str
    tensors: tuple[TensorEntry, ...]  # sorted by name
    ties: tuple[tuple[str, str], ...]
    padding: dict[str, tuple[int, ...]]
    plan: PrecisionPlan
    nbytes: int
    new_bytes: int
    trace: ComponentTrace


class Written(msgspec.Struct, frozen=True, kw_only=True):
    """One tensor in the store. `held`: what its bytes are for."""

    entry: TensorEntry
    new: bool
    held: Held


def convert(
    source: Source,
    contract: PrecisionContract,
    store: BlobStore,
    *,
    leave: Container[str] = (),
    threads: int | None = None,
) -> Converted:
    """Convert every tensor of `source` into `store`, but those in `leave`: they are not the contract's to plan.

    threads   that work at once; None: `THREADS`, or one where there is little to do

    Under the route `bf16_bridge` low-bit tensors travel as BF16, and the engine quantises them as it loads.
    Repeating it, after a crash too, gives the same entries. Raises `BadExport` (also for a contract that does not fit
    the model, and for what cannot be stored) and `NonFinite`, naming the tensor.
    """
    if contract.rollout.wide == "fp32":
        raise BadExport("a rollout of FP32 values is not offered")
    where = contract.convert.where
    facts = {name: fact for name, fact in source.facts().items() if name not in leave}
    shapes = _shapes(source, where, facts)
    ties = tied(source.config(), shapes, partial(_equal, source, facts))
    for absent, _ in ties:
        shapes.pop(absent, None)
        facts.pop(absent, None)
    plan = _plan(source, contract, shapes)
    low = () if where == "rollout_worker" else plan.low_bit()
    if where == "trainer_rank":
        ready.check_facts(plan, facts)
    limit = 2 * max((fact.nbytes for fact in facts.values()), default=0)
    pool = Pool(threads or (1 if sum(f.nbytes for f in facts.values()) < SMALL else THREADS), limit)
    ours = _Work(source, facts, store)
    jobs = [ours.wide(e.name) for e in plan.entries if not low or e.weight is None]
    jobs += ours.parts_of(low) if where == "trainer_rank" else ours.quantised(low, pool)
    written = [w for group in pool.done(jobs) for w in group]
    return Converted(
        representation=contract.representation,
        tensors=tuple(sorted((w.entry for w in written), key=lambda entry: entry.name)),
        ties=ties,
        padding={name: shape for entry in low for name, shape in padding(entry).items()},
        plan=plan,
        nbytes=sum(w.entry.nbytes for w in written),
        new_bytes=new_bytes(written),
        trace=traced(plan, [(w.entry, w.held) for w in written], where),
    )


class _Work:
    """The jobs of one conversion. Each reads its tensor when it runs, and holds it no longer."""

    def __init__(self, source: Source, facts: Mapping[str, Fact], store: BlobStore) -> None:
        self._source, self._facts, self._store = source, facts, store

    def wide(self, name: str) -> Job[list[Written]]:
        fact = self._facts[name]
        rounded = 0 if fact.dtype in ("BF16", *values.KEPT) else 2 * prod(fact.shape)
        cost = self._source.copied(name) + rounded
        return Job(cost, lambda: [wide(self._source.read(name), self._store)])

    def parts_of(self, low: tuple[PlanEntry, ...]) -> list[Job[list[Written]]]:
        """Codes and scales that the trainer made."""

        def taken(part: Part, entry: PlanEntry) -> list[Written]:
            tensor = self._source.read(part.name)
            ready.check_part(tensor, part, entry.shape)
            return [_part(self._store, part, tensor.data)]

        return [
            Job(self._source.copied(part.name), partial(taken, part, entry))
            for entry in low
            for part in parts(entry)
        ]

    def quantised(self, low: tuple[PlanEntry, ...], pool: Pool) -> list[Job[list[Written]]]:
        """Codes and scales, made here. Outer scales that tensors share are looked for first: of each its amax alone."""
        if not low:
            return []
        from syncline.sync import lowbit  # torch is loaded by the jobs that need it alone

        groups = [group for group in lowbit.outer_groups(low) if len(group) > 1]
        members = [entry for group in groups for entry in group]
        costs = [self._source.copied(entry.name) + _BAND for entry in members]

        def amax(entry: PlanEntry) -> float:
            return lowbit.amax(self._source.read(entry.name), entry)

        found = pool.done([Job(cost, partial(amax, e)) for cost, e in zip(costs, members, strict=True)])
        largest = dict(zip((entry.name for entry in members), found, strict=True))
        outer = {
            entry.name: lowbit.outer_of([largest[e.name] for e in group], entry)
            for group in groups
            for entry in group
        }

        def made(entry: PlanEntry) -> list[Written]:
            quantised = lowbit.quantised(self._source.read(entry.name), entry, outer.get(entry.name))
            return [_part(self._store, part, data) for part, data in quantised]

        return [
            Job(
                self._source.copied(e.name) + _BAND + sum(Fact(p.dtype, p.shape).nbytes for p in parts(e)),
                partial(made, e),
            )
            for e in low
        ]


def wide(tensor: RawTensor, store: BlobStore) -> Written:
    """`tensor` in the store as `values.bf16` makes it. Raises `NonFinite`, `BadExport`."""
    dtype, data = values.bf16(tensor)
    digest, new = stored(store, tensor.name, data.data)
    entry = TensorEntry(name=tensor.name, dtype=dtype, shape=tensor.shape, nbytes=data.nbytes, digest=digest)
    return Written(entry=entry, new=new, held="wide")


def stored(store: BlobStore, name: str, data: Buffer) -> tuple[str, bool]:
    """`store.add`, with the tensor's name in what the system says. Raises `BadExport` for a disk that is full."""
    try:
        return store.add(data)
    except OSError as error:
        raise BadExport(f"tensor {name} cannot be stored: {error.strerror or error}") from error


def new_bytes(written: Iterable[Written]) -> int:
    """Bytes that the store did not hold before; what several tensors share is counted once."""
    return sum({w.entry.digest: w.entry.nbytes for w in written if w.new}.values())


def _part(store: BlobStore, part: Part, data: Any) -> Written:
    digest, new = stored(store, part.name, data.reshape(-1).data)
    entry = TensorEntry(
        name=part.name,
        dtype=part.dtype,
        shape=part.shape,
        nbytes=data.nbytes,
        digest=digest,
        source="" if part.name == part.source else part.source,
    )
    return Written(entry=entry, new=new, held="codes" if part.role == "codes" else "scales")


def _shapes(source: Source, where: Place, facts: Mapping[str, Fact]) -> dict[str, tuple[int, ...]]:
    """Shapes before quantisation, of all tensors that the plan is of."""
    told = source.converted()
    if (told is not None) != (where == "trainer_rank"):
        there = "wide" if told is None else "converted"
        raise BadExport(f"the export is {there}, and the contract converts at convert.place {where!r}")
    return {name: fact.shape for name, fact in facts.items()} if told is None else dict(told.shapes)


def _plan(
    source: Source, contract: PrecisionContract, shapes: Mapping[str, tuple[int, ...]]
) -> PrecisionPlan:
    try:
        plan = resolve(contract, shapes)
    except BadPlan as error:
        raise BadExport(str(error)) from None
    told = source.converted()
    if told is not None and told.plan != plan.digest():
        raise BadExport(f"the export was converted by plan {told.plan}, the contract's is {plan.digest()}")
    return plan


def _equal(source: Source, facts: Mapping[str, Fact], one: str, other: str) -> bool:
    """Whether both tensors are the same BF16 values. One after the other is read."""
    for name in (one, other):
        if name not in facts:
            raise BadExport(f"tensor {name} is tied, and low-bit beside its twin")
    alike = facts[one].shape == facts[other].shape
    return alike and values.digest(source.read(one)) == values.digest(source.read(other))
