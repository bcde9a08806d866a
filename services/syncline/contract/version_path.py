"""The version path: how an optimizer step became a version, and how that version became active on each worker.

A version is a commit and not a label: `(epoch, number)` with parent, optimizer step, precision contract and the
digest of a signed manifest. Epoch rises each time a trainer resumes; `(epoch, number)` never falls anywhere; an
older pair is refused and counted. `number` counts updates: version 0 is the initial weights, update u mints u.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable
from typing import Literal

import msgspec

from syncline.contract.hops import Hop
from syncline.contract.precision_trace import ComponentTrace
from syncline.contract.pulled import Pulled

MINTED = Hop(
    name="version.minted",
    done_by="trainer",
    reads=("engine",),
    writes=("minted", "versions"),
    attributes=("version", "parent", "optimizer_step", "trajectories"),
)
CONVERTED = Hop(
    name="version.converted",
    done_by="sync",
    reads=("minted",),
    writes=("store",),
    # ranks: shards that tensors were gathered from (0: the export was whole); gather_ms: added up over threads
    attributes=("version", "representation", "place", "bytes", "new_bytes", "tensors", "ranks", "gather_ms"),
)
PUBLISHED = Hop(
    name="version.published",
    done_by="sync",
    writes=("versions",),
    attributes=("version", "digest"),
)
STAGED = Hop(
    name="version.staged",
    done_by="rollout",
    reads=("sync", "store"),
    writes=("acks",),
    attributes=("version", "digest", "worker", "bytes", "transfer", "pulled_bytes", "pull_seconds"),
)
VERIFIED = Hop(
    name="version.verified",
    done_by="rollout",
    reads=("engine",),
    writes=("acks",),
    attributes=("version", "digest", "worker", "loaded_digest", "canary_gap", "verdict"),
)
ACTIVE = Hop(
    name="version.active",
    done_by="rollout",
    reads=("sync",),
    writes=("acks",),
    attributes=("version", "digest", "worker", "pause_ms", "policy", "in_flight"),
)
RETIRED = Hop(
    name="version.retired",
    done_by="sync",
    writes=("store", "versions"),
    attributes=("version", "freed_bytes"),
)

VERSION_PATH: tuple[Hop, ...] = (MINTED, CONVERTED, PUBLISHED, STAGED, VERIFIED, ACTIVE, RETIRED)
"""Every hop of one version, in order. `staged`, `verified` and `active` occur once per worker."""


class VersionId(
    msgspec.Struct, frozen=True, order=True, array_like=True, forbid_unknown_fields=True, gc=False
):
    """`(epoch, number)`, ordered lexicographically."""

    epoch: int
    number: int

    def __str__(self) -> str:
        return f"{self.epoch}.{self.number}"


def parse_version(text: str) -> VersionId:
    """Inverse of `str(VersionId)`. Raises `ValueError` that shows the legal form."""
    epoch, dot, number = text.partition(".")
    if not dot or not epoch.isdecimal() or not number.isdecimal():
        raise ValueError(f"version {text!r} is not of the form EPOCH.NUMBER, such as 0.12")
    return VersionId(int(epoch), int(number))


class TensorEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One tensor of a manifest, as the rollout engine's loader will read it."""

    name: str
    dtype: str  # safetensors name: "BF16", "F32", "F8_E4M3", "I32", "U8"
    shape: tuple[int, ...]
    nbytes: int
    digest: str  # sha256 hex of the raw little-endian bytes; also the blob's name in the store
    source: str = ""  # trainer tensor it was made from, when the name differs


class VersionManifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The list of tensors that make up a version for one rollout representation. Stamped and signed by sync."""

    job: str
    version: VersionId
    parent: VersionId | None  # None: the initial weights
    optimizer_step: int
    contract: str
    representation: str  # "bf16", later "fp8_block", ...
    model: str  # sha256 of the model's config.json
    tensors: tuple[TensorEntry, ...]  # sorted by name
    ties: tuple[tuple[str, str], ...] = ()  # (absent name, name of the tensor it equals)
    padding: dict[str, tuple[int, ...]] = {}  # tensor name -> shape before padding
    plan: str = ""  # digest of the `plan.PrecisionPlan` that the tensors were made by

    def encode(self) -> bytes:
        """Canonical bytes: JSON, keys in declared order, tensors sorted. What `digest` and `sign` cover."""
        return msgspec.json.encode(self)

    def digest(self) -> str:
        """sha256 hex of `encode()`; names the version's content."""
        return hashlib.sha256(self.encode()).hexdigest()

    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self.tensors)


class SignedManifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Manifest bytes with their HMAC-SHA256 under the job's key. No engine loads one that `opened` refuses."""

    manifest: bytes
    mac: str


def loaded_digest(tensors: Iterable[TensorEntry]) -> str:
    """sha256 hex over (name, dtype, shape, digest) of `tensors`, sorted by name: what an engine reads as weights.

    Sync computes it from the manifest's tensors; a worker from the bytes that it really holds, with each
    `TensorEntry.digest` hashed anew from its buffer. Where the two differ, nothing is committed.
    """
    rows = [(t.name, t.dtype, t.shape, t.digest) for t in sorted(tensors, key=lambda t: t.name)]
    return hashlib.sha256(msgspec.json.encode(rows)).hexdigest()


class BadManifest(ValueError):
    """A manifest that is unsigned, altered or malformed."""


def sign(manifest: VersionManifest, key: bytes) -> SignedManifest:
    """Sign with the job's key. Raises `ValueError` for an empty key."""
    if not key:
        raise ValueError("the manifest key is empty")
    body = manifest.encode()
    return SignedManifest(manifest=body, mac=hmac.new(key, body, hashlib.sha256).hexdigest())


def opened(signed: SignedManifest, key: bytes) -> VersionManifest:
    """The manifest inside, if `key` signed it. Raises `BadManifest` otherwise."""
    if not key:
        raise ValueError("the manifest key is empty")
    mac = hmac.new(key, signed.manifest, hashlib.sha256).hexdigest()
    if not hmac.compare_digest(mac.encode(), signed.mac.encode()):
        raise BadManifest("manifest signature does not match the job's key")
    try:
        return msgspec.json.decode(signed.manifest, type=VersionManifest)
    except msgspec.MsgspecError as error:
        raise BadManifest(f"manifest: {error}") from None


class Canary(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A fixed prefix with the trainer's own scores of it at the minted version. Stamped by the trainer.

    `tokens[prompt:]` are scored; `logprobs` has one entry for each of them (temperature 1).
    """

    tokens: tuple[int, ...]
    prompt: int
    logprobs: tuple[float, ...]


class Minted(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A trainer's new version, before conversion. Stamped by the trainer, read by sync from `minted`."""

    job: str
    version: VersionId
    parent: VersionId | None
    optimizer_step: int
    contract: str
    artefact: (
        str  # folder under the run folder that holds the trainer's export (`*.safetensors`, config.json)
    )
    files: dict[str, str]  # file name -> sha256 hex, so that a file replaced later is found
    canaries: tuple[Canary, ...]
    traceparent: str
    minted_at: float  # wall-clock unix seconds
    base: VersionId | None = (
        None  # version whose manifest lists the frozen base; None: the artefact is complete
    )


class SyncOrder(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One instruction to rollout workers. Stamped by sync, read by each worker from `sync`."""

    order: Literal["stage", "commit", "abort"]
    version: VersionId
    digest: str
    workers: tuple[str, ...]  # addressed workers; empty: all
    seq: int  # rises by one with each order of the job; an ack carries it back
    traceparent: str = ""
    canaries: tuple[Canary, ...] = ()  # with `stage`
    tolerance: float = 0.0  # with `stage`: largest allowed |trainer - rollout| canary log-prob difference
    source: str = ""  # with `stage`: where the transport offers the bytes; "": the spec says it


class Ack(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A worker's answer. Stamped by the rollout worker, read by sync from `acks`.

    `joined`: the worker holds nothing verified yet and asks for the current version (seq -1).
    `verified`: staged bytes were read back and canaries scored on the staged buffer; carries both.
    `active`: the worker samples under this version from its next decode step on.
    `failed`: the worker serves what it served before; `reason` names the tensor.
    """

    worker: str
    incarnation: str  # random per process start
    kind: Literal["joined", "staged", "verified", "active", "aborted", "failed", "refused"]
    version: VersionId | None
    digest: str = ""
    seq: int = -1
    loaded_digest: str = ""  # digest over the tensors that the engine will really read, post-transform
    canary_gap: float | None = None  # None: no canary was given
    verdict: str = ""  # "verified", "verified, unchanged"
    pause_ms: float = 0.0
    in_flight: int = 0
    nbytes: int = 0
    seconds: float = 0.0
    reason: str = ""
    trace: ComponentTrace | None = None  # with `verified`: what the staged weights are, read from the modules
    pulled: Pulled | None = None  # with `staged` and `verified`


VersionState = Literal["minted", "converted", "published", "active", "retired", "failed"]


class WorkerPath(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """How far one worker got with a version; wall-clock seconds, None: not reached."""

    staged: float | None = None
    verified: float | None = None
    active: float | None = None
    left: float | None = None
    verdict: str = ""
    loaded_digest: str = ""
    canary_gap: float | None = None
    pause_ms: float | None = None
    policy: str = ""
    reason: str = ""
    pulled: Pulled | None = None


class VersionRecord(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """A version's whole path as the gateway and `syncline versions` show it. One writer after minting: sync."""

    version: VersionId
    parent: VersionId | None
    optimizer_step: int
    contract: str
    state: VersionState
    digest: str = ""
    representation: str = ""
    nbytes: int = 0
    new_bytes: int = 0
    changed_bytes: int | None = None  # of tensors that the version published before does not have
    changed_share: float | None = None  # of elements against that version; None: not compared
    delta_bytes: int | None = None  # of deltas, and of changed tensors without one; None: no deltas
    traceparent: str = ""
    minted: float | None = None
    converted: float | None = None
    published: float | None = None
    active: float | None = None  # when the commit scope was complete
    retired: float | None = None
    workers: dict[str, WorkerPath] = {}
    reason: str = ""
    rollout_trace: ComponentTrace | None = None  # of the worker that verified last
    convert_trace: ComponentTrace | None = None
