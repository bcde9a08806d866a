"""A trainer's export becomes the contract's rollout representation, tensor by tensor, always the same bytes.

The plan says which tensors are low-bit; those are `lowbit.py`'s. The others are worked on as integers: a BF16 value is
the upper half of an FP32 one, rounded to nearest, ties to even. Memory beyond the mapped export: one converted
tensor and a few bounded chunks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec
import numpy as np

from syncline.contract.artefact import encoded, padding
from syncline.contract.plan import BadPlan, PlanEntry, PrecisionPlan, resolve
from syncline.contract.precision import PrecisionContract
from syncline.contract.precision_trace import ComponentTrace, Held, Use
from syncline.contract.version_path import TensorEntry
from syncline.runtime.store import BlobStore, Buffer
from syncline.sync.export import BadExport, Export, RawTensor, refuse_where

CHUNK = 1 << 20  # elements rounded at a time
EMBEDDINGS = ("embed_tokens.weight", "wte.weight", "word_embeddings.weight", "embed_in.weight")
HEADS = ("lm_head.weight", "embed_out.weight")
_KEPT = frozenset({"I64", "I32", "I16", "I8", "U8", "BOOL"})


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
    export: Export,
    contract: PrecisionContract,
    store: BlobStore,
    tensors: Mapping[str, RawTensor] | None = None,
) -> Converted:
    """Convert every tensor of `export` into `store`, or those `tensors` of it that are the contract's to plan.

    Under the route `bf16_bridge` low-bit tensors travel as BF16, and the engine quantises them as it loads.
    Repeating it, after a crash too, gives the same entries. Raises `BadExport` (also for a contract that does not fit
    the model, and for what cannot be stored) and `NonFinite`, naming the tensor.
    """
    if contract.rollout.wide == "fp32":
        raise BadExport("a rollout of FP32 values is not offered")
    tensors = {t.name: t for t in export.tensors()} if tensors is None else dict(tensors)
    ties = _tied(export.config(), tensors)
    for absent, _ in ties:
        tensors.pop(absent, None)
    try:
        plan = resolve(contract, {name: tensor.shape for name, tensor in tensors.items()})
    except BadPlan as error:
        raise BadExport(str(error)) from None
    bridge = contract.convert.route == "bf16_bridge"
    low = () if bridge else plan.low_bit()
    written = [wide(tensors[e.name], store) for e in plan.entries if bridge or e.weight is None]
    if low:
        written.extend(_low_bit(low, tensors, store))
    return Converted(
        representation=contract.representation,
        tensors=tuple(sorted((w.entry for w in written), key=lambda entry: entry.name)),
        ties=ties,
        padding={name: shape for entry in low for name, shape in padding(entry).items()},
        plan=plan,
        nbytes=sum(w.entry.nbytes for w in written),
        new_bytes=sum(w.entry.nbytes for w in written if w.new),
        trace=_trace(plan, written, bridge),
    )


def wide(tensor: RawTensor, store: BlobStore) -> Written:
    """`tensor` in the store as `bf16` makes it. Raises `NonFinite`, `BadExport`."""
    dtype, data = bf16(tensor)
    digest, new = stored(store, tensor.name, data.data)
    entry = TensorEntry(name=tensor.name, dtype=dtype, shape=tensor.shape, nbytes=data.nbytes, digest=digest)
    return Written(entry=entry, new=new, held="wide")


def stored(store: BlobStore, name: str, data: Buffer) -> tuple[str, bool]:
    """`store.add`, with the tensor's name in what the system says. Raises `BadExport` for a disk that is full."""
    try:
        return store.add(data)
    except OSError as error:
        raise BadExport(f"tensor {name} cannot be stored: {error.strerror or error}") from error


def _low_bit(
    low: tuple[PlanEntry, ...], tensors: Mapping[str, RawTensor], store: BlobStore
) -> Iterator[Written]:
    # torch is loaded by the jobs that need it alone
    from syncline.sync.lowbit import outer_scales, quantised

    outer = outer_scales(low, tensors)
    for planned in low:
        for part, data in quantised(tensors[planned.name], planned, outer.get(planned.name)):
            digest, new = stored(store, part.name, data.reshape(-1).data)
            entry = TensorEntry(
                name=part.name,
                dtype=part.dtype,
                shape=part.shape,
                nbytes=data.nbytes,
                digest=digest,
                source="" if part.name == part.source else part.source,
            )
            yield Written(entry=entry, new=new, held="codes" if part.role == "codes" else "scales")


def _trace(plan: PrecisionPlan, written: list[Written], bridge: bool) -> ComponentTrace:
    """What was written, read from the entries; which family a tensor belongs to, from the plan."""
    sources: dict[str, list[TensorEntry]] = {}
    for w in written:
        sources.setdefault(w.entry.source or w.entry.name, []).append(w.entry)
    families: dict[str, list[PlanEntry]] = {}
    for planned in plan.entries:
        families.setdefault(planned.family, []).append(planned)
    uses = []
    for family, members in sorted(families.items()):
        dtypes = sorted({entry.dtype for member in members for entry in sources[member.name]})
        scheme = None if bridge else members[0].weight
        values = f"{'+'.join(dtypes)} values"
        uses.append(
            Use(
                family=family,
                tensors=len(members),
                encoded=values if scheme is None else encoded(scheme),
                operands="none",
                kernel="none",
                persistent="+".join(dtypes),
                communicated=f"{values}, quantised by the engine" if bridge and family else "+".join(dtypes),
            )
        )
    held: dict[Held, int] = {"artefact": sum(w.entry.nbytes for w in written)}
    for w in written:
        held[w.held] = held.get(w.held, 0) + w.entry.nbytes
    return ComponentTrace(component="convert", uses=tuple(uses), bytes=held)


def bf16(tensor: RawTensor) -> tuple[str, Any]:
    """Dtype and bytes (contiguous array) of `tensor` for a BF16 rollout.

    BF16 passes unchanged; F32 is rounded to nearest even; F16 widens exactly and is rounded; integers and
    booleans are kept. F64 is refused: a trainer that holds it has a contract of its own. Raises `NonFinite`,
    also for a finite value that rounds to infinity.
    """
    if tensor.dtype in _KEPT:
        return tensor.dtype, tensor.data
    if tensor.dtype == "BF16":
        words = tensor.data.view("<u2")
        for start in range(0, len(words), CHUNK):
            part = words[start : start + CHUNK]
            refuse_where(tensor, (part & 0x7F80) == 0x7F80, start)
        return "BF16", tensor.data
    if tensor.dtype not in ("F32", "F16"):
        raise BadExport(f"tensor {tensor.name} has dtype {tensor.dtype}, which has no BF16 conversion")
    wide = tensor.data.view("<f2" if tensor.dtype == "F16" else "<u4")
    rounded = np.empty(len(wide), "<u2")
    for start in range(0, len(wide), CHUNK):
        part = wide[start : start + CHUNK]
        bits = part.astype("<f4").view("<u4") if tensor.dtype == "F16" else part
        # + 0x7FFF, and one more if the kept part is odd: round half to even
        half = (bits + (((bits >> 16) & 1) + np.uint32(0x7FFF))) >> 16
        # the sum wraps for some NaN, so both the source and the result are looked at
        refuse_where(tensor, ((bits & 0x7F800000) == 0x7F800000) | ((half & 0x7F80) == 0x7F80), start)
        rounded[start : start + CHUNK] = half
    return "BF16", rounded


def _tied(config: dict[str, Any], tensors: Mapping[str, RawTensor]) -> tuple[tuple[str, str], ...]:
    """The ties of `tensors`: (output head, embedding).

    `tie_word_embeddings` true: a head that equals the embedding is redundant and tied, a different one refused,
    an absent one tied. Not stated: an absent head is tied (config.json leaves out a class's default).
    False: no ties.
    """
    text = config.get("text_config")
    stated = config.get(
        "tie_word_embeddings", text.get("tie_word_embeddings") if isinstance(text, dict) else None
    )
    if stated not in (None, True, False):
        raise BadExport(f"config.json: tie_word_embeddings is {stated!r}")
    heads = sorted(name for name in tensors if _is(name, HEADS))
    if stated is False or (stated is None and heads):
        return ()
    embeddings = sorted(name for name in tensors if _is(name, EMBEDDINGS))
    if len(embeddings) != 1 or len(heads) > 1:
        if stated is None:
            return ()
        raise BadExport(
            f"tie_word_embeddings with embeddings {embeddings} and heads {heads}: one each expected"
        )
    embedding = embeddings[0]
    if not heads:
        return (("lm_head.weight", embedding),)
    head = heads[0]
    if not _equal(tensors[head], tensors[embedding]):
        raise BadExport(
            f"config.json ties {head} to {embedding}, and the export holds different values for them"
        )
    return ((head, embedding),)


def _equal(one: RawTensor, other: RawTensor) -> bool:
    """Whether both are the same BF16 values."""
    return one.shape == other.shape and bf16(one)[1].tobytes() == bf16(other)[1].tobytes()


def _is(name: str, suffixes: tuple[str, ...]) -> bool:
    return any(name == suffix or name.endswith("." + suffix) for suffix in suffixes)
