"""Tensors made of deltas, on a worker's side: the indexes that are read, the chain that is taken, and every way out.

Whatever is wrong with an index or a delta costs bytes and nothing else: `make` answers no, counts the cause, and the
whole tensor is pulled in the same call. What a chain makes is hashed before it has a name.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable

from syncline.contract.deltas import BadIndex, DeltaIndex, decoded_index, opened_index
from syncline.contract.version_path import TensorEntry, VersionId, VersionManifest
from syncline.runtime.delta import BadDelta, OtherBase, apply, header
from syncline.runtime.store import BlobStore, MissingBlob
from syncline.transport.catchup import LINKS, Chain, Ways
from syncline.transport.transport import Damaged, Deadline, Moved, NotOffered, WrongLength

_LOG = logging.getLogger("syncline.transport")
_OFTEN = 0.1  # seconds between two looks for an index that is being made


class ByDelta:
    """Makes tensors of one version.

    extra   the bytes of a file beside the manifests; raises `NotOffered`
    bring   bring the blob of that digest and size into the store, hashed; raises `PullFailed`
    keep    put the bytes of that digest into the store, hashed; raises `NoRoom`
    """

    def __init__(
        self,
        manifest: VersionManifest,
        store: BlobStore,
        key: bytes,
        extra: Callable[[str], bytes],
        bring: Callable[[str, int], None],
        keep: Callable[[str, memoryview], None],
    ) -> None:
        self._manifest, self._store, self._key = manifest, store, key
        self._extra, self._bring, self._keep = extra, bring, keep
        self._chains: dict[str, Chain] = {}
        self._ended = ""  # why no further index was read; "": none was needed, or there is none before

    def learn(self, lacking: Iterable[TensorEntry], patience: float, moved: Moved, until: Deadline) -> None:
        """Read indexes from the version's own backwards, until each tensor has its chain or none is to be had.

        patience   seconds to wait for the version's own, which sync may be about to write
        """
        wanted = list(lacking)
        indexes: list[DeltaIndex] = []
        at: VersionId | None = self._manifest.version
        while at is not None and len(indexes) < LINKS:
            try:
                indexes.append(self._index(at, 0.0 if indexes else patience, until))
            except NotOffered as error:
                self._ended, story = "no index", str(error)
            except BadIndex as error:
                self._ended, story = "bad index", str(error)
            if self._ended:
                _LOG.warning("deltas of version %s: %s", at, story)
                break
            ways = Ways(indexes)
            self._chains = {t.digest: ways.chain(t.digest, t.nbytes, self._store.has) for t in wanted}
            if not any(chain.why == "no base held" for chain in self._chains.values()):
                break
            at = indexes[-1].before
        for entry in wanted:
            cause = self._why(entry.digest)
            if cause:
                self._fall_back(entry, cause, "", moved)

    def make(self, entry: TensorEntry, moved: Moved) -> bool:
        """Put the tensor's blob into the store, by the chain found for it. False: it has to be pulled whole.

        Raises `PullFailed` for what would end the pull of the whole tensor too.
        """
        chain = self._chains.get(entry.digest, Chain())
        if not chain.links:
            return False
        try:
            made = self._applied(entry, chain)
        except OtherBase as error:
            return self._fall_back(entry, "other base", str(error), moved)
        except BadDelta as error:
            return self._fall_back(entry, "bad delta", str(error), moved)
        except NotOffered as error:
            return self._fall_back(entry, "no delta", str(error), moved)
        except (Damaged, WrongLength) as error:
            return self._fall_back(entry, "damaged delta", str(error), moved)
        self._keep(entry.digest, memoryview(made))
        return True

    def _applied(self, entry: TensorEntry, chain: Chain) -> bytearray:
        """What the chain makes: exactly the bytes of `entry`. Memory: two tensors and a delta."""
        first = chain.links[0].old
        try:
            base = self._store.mapped(first)
        except MissingBlob as error:
            raise OtherBase(str(error)) from error
        found = ""  # the first base is hashed, each further one was
        made = bytearray()
        for link in chain.links:
            self._bring(link.blob, link.nbytes)
            delta = self._store.mapped(link.blob)
            made = apply(base, delta, found)
            if header(delta).new != link.new:
                raise BadDelta(f"the delta makes {header(delta).new}, its index says {link.new}")
            base, found = memoryview(made), link.new
        if len(made) != entry.nbytes:
            raise BadDelta(f"the chain makes {len(made)} bytes, the tensor has {entry.nbytes}")
        return made

    def _index(self, version: VersionId, patience: float, until: Deadline) -> DeltaIndex:
        """The index of `version`, opened. Raises `NotOffered`, `BadIndex`."""
        give_up = until.left() - patience
        while True:
            try:
                raw = self._extra(f"deltas/{version}.json")
            except NotOffered:
                if until.left() <= give_up:
                    raise
                until.rest(_OFTEN)
            else:
                break
        index = opened_index(decoded_index(raw), self._key, self._manifest.job, version)
        if version == self._manifest.version and index.manifest != self._manifest.digest():
            raise BadIndex(f"the index is of manifest {index.manifest}")
        if index.before is not None and index.before >= version:
            raise BadIndex(f"the index starts from {index.before}")
        return index

    def _why(self, digest: str) -> str:
        """The cause for which a tensor is pulled whole though a delta was to be expected; "": there is a chain, or
        its index says that no delta is smaller.
        """
        if not self._chains:
            return self._ended
        why = self._chains[digest].why
        if why == "no delta":
            return ""
        return self._ended or why if why == "no base held" else why

    def _fall_back(self, entry: TensorEntry, cause: str, story: str, moved: Moved) -> bool:
        moved.fallbacks[cause] = moved.fallbacks.get(cause, 0) + 1
        _LOG.warning(
            "tensor %s of version %s comes whole: %s%s",
            entry.name,
            self._manifest.version,
            cause,
            f": {story}" if story else "",
        )
        return False
