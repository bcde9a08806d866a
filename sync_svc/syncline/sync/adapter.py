"""The adapter of a version, and the frozen base under it: carried over from a manifest, or converted with it.

An export is the base with its adapter, or the adapter alone; then `Minted.base` names the published version whose
manifest lists the base, and its entries are taken over as they stand. Either way the manifest is complete, and either
way exactly the contract's adapter tensors must be there.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from syncline.contract.adapters import adapter_shapes, is_adapter
from syncline.contract.plan import PrecisionPlan
from syncline.contract.precision import Adapter, PrecisionContract
from syncline.contract.precision_trace import ComponentTrace, Use
from syncline.contract.version_path import Minted, VersionManifest
from syncline.runtime.store import BlobStore
from syncline.sync.convert import Converted, Written, convert, new_bytes, wide
from syncline.sync.export import BadExport, Fact
from syncline.sync.source import Source


class Base(msgspec.Struct, frozen=True, kw_only=True):
    """A frozen base that is in the store already: the manifest that lists it, and the plan that it was made by."""

    manifest: VersionManifest
    plan: PrecisionPlan


def convert_version(
    source: Source, contract: PrecisionContract, store: BlobStore, base: Base | None
) -> Converted:
    """Convert an export with or without an adapter.

    base   what is carried over under an export of the adapter alone; None: the export is complete

    Raises as `convert` does, and `BadExport` naming an adapter tensor that is missing, unexpected or of another shape,
    or a tensor of the base where the base is carried over.
    """
    if contract.adapter is None:
        if base is not None:
            raise BadExport("the version names a base, and the contract has no adapter")
        return convert(source, contract, store)
    facts = source.facts()
    adapter = {name: fact for name, fact in facts.items() if is_adapter(name)}
    if base is None:
        whole = convert(source, contract, store, leave=adapter)
        done = _written(contract.adapter, source, adapter, whole.plan, store)
        return _joined(whole, done)
    if rest := facts.keys() - adapter.keys():
        raise BadExport(
            f"tensor {min(rest)} is not one of the adapter's, and version {base.manifest.version} lists the base"
        )
    done = _written(contract.adapter, source, adapter, base.plan, store)
    return _joined(_carried(contract, base), done)


def base_of(manifest: VersionManifest, plan: PrecisionPlan, minted: Minted) -> Base:
    """The base of `minted`, from the opened `manifest` of the version that it names and the job's `plan`.

    Raises `BadExport` if they are of another contract, model or plan.
    """
    for what, theirs, ours in (
        ("contract", manifest.contract, minted.contract),
        ("model", manifest.model, minted.files.get("config.json", "")),
        ("precision plan", manifest.plan, plan.digest()),
    ):
        if theirs != ours:
            raise BadExport(
                f"base {manifest.version} is of {what} {theirs}, version {minted.version} of {ours}"
            )
    return Base(manifest=manifest, plan=plan)


def _written(
    adapter: Adapter, source: Source, facts: Mapping[str, Fact], plan: PrecisionPlan, store: BlobStore
) -> list[Written]:
    """The adapter's tensors, which are those of `facts`, in the store as BF16."""
    wanted = adapter_shapes(adapter, {entry.name: entry.shape for entry in plan.entries})
    for name in sorted(wanted.keys() | facts.keys()):
        if name not in facts:
            raise BadExport(f"adapter tensor {name} is missing")
        if name not in wanted:
            raise BadExport(f"tensor {name} is not one of the adapter's")
        if facts[name].shape != wanted[name]:
            raise BadExport(
                f"adapter tensor {name} has shape {list(facts[name].shape)}, the contract says {list(wanted[name])}"
            )
    return [
        msgspec.structs.replace(wide(source.read(name), store), held="adapter") for name in sorted(wanted)
    ]


def _carried(contract: PrecisionContract, base: Base) -> Converted:
    """The base's part of a version: nothing of it is written."""
    entries = tuple(entry for entry in base.manifest.tensors if not is_adapter(entry.name))
    return Converted(
        representation=contract.representation,
        tensors=entries,
        ties=base.manifest.ties,
        padding=base.manifest.padding,
        plan=base.plan,
        nbytes=sum(entry.nbytes for entry in entries),
        new_bytes=0,
        trace=ComponentTrace(component="convert", uses=(), place=contract.convert.where),
    )


def _joined(base: Converted, done: list[Written]) -> Converted:
    """Base and adapter as one version. The trace tells of what was written alone."""
    size = sum(w.entry.nbytes for w in done)
    dtypes = "+".join(sorted({w.entry.dtype for w in done}))
    use = Use(
        family="adapter",
        tensors=len(done),
        encoded=f"{dtypes} values",
        operands="none",
        kernel="none",
        persistent=dtypes,
        communicated=dtypes,
    )
    held = base.trace.bytes | {"artefact": base.trace.bytes.get("artefact", 0) + size, "adapter": size}
    return msgspec.structs.replace(
        base,
        tensors=tuple(sorted((*base.tensors, *(w.entry for w in done)), key=lambda entry: entry.name)),
        nbytes=base.nbytes + size,
        new_bytes=base.new_bytes + new_bytes(done),
        trace=msgspec.structs.replace(base.trace, uses=(*base.trace.uses, use), bytes=held),
    )
