"""The fault table: what is done to a version, and what must then be so. `docs/faults.md` is made of it.

    PYTHONPATH=tests python tests/sync/fault_rows.py > docs/faults.md

A row's `inject` mints the next version with its fault; between its two halves the test looks at what came of it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Literal

import fault_exports as e
import fault_kills as k
import fault_shards as s
import fault_workers as w
from fault_board import Kind
from fault_stack import Stack

Injection = Callable[[Stack], AbstractContextManager[None]]
End = Literal["failed", "published", "active"]
Place = Literal["before", "it", "gone"]


@dataclass(frozen=True)
class Fault:
    """One row.

    where     what the fault is put into, and when
    says      what the message must contain: the version's reason if it failed, else that of each worker outside it
    version   state of the version then
    workers   what each worker serves then: the version before, it, or nothing because its process is gone
    then      what happens next, beside the next clean version becoming active on all that live
    """

    name: str
    kind: Kind
    where: str
    inject: Injection
    says: tuple[str, ...]
    version: End
    workers: tuple[Place, ...]
    then: str = ""


LORA = {
    "name": "faults_adapter",
    "families": [{"name": "mlp", "match": ["*.mlp.*_proj.weight"], "weight": "int4_g32"}],
    "adapter": {"rank": 4, "alpha": 8.0, "targets": ["*.self_attn.*_proj.weight"]},
    "trainer": {"fprop": {"right": "reconstructed"}, "dgrad": {"right": "reconstructed"}},
}
BRIDGE_INT4 = {
    "name": "faults_bridge",
    "families": [{"name": "mlp", "match": ["*.mlp.*_proj.weight"], "weight": "int4_g32"}],
    "convert": {"route": "bf16_bridge"},
    "trainer": {"fprop": {"right": "reconstructed"}, "dgrad": {"right": "reconstructed"}},
}
INT4_RECIPE = {"recipe": "int4_qat_w4a16"}

WIDE = Kind("wide", "BF16, rolling, 3 workers", {"recipe": "bf16"})
INT4 = Kind("int4", "INT4, rolling, 3 workers", INT4_RECIPE)
BARRIER = Kind("barrier", "INT4, a barrier over 3 workers", INT4_RECIPE, mode="colocated")
ADAPTER = Kind("adapter", "LoRA over a frozen INT4 base, rolling, 3 workers", {"custom": LORA})
FIRST = Kind("first", "BF16, rolling, 3 workers, no version yet", {"recipe": "bf16"})
BRIDGE = Kind(
    "bridge", "INT4 that the engine makes of BF16 itself, rolling, 3 workers", {"custom": BRIDGE_INT4}
)
HASTY = Kind("hasty", "BF16, rolling, 3 workers, activation_wait 10 s", {"recipe": "bf16"}, wait=10.0)
SMALL = Kind(
    "small", "INT4, rolling, 3 workers, the store on a file system of 1 MiB", INT4_RECIPE, store_kib=1024
)
DEATHS = Kind(
    "deaths",
    "BF16, a barrier over 2 workers and 4 that are processes to kill",
    {"recipe": "bf16"},
    mode="colocated",
    workers=("w0", "w1"),
    victims=("w2", "w3", "w4", "w5"),
)
SYNC = Kind(
    "sync",
    "BF16, a barrier over 2 workers, sync a process to kill",
    {"recipe": "bf16"},
    mode="colocated",
    workers=("w0", "w1"),
    sync="process",
)

ENDED = "sync reports `SyncFailed`, with which the scheduler ends a job"
NOBODY = "workers stay out for it; the next version supersedes it, or it fails at `activation_wait`"
OUT = "that worker takes the next version with the others"

EXPORT = "the trainer's export, before it is stamped"
SHARDED = "the export of two ranks, after they stamped their shards"
STAMPED = "the trainer's export, after it was stamped"
UNSIGNED = "the manifest, between conversion and signature"
STORE = "the store, between publication and the order to stage"
BUFFER = "one worker's second buffer"
ONE = e.TENSOR
CODES, SCALE = f"tensor {ONE}_packed", f"{ONE}_scale"


def _all(place: Place, kind: Kind) -> tuple[Place, ...]:
    return tuple(place for _ in kind.names)


def refused(name: str, kind: Kind, where: str, inject: Injection, *says: str, then: str = ENDED) -> Fault:
    """Sync does not publish it."""
    return Fault(name, kind, where, inject, says, "failed", _all("before", kind), then)


def untaken(name: str, kind: Kind, where: str, inject: Injection, *says: str, then: str = NOBODY) -> Fault:
    """Published, and no worker takes it."""
    return Fault(name, kind, where, inject, says, "published", _all("before", kind), then)


def taken(name: str, kind: Kind, where: str, inject: Injection, then: str) -> Fault:
    """It does no harm."""
    return Fault(name, kind, where, inject, (), "active", _all("it", kind), then)


def one_out(name: str, kind: Kind, where: str, inject: Injection, *says: str) -> Fault:
    """One of three workers does not take it."""
    return Fault(name, kind, where, inject, says, "active", ("it", "before", "it"), OUT)


FAULTS: tuple[Fault, ...] = (
    # ---- what the trainer hands over
    refused("missing tensor", WIDE, EXPORT, e.missing, f"tensor {ONE} is missing"),
    refused(
        "renamed tensor", WIDE, EXPORT, e.renamed, f"tensor {ONE} is missing", f"tensor {e.RENAMED} is not"
    ),
    refused("extra tensor", WIDE, EXPORT, e.extra, f"tensor {e.EXTRA} is not"),
    refused("wrongly shaped tensor", WIDE, EXPORT, e.reshaped, f"tensor {ONE} has shape [32, 128]"),
    refused("missing low-bit tensor", INT4, EXPORT, e.missing, f"tensor {ONE} is missing"),
    untaken(
        "missing tensor in the first version",
        FIRST,
        EXPORT,
        e.missing,
        f"tensor {ONE} is missing",
        then="workers hold nothing and ask again; the plan of a version that was never active binds nobody",
    ),
    refused(
        "a name in two files, other bytes",
        WIDE,
        EXPORT,
        e.in_two_files,
        f"tensor {ONE} is in a.safetensors and",
    ),
    refused(
        "a name twice in a file, other bytes", WIDE, EXPORT, e.twice_in_a_file, "invalid offset for tensor"
    ),
    refused("a weight that is no number", INT4, EXPORT, e.not_finite, f"tensor {ONE} is nan"),
    untaken("two tensors of one shape exchanged", WIDE, EXPORT, e.exchanged, "canary gap"),
    refused("truncated file", WIDE, STAMPED, e.truncated, "model.safetensors has sha256"),
    refused("file with one bit flipped", WIDE, STAMPED, e.flipped, "model.safetensors has sha256"),
    refused("file replaced by another", WIDE, STAMPED, e.replaced, "model.safetensors has sha256"),
    refused("file gone", WIDE, STAMPED, e.deleted, "model.safetensors: No such file"),
    refused(
        "file that nobody stamped", WIDE, STAMPED, e.unstamped, "extra.safetensors is not among the stamped"
    ),
    refused(
        "file written to while sync converts",
        WIDE,
        STAMPED,
        e.overwritten_late,
        "model.safetensors was changed",
    ),
    taken(
        "file replaced while sync converts",
        WIDE,
        STAMPED,
        e.renamed_over_late,
        "sync reads on from the file that it opened and checked",
    ),
    taken(
        "minted twice, other files",
        WIDE,
        "`minted`, after the version is active",
        e.minted_twice,
        "the first stands; the second is logged and dropped",
    ),
    # ---- what a trainer's ranks hand over
    taken("none: two ranks' shards", WIDE, EXPORT, s.whole, "sync gathers full tensors from both"),
    refused("files of two ranks exchanged", WIDE, SHARDED, s.files_exchanged, "on rank 0", "of", "rank 1"),
    refused(
        "a shard exchanged with another rank's of its shape",
        WIDE,
        SHARDED,
        s.shards_exchanged,
        "linear_proj.weight",
        "rank 0",
        "rank 1",
    ),
    refused("a rank's file missing", WIDE, SHARDED, s.rank_gone, "rank-00001.safetensors is missing"),
    refused("a shard with one bit flipped", WIDE, SHARDED, s.shard_flipped, "rank 1"),
    refused(
        "a rank's file with one bit flipped",
        WIDE,
        STAMPED,
        s.file_flipped,
        "rank-00001.safetensors has sha256",
    ),
    # ---- what a wrong converter would sign
    untaken(
        "payload without its scale",
        INT4,
        UNSIGNED,
        w.without("_scale"),
        f"tensor {SCALE} is missing",
        "_packed",
    ),
    untaken(
        "scale without its payload", INT4, UNSIGNED, w.without("_packed"), f"{CODES} is missing", "_scale"
    ),
    untaken("stale scale: of the version before", INT4, UNSIGNED, w.stale_scale, "canary gap"),
    untaken("missing tensor", WIDE, UNSIGNED, w.without(""), f"tensor {ONE} is missing"),
    untaken("renamed tensor", WIDE, UNSIGNED, w.renamed, f"tensor {ONE} is missing"),
    untaken("extra tensor", WIDE, UNSIGNED, w.extra, e.EXTRA),
    untaken("wrongly shaped tensor", WIDE, UNSIGNED, w.reshaped, ONE, "[32, 128]"),
    untaken("wrongly shaped scale", INT4, UNSIGNED, w.reshaped_scale, f"tensor {SCALE} has", "[128, 1]"),
    untaken("a name twice, other bytes", WIDE, UNSIGNED, w.listed_twice, f"tensor {ONE} is listed twice"),
    # ---- what happens to the store
    untaken("truncated blob", INT4, STORE, w.blob_truncated, f"{CODES}: blob"),
    untaken("blob with one bit flipped", INT4, STORE, w.blob_flipped, f"{CODES}: blob"),
    untaken("blob replaced by other bytes", INT4, STORE, w.blob_replaced, f"{CODES}: blob"),
    untaken("blob gone", INT4, STORE, w.blob_gone, f"{CODES}: the store has no blob"),
    untaken("blob that cannot be read", INT4, STORE, w.blob_unreadable, f"{CODES}: "),
    untaken(
        "blob with one bit flipped, then the same tensors again",
        WIDE,
        STORE,
        w.blob_flipped_and_kept,
        f"tensor {ONE}: blob",
        then=NOBODY + "; as it has that very tensor, its blob is written anew",
    ),
    untaken("manifest of another key", INT4, STORE, w.foreign_manifest, "signature"),
    untaken("manifest of the version before", INT4, STORE, w.older_manifest, "the store's manifest of"),
    untaken(
        "manifest of other contents, rightly signed", INT4, STORE, w.other_manifest, "the store's manifest of"
    ),
    untaken("manifest that is no JSON", INT4, STORE, w.garbage_manifest, "manifest file of version"),
    untaken("manifest that cannot be read", INT4, STORE, w.unreadable_manifest, "Is a directory"),
    untaken("manifest gone", INT4, STORE, w.no_manifest, "the store has no manifest of version"),
    # ---- what happens on one of three workers
    one_out("a scale copied wrongly", INT4, BUFFER, w.copied_wrongly, f"tensor {SCALE} reads back"),
    one_out("a scale copied wrongly", BARRIER, BUFFER, w.copied_wrongly, f"tensor {SCALE} reads back"),
    one_out("a weight changed after it was read back", INT4, BUFFER, w.changed_later, "canary gap"),
    one_out("a blob that this worker cannot read", INT4, BUFFER, w.disk_error, f"{CODES}: "),
    one_out(
        "stale derived scale",
        BRIDGE,
        BUFFER,
        w.stale_derived_scale,
        f"tensor {w.DOWN}_scale does not read back",
    ),
    one_out("a worker that hangs", HASTY, "one worker, staging", w.hangs, "no answer to the order to stage"),
    refused("no worker takes it in time", HASTY, "all workers, staging", w.all_hang, "active on no worker"),
    # ---- adapters
    refused("missing adapter tensor", ADAPTER, EXPORT, e.adapter_missing, f"tensor {e.A} is missing"),
    refused("half of an adapter", ADAPTER, EXPORT, e.adapter_half, f"tensor {e.B} is missing"),
    refused("a module saved whole", ADAPTER, EXPORT, e.adapter_saved, f"tensor {e.SAVED} is not"),
    refused("adapter of no target", ADAPTER, EXPORT, e.adapter_extra, f"tensor {e.A_EXTRA} is not"),
    refused("adapter of a larger rank", ADAPTER, EXPORT, e.adapter_rank, f"tensor {e.A} has shape [8, 64]"),
    refused("an adapter value that is no number", ADAPTER, EXPORT, e.adapter_nan, f"tensor {e.A} is nan"),
    untaken("two A of one shape exchanged", ADAPTER, EXPORT, e.adapter_exchanged, "canary gap"),
    refused(
        "a tensor of the base beside the adapter", ADAPTER, EXPORT, e.adapter_base, f"tensor {ONE} is not"
    ),
    refused("a base that never was", ADAPTER, EXPORT, e.adapter_no_base, "its base 7.7 was never published"),
    refused("file replaced by another", ADAPTER, STAMPED, e.replaced, "model.safetensors has sha256"),
    untaken("blob with one bit flipped", ADAPTER, STORE, w.adapter_flipped, f"tensor {e.A}: blob"),
    refused(
        "blob of the base gone",
        ADAPTER,
        "the store, before an adapter is minted",
        w.base_gone,
        f"of {w.GATE}_packed",
        then=ENDED + "; a version that brings the base, as a resumed trainer's first, writes the blob anew",
    ),
    taken(
        "blob of the base with one bit flipped",
        ADAPTER,
        "the store, before an adapter is minted",
        w.base_flipped,
        f"workers hold the base and do not read it; a new one says `tensor {w.GATE}_packed: blob`, serves nothing and "
        "stays out until a version brings the base again",
    ),
    taken(
        "base damaged in the spare buffer",
        ADAPTER,
        BUFFER,
        w.base_damaged,
        "what is held is hashed again at each stage, and a tensor that is not what it was is copied anew",
    ),
    # ---- the disk
    refused(
        "disk full",
        SMALL,
        "the store, while sync converts",
        k.disk_full,
        "tensor model.layers",
        "No space left on device",
        then=ENDED + "; what was written of it is deleted at once",
    ),
    # ---- processes
    *(
        Fault(
            f"worker killed: {place}",
            DEATHS,
            "SIGKILL",
            k.worker_killed(DEATHS.victims[i], place),
            (),
            "active",
            tuple("gone" if name in DEATHS.victims[: i + 1] else "it" for name in DEATHS.names),
            "the barrier waits until the worker's heartbeat is gone, then goes on without it",
        )
        for i, place in enumerate(k.WORKER_PLACES)
    ),
    *(
        taken(
            f"sync killed: {place}",
            SYNC,
            "SIGKILL, another process takes over",
            k.sync_killed(place),
            "the next process goes on from streams, records and store",
        )
        for place in k.SYNC_PLACES
    ),
    refused(
        "sync killed, its manifest no JSON",
        SYNC,
        "SIGKILL, then the store; another process takes over",
        k.sync_killed_over_garbage,
        "manifest file of version",
        then=ENDED + "; no blob is deleted while that manifest is among the kept ones",
    ),
)

_HEAD = """# Faults

Generated from the table in `tests/sync/fault_rows.py` by `PYTHONPATH=tests python tests/sync/fault_rows.py`.
`tests/sync/test_fault_table.py` carries each row out with sync's and the workers' own loops on a real Redis and store.
After each row the next clean version becomes active on every living worker, which then computes with exactly its
weights; nothing is restarted for that but what the row itself killed.

*State* is the version's own. *Workers* says what each of them serves then: the version before, this one, or nothing as
its process is gone. What a worker says stands in the version's record under the worker's name.

| fault | where | job | what is said | state | workers | next |
|---|---|---|---|---|---|---|
"""
_TAIL = """
Elsewhere: foreign shards, and every exchange of two shards, under many layouts: `tests/sync/test_reshard.py`. Late,
repeated and lost messages: `tests/sync/test_histories.py`; the same and damage in random order, with every token judged
by the version that it shows: `tests/sync/test_true_histories.py`. Processes killed in a whole job: `tests/loop`.

A damaged blob is not repaired from the trainer's export, which is gone once the manifest is published: a version whose
blob nobody can read is superseded by the next one, or fails at `activation_wait`; where mode is `colocated` no next one
comes before that.

Found by no check: a byte of a staged buffer that changes between its verification and the commit serves until that
buffer is loaded again, as a commit must not depend on the model's size. A blob that is cut short in place while a
worker has it mapped (the base of a delta, a weight that the engine quantises itself) ends that worker (SIGBUS); one
that is cut short while it is read fails the staging. The store itself only ever replaces files whole.
"""


def page() -> str:
    """The whole page."""
    return _HEAD + "".join(_rows()) + _TAIL


def _rows() -> Iterator[str]:
    for fault in FAULTS:
        said = "; ".join(f"`{part}`" for part in fault.says) or "nothing"
        names = fault.kind.names
        if len(set(fault.workers)) == 1:
            workers = f"all: {fault.workers[0]}"
        else:
            workers = ", ".join(f"{n} {p}" for n, p in zip(names, fault.workers, strict=True))
        yield (
            f"| {fault.name} | {fault.where} | {fault.kind.about} | {said} | {fault.version} | {workers} "
            f"| {fault.then} |\n"
        )


if __name__ == "__main__":
    sys.stdout.write(page())
