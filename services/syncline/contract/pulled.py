"""How a version's bytes came to one worker: part of its ack, its `WorkerPath` and of the staged hop."""

from __future__ import annotations

import msgspec


class Pulled(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How a version's bytes came to one worker. Stamped by the worker's side of the transport; bytes are of payload."""

    kind: str  # `transfer.kind`
    seconds: float
    full: int = 0  # bytes that came as whole blobs
    deltas: int = 0  # bytes that came as deltas
    held: int = 0  # bytes of blobs that were there already, or mapped where they lie
    resumed: int = 0  # bytes of broken transfers that did not have to come again
    fallbacks: dict[
        str, int
    ] = {}  # cause -> tensors for which a delta was to be had and the full blob was taken

    @property
    def nbytes(self) -> int:
        """Bytes that travelled."""
        return self.full + self.deltas
