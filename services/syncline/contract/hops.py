"""`Hop`: one named step of a path. The two paths (`token_path`, `version_path`) are ordered tuples of hops."""

from __future__ import annotations

import msgspec


class Hop(msgspec.Struct, frozen=True, kw_only=True):
    """A step that a traced object passes.

    `name` is the only span name that `runtime.tracing.hop()` will open for it; `done_by` names the service that
    opens the span; `reads` and `writes` name keys of `streams.py` (or "engine", "store", "segment");
    `attributes` lists the span attributes that the hop must set before it closes, no more and no less.
    """

    name: str
    done_by: str
    reads: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()
    attributes: tuple[str, ...] = ()
