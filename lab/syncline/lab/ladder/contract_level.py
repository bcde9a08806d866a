"""Level 1: the precision contract. Complete, free of contradictions, resolved against the real model."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from syncline.contract.plan import sensitive
from syncline.contract.precision import PrecisionContract
from syncline.contract.precision_rules import contradictions
from syncline.lab.ladder.records import Check, same
from syncline.lab.ladder.subject import Subject


def checks(subject: Subject) -> Iterator[Check]:
    """Raises `BadPlan` where the contract does not fit the model at all."""
    contract = subject.contract
    yield same(
        "nothing contradicts itself",
        [f"{p.path}: {p.message}" for p in contradictions(contract)],
        "contract/precision_rules.py",
    )
    yield same("it survives a round trip", _round_trip(contract), "the digest rides in every version")
    yield same("each tensor has one treatment", _uncovered(subject), "checkpoint tensors of the model")
    yield same("sensitive tensors stay wide unless they are named", _exceptions(subject), "contract/plan.py")
    yield same("what trains is stated", _trainable(subject), "seed section 3.1")
    yield same("version rules and lag are stated", _staleness(subject), "seed sections 5.1 and 5.2")
    refused = subject.rollouts.refuses(subject.spec, subject.models)
    yield same("the engine does what the contract says", refused, f"{subject.rollouts.name} on this machine")
    yield same("a baseline is stated where numerics differ", _baseline(contract), "seed section 6.1")


def _round_trip(contract: PrecisionContract) -> list[str]:
    again = msgspec.json.decode(msgspec.json.encode(contract), type=PrecisionContract)
    return [] if again.digest() == contract.digest() else ["its digest after encoding and decoding"]


def _uncovered(subject: Subject) -> list[str]:
    planned = {entry.name for entry in subject.plan.entries}
    unused = [
        family.name
        for family in subject.contract.families
        if not any(entry.family == family.name for entry in subject.plan.entries)
    ]
    return [f"{name} is in one of model and plan" for name in sorted(planned ^ subject.shapes.keys())] + [
        f"family {name} quantises nothing" for name in unused
    ]


def _exceptions(subject: Subject) -> list[str]:
    """A router, an embedding or a norm in few bits changes what the model does far more than it saves."""
    allowed = {family.name for family in subject.contract.families if family.sensitive}
    return [
        f"{entry.name} ({sensitive(entry.name)}) is in family {entry.family}"
        for entry in subject.plan.low_bit()
        if sensitive(entry.name) and entry.family not in allowed
    ]


def _trainable(subject: Subject) -> list[str]:
    """Under an adapter the base is frozen: its GEMMs have no weight gradient that a scheme could be for."""
    contract = subject.contract
    if contract.adapter is None:
        return []
    wgrad = contract.trainer.wgrad
    named = [side for side in (wgrad.left, wgrad.right) if side != "original"]
    return [f"trainer.wgrad reads {side}, and the base is frozen" for side in named]


def _staleness(subject: Subject) -> list[str]:
    contract, schedule = subject.contract, subject.spec.schedule
    wrong = []
    if contract.max_lag is not None and schedule.max_lag > contract.max_lag:
        wrong.append(f"schedule.max_lag {schedule.max_lag} is over the contract's {contract.max_lag}")
    if contract.in_flight is not None and schedule.in_flight != contract.in_flight:
        wrong.append(
            f"schedule.in_flight {schedule.in_flight!r} is not the contract's {contract.in_flight!r}"
        )
    return wrong


def _baseline(contract: PrecisionContract) -> list[str]:
    """A gap that nobody expects cannot be told from a fault."""
    if contract.families and contract.expected.high is None:
        return [f"{contract.name} quantises and says nothing of the gap to expect (expected.high)"]
    return []
