"""The index of a version's deltas: signed, beside its manifest, never a part of it; see docs/decisions/0009.

A manifest says what a version is. An index says one way to get there from what was there before: it may come later,
be empty, or be dropped, and whoever has none pulls whole tensors. Made by sync; read by the pull side of a transport.
"""

from __future__ import annotations

import hashlib
import hmac

import msgspec

from syncline.contract.version_path import VersionId

_DOMAIN = b"syncline deltas\0"  # manifests are signed with the same key: neither passes for the other


class DeltaEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How one tensor's content is made of another's. By content: names and versions do not matter."""

    new: str  # sha256 hex of a tensor of the index's version
    old: str  # sha256 hex of the content that the delta starts from
    blob: str  # sha256 hex of the delta; also the blob's name in the store
    nbytes: int  # of the delta, fewer than the tensor has
    itemsize: int  # bytes that change together


class DeltaIndex(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """All deltas of one version. Stamped and signed by sync."""

    job: str
    version: VersionId
    manifest: str  # digest of the version's manifest
    before: VersionId | None  # the version that the deltas start from; None: there was none
    deltas: tuple[DeltaEntry, ...] = ()  # sorted by `new`; a tensor that is not in it has to be pulled whole


class SignedIndex(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Index bytes with their HMAC-SHA256 under the job's key."""

    index: bytes
    mac: str


class BadIndex(ValueError):
    """An index that is unsigned, altered, malformed, or of another version than it was looked up under."""


def sign_index(index: DeltaIndex, key: bytes) -> SignedIndex:
    """Sign with the job's key. Raises `ValueError` for an empty key."""
    body = msgspec.json.encode(index)
    return SignedIndex(index=body, mac=_mac(body, key))


def opened_index(signed: SignedIndex, key: bytes, job: str, version: VersionId) -> DeltaIndex:
    """The index inside, if `key` signed it for this version of this job. Raises `BadIndex` otherwise."""
    if not hmac.compare_digest(_mac(signed.index, key).encode(), signed.mac.encode()):
        raise BadIndex(f"deltas of version {version}: the signature does not match the job's key")
    try:
        index = msgspec.json.decode(signed.index, type=DeltaIndex)
    except msgspec.MsgspecError as error:
        raise BadIndex(f"deltas of version {version}: {error}") from None
    if (index.job, index.version) != (job, version):
        raise BadIndex(f"deltas of version {version}: the index is of version {index.version} of {index.job}")
    return index


def decoded_index(raw: bytes) -> SignedIndex:
    """The signed index in a file's bytes. Raises `BadIndex`."""
    try:
        return msgspec.json.decode(raw, type=SignedIndex)
    except msgspec.MsgspecError as error:
        raise BadIndex(f"file of deltas: {error}") from None


def _mac(body: bytes, key: bytes) -> str:
    if not key:
        raise ValueError("the manifest key is empty")
    return hmac.new(key, _DOMAIN + body, hashlib.sha256).hexdigest()
