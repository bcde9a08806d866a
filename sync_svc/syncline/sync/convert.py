"""A trainer's export becomes the contract's rollout representation, tensor by tensor, always the same bytes.

Works on integers: a BF16 value is the upper half of an FP32 one, rounded to nearest, ties to even. Memory
beyond the mapped export: one converted tensor and a few bounded chunks.
"""

from __future__ import annotations

from typing import Any, assert_never

import msgspec
import numpy as np

from syncline.contract.precision import PrecisionContract
from syncline.contract.version_path import TensorEntry
from syncline.runtime.store import BlobStore
from syncline.sync.export import BadExport, Export, RawTensor

CHUNK = 1 << 20  # elements rounded at a time
EMBEDDINGS = ("embed_tokens.weight", "wte.weight", "word_embeddings.weight", "embed_in.weight")
HEADS = ("lm_head.weight", "embed_out.weight")
_KEPT = frozenset({"I64", "I32", "I16", "I8", "U8", "BOOL"})


class NonFinite(ValueError):
    """A weight that is infinite or no number. The message names tensor and flat index."""


class Converted(msgspec.Struct, frozen=True, kw_only=True):
    """What conversion put into the store. `new_bytes`: of blobs that the store did not hold before."""

    representation: str
    tensors: tuple[TensorEntry, ...]  # sorted by name
    ties: tuple[tuple[str, str], ...]
    nbytes: int
    new_bytes: int


def convert(export: Export, contract: PrecisionContract, store: BlobStore) -> Converted:
    """Convert every tensor of `export` into `store`.

    Repeating it, after a crash too, gives the same entries. Raises `BadExport`, `NonFinite` (naming the
    tensor), and `OSError` from the store. Other representations join the `match` below.
    """
    match contract.rollout.wide:
        case "bf16":
            to_rollout = bf16
        case "fp32":
            raise BadExport("a rollout of FP32 values is not offered")
        case _:
            assert_never(contract.rollout.wide)
    entries: dict[str, TensorEntry] = {}
    new_bytes = 0
    for tensor in export.tensors():
        dtype, data = to_rollout(tensor)
        digest, new = store.add(data.data)
        new_bytes += data.nbytes if new else 0
        entries[tensor.name] = TensorEntry(
            name=tensor.name, dtype=dtype, shape=tensor.shape, nbytes=data.nbytes, digest=digest
        )
    ties = _tied(export.config(), entries)
    return Converted(
        representation=contract.representation,
        tensors=tuple(entries[name] for name in sorted(entries)),
        ties=ties,
        nbytes=sum(entry.nbytes for entry in entries.values()),
        new_bytes=new_bytes,
    )


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
            _refuse(tensor, (part & 0x7F80) == 0x7F80, start)
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
        _refuse(tensor, ((bits & 0x7F800000) == 0x7F800000) | ((half & 0x7F80) == 0x7F80), start)
        rounded[start : start + CHUNK] = half
    return "BF16", rounded


def _refuse(tensor: RawTensor, bad: Any, start: int) -> None:
    """Raise `NonFinite` at the first true element of `bad`, a chunk of flat elements from `start`."""
    if bad.any():
        index = start + int(bad.argmax())
        value = _value(tensor, index)
        why = f"{value}, which rounds to infinity in BF16" if np.isfinite(value) else f"{value}"
        raise NonFinite(f"tensor {tensor.name} is {why} at flat index {index} of shape {list(tensor.shape)}")


def _value(tensor: RawTensor, index: int) -> float:
    if tensor.dtype == "BF16":
        word = tensor.data.view("<u2")[index : index + 1].astype("<u4") << 16
        return float(word.view("<f4")[0])
    return float(tensor.data.view("<f2" if tensor.dtype == "F16" else "<f4")[index])


def _tied(config: dict[str, Any], entries: dict[str, TensorEntry]) -> tuple[tuple[str, str], ...]:
    """Remove a redundant output head from `entries` and return the ties.

    `tie_word_embeddings` true: a head that equals the embedding is dropped and tied, a different one refused,
    an absent one tied. Not stated: an absent head is tied (config.json leaves out a class's default).
    False: no ties.
    """
    text = config.get("text_config")
    stated = config.get(
        "tie_word_embeddings", text.get("tie_word_embeddings") if isinstance(text, dict) else None
    )
    if stated not in (None, True, False):
        raise BadExport(f"config.json: tie_word_embeddings is {stated!r}")
    heads = sorted(name for name in entries if _is(name, HEADS))
    if stated is False or (stated is None and heads):
        return ()
    embeddings = sorted(name for name in entries if _is(name, EMBEDDINGS))
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
    if (entries[head].digest, entries[head].shape) != (entries[embedding].digest, entries[embedding].shape):
        raise BadExport(
            f"config.json ties {head} to {embedding}, and the export holds different values for them"
        )
    del entries[head]
    return ((head, embedding),)


def _is(name: str, suffixes: tuple[str, ...]) -> bool:
    return any(name == suffix or name.endswith("." + suffix) for suffix in suffixes)
