"""What conversion really made, for the six-component trace."""

from __future__ import annotations

from collections.abc import Iterable

from syncline.contract.artefact import encoded
from syncline.contract.plan import PlanEntry, PrecisionPlan
from syncline.contract.precision import Place
from syncline.contract.precision_trace import ComponentTrace, Held, Use
from syncline.contract.version_path import TensorEntry


def traced(plan: PrecisionPlan, written: Iterable[tuple[TensorEntry, Held]], where: Place) -> ComponentTrace:
    """What was written, read from the entries; which family a tensor belongs to, from the plan."""
    sources: dict[str, list[TensorEntry]] = {}
    held: dict[Held, int] = {"artefact": 0}
    for entry, kind in written:
        sources.setdefault(entry.source or entry.name, []).append(entry)
        held["artefact"] += entry.nbytes
        held[kind] = held.get(kind, 0) + entry.nbytes
    families: dict[str, list[PlanEntry]] = {}
    for planned in plan.entries:
        families.setdefault(planned.family, []).append(planned)
    bridge = where == "rollout_worker"
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
    return ComponentTrace(component="convert", uses=tuple(uses), bytes=held, place=where)
