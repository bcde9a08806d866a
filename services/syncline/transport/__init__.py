"""How the bytes of a published version reach the rollout workers; see docs/decisions/0010 and docs/transfer.md.

Two sides, and one file per kind (`transfer.kind` of the spec) that has both; `kinds.py` chooses by one `match`.

    Offering   sync's side. `offer(version)`: its signed manifest is in the store, and from now on its bytes can be had.
               `source(...)`: what a stage order carries, so that workers find them. `retire()`: the store has dropped
               versions; what was put elsewhere of them goes. `close()`.
    Pulling    a worker's side. `store`: the `BlobStore` that engines read. `pull(order, serving)`: every blob of the
               order's manifest lies in `store` afterwards, each under its digest, and the manifest was signed with the
               job's key. `supersede(seq)`: pulls for older orders end now. `doubt()`: what lies in the store is hashed
               before it is believed again. `close()`.

`files` is a `Pulling` of its own: the store is the job's, and nothing moves. All other kinds share `puller.Puller`,
which owns the worker's store and decides what to ask for; a kind only is a `Fetch`: the bytes of one thing by its name.

    Fetch      `manifest(version)`, `extra(name)` (a signed file beside the manifests, such as `deltas/0.7.json`), and
               `blob(digest, into)`: append the blob's bytes to `into` from `into.held` on, as far as `into.nbytes`.

`Puller._take` is the one place where it is decided how a digest gets into the store: held already, made of a delta, or
pulled whole (`Puller._whole`). A delta is a blob under its own digest and comes by `_whole` too; its index comes by
`Fetch.extra`. On sync's side `offered.py` says what a version offers: names of extras, and digests of blobs.

May live here: both sides of each kind, the worker's own store, deadlines, resumption and the hash on the way in. torch
is imported by `group.py` alone and fsspec by `objects.py` alone, where a job chose them.

May not live here: what a version is, conversion, when a worker takes a version (sync's machine says), or how an engine
loads one. Nothing here is trusted for truth: the manifest is signed, a blob gets its name after it was hashed.
"""
