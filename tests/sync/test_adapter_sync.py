"""Versions of an adapter over a frozen base: carried over, converted, complete, kept, or refused by name."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from exports import CANARY, CONFIG, weights, write
from msgspec.structs import replace
from scripted import KEY, Installation, ScriptedWorker
from waiting import wait_until

from syncline.contract.job import JobSpec
from syncline.contract.streams import JOB, MINTED
from syncline.contract.version_path import (
    Minted,
    SignedManifest,
    VersionId,
    VersionManifest,
    VersionRecord,
    sign,
)
from syncline.runtime.store import BlobStore
from syncline.sync.publish import PLAN_FILE, Publisher, Unpublishable

Arrays = dict[str, np.ndarray[Any, Any] | tuple[str, np.ndarray[Any, Any]]]
CUSTOM: dict[str, Any] = {
    "name": "adapter_under_test",
    "families": [{"name": "mlp", "match": ["*.mlp.weight"], "weight": "int4_g32"}],
    "adapter": {"rank": 2, "alpha": 4.0, "targets": ["*.mlp.weight"]},
}
SPEC = JobSpec.model_validate(
    {
        "name": "t",
        "model": {"name": "tiny"},
        "precision": {"custom": CUSTOM},
        "retention": {"versions": 2},
        "limits": {"activation_wait": 60.0},
    }
)
CONTRACT = SPEC.contract()
DOWN, UP = "model.layers.0.mlp.lora_A.weight", "model.layers.0.mlp.lora_B.weight"


def adapter(seed: int) -> Arrays:
    rng = np.random.default_rng(seed)
    return {DOWN: rng.standard_normal((2, 32)).astype("<f4"), UP: rng.standard_normal((4, 2)).astype("<f4")}


def base() -> Arrays:
    rng = np.random.default_rng(1)
    return {**weights(1), "model.layers.0.mlp.weight": rng.standard_normal((4, 32)).astype("<f4")}


def mint(job: str, run: Path, number: int, tensors: Arrays, on: int | None, config: Any = CONFIG) -> Minted:
    version = VersionId(0, number)
    return Minted(
        job=job,
        version=version,
        parent=None,
        optimizer_step=number,
        contract=CONTRACT.digest(),
        artefact=f"export/{version}",
        files=write(run / "export" / str(version), dict(tensors), config),
        canaries=(CANARY,),
        traceparent=f"00-{number + 1:032x}-{1:016x}-01",
        minted_at=1.0,
        base=None if on is None else VersionId(0, on),
    )


class Place:
    """A publisher over a run folder, without processes."""

    def __init__(self, run: Path) -> None:
        self.run = run
        self.store = BlobStore(run / "store")
        self.publisher = Publisher("j", run, KEY, CONTRACT, self.store)
        self.record = VersionRecord(
            version=VersionId(0, 0), parent=None, optimizer_step=0, contract="", state="minted"
        )

    def publish(
        self, number: int, tensors: Arrays, on: int | None = None, config: Any = CONFIG
    ) -> VersionManifest:
        return self.publisher.publish(mint("j", self.run, number, tensors, on, config), self.record)


@pytest.fixture
def place(tmp_path: Path) -> Place:
    made = Place(tmp_path)
    made.publish(0, base() | adapter(0))
    return made


def test_a_base_is_carried_over_by_digest_and_the_adapter_converted_to_bf16(place: Place) -> None:
    whole = place.publisher.published(mint("j", place.run, 0, base() | adapter(0), None))
    assert whole is not None
    alone = place.publish(1, adapter(1), on=0)
    assert [t.name for t in alone.tensors] == [t.name for t in whole.tensors]
    assert [t.name for t in alone.tensors] == sorted(t.name for t in alone.tensors)
    moved = {a.name for a, b in zip(alone.tensors, whole.tensors, strict=True) if a != b}
    assert moved == {DOWN, UP}
    assert {t.name: (t.dtype, t.shape) for t in alone.tensors if t.name in moved} == {
        DOWN: ("BF16", (2, 32)),
        UP: ("BF16", (4, 2)),
    }
    assert (alone.representation, alone.plan) == ("int4+lora", whole.plan)
    assert place.record.new_bytes == 2 * (2 * 32 + 4 * 2)
    assert place.record.nbytes == alone.nbytes()
    trace = place.record.convert_trace
    assert trace is not None
    assert {use.family for use in trace.uses} == {"adapter"}
    assert trace.bytes == {"artefact": place.record.new_bytes, "adapter": place.record.new_bytes}


def test_it_equals_a_whole_export_of_the_same_weights(place: Place) -> None:
    alone = place.publish(1, adapter(5), on=0)
    whole = place.publish(2, base() | adapter(5))
    assert alone.tensors == whole.tensors
    assert (alone.ties, alone.padding, alone.plan) == (whole.ties, whole.padding, whole.plan)


def test_a_later_version_may_build_on_one_that_was_carried_over_itself(place: Place) -> None:
    place.publish(1, adapter(1), on=0)
    third = place.publish(2, adapter(2), on=1)
    assert len(third.tensors) == len(place.publish(3, base() | adapter(2)).tensors)


@pytest.mark.parametrize(
    ("tensors", "says"),
    [
        ({DOWN: adapter(1)[DOWN]}, f"adapter tensor {UP} is missing"),
        (
            adapter(1) | {DOWN.replace("mlp", "attn"): np.zeros((2, 32), "<f4")},
            "attn.lora_A.weight is not one of",
        ),
        (adapter(1) | {UP: np.zeros((4, 3), "<f4")}, rf"{UP} has shape \[4, 3\], the contract says \[4, 2\]"),
        (adapter(1) | {UP: np.full((4, 2), np.nan, "<f4")}, rf"{UP}.*0"),
        (
            adapter(1) | {"lm_head.weight": weights(1)["lm_head.weight"]},
            "lm_head.weight is not one of the adapter's",
        ),
    ],
    ids=["missing", "extra", "shape", "nan", "base tensor"],
)
def test_an_adapter_that_is_not_the_contracts_is_refused_by_name(
    place: Place, tensors: Arrays, says: str
) -> None:
    with pytest.raises(Unpublishable, match=says):
        place.publish(1, tensors, on=0)
    assert place.store.manifests() == [VersionId(0, 0)]


@pytest.mark.parametrize("gone", [DOWN, UP])
def test_a_whole_export_without_an_adapter_tensor_is_refused(tmp_path: Path, gone: str) -> None:
    tensors = base() | adapter(0)
    del tensors[gone]
    with pytest.raises(Unpublishable, match=f"adapter tensor {gone} is missing"):
        Place(tmp_path).publish(0, tensors)


def test_a_base_that_does_not_fit_is_refused(place: Place) -> None:
    with pytest.raises(Unpublishable, match=r"its base 0\.7 was never published"):
        place.publish(8, adapter(1), on=7)
    with pytest.raises(Unpublishable, match=r"base 0\.0 is of model"):
        place.publish(2, adapter(1), on=0, config={**CONFIG, "hidden_size": 5})
    (place.run / PLAN_FILE).write_bytes((place.run / PLAN_FILE).read_bytes().replace(b"int4", b"int8"))
    with pytest.raises(Unpublishable, match=PLAN_FILE):
        place.publish(3, adapter(1), on=0)


def test_a_base_that_another_key_signed_is_refused(place: Place) -> None:
    """A manifest that somebody put into the store: its tensors would serve as the base."""
    opened = place.publisher.published(mint("j", place.run, 0, base() | adapter(0), None))
    assert opened is not None
    foreign: SignedManifest = sign(replace(opened, version=VersionId(0, 5)), b"another key")
    place.store.write_manifest(foreign)
    with pytest.raises(Unpublishable, match="signature does not match"):
        place.publish(6, adapter(1), on=5)


def test_a_job_without_an_adapter_takes_no_base(tmp_path: Path) -> None:
    place = Place(tmp_path)
    plain = replace(CONTRACT, adapter=None)
    place.publisher = Publisher("j", tmp_path, KEY, plain, place.store)
    first = replace(mint("j", tmp_path, 0, base(), None), contract=plain.digest())
    place.publisher.publish(first, place.record)
    second = replace(mint("j", tmp_path, 1, base(), 0), contract=plain.digest())
    with pytest.raises(Unpublishable, match="contract has no adapter"):
        place.publisher.publish(second, place.record)


@pytest.fixture
def installed(redis_url: str, job: str, tmp_path: Path) -> Iterator[Installation]:
    place = Installation(redis_url, job, tmp_path)
    place.bus.hset(JOB.at(job), "spec", SPEC.canonical())
    yield place
    place.stop()


def test_retention_keeps_what_a_served_version_builds_on_across_a_restart(installed: Installation) -> None:
    """Two versions are retained; the base was minted five versions ago and every one of them names it."""
    place = installed
    place.phase("colocated", "awake")
    place.start()
    worker = ScriptedWorker(place, "w0").start()

    def settle(number: int, tensors: Arrays, on: int | None) -> None:
        place.bus.append(MINTED.at(place.job), mint(place.job, place.run, number, tensors, on))
        wait_until(lambda: worker.active == VersionId(0, number), 60, f"version {number} on the worker")

    settle(0, base() | adapter(0), None)
    for number in range(1, 4):
        settle(number, adapter(number), 0)
    wait_until(lambda: place.state_of(VersionId(0, 1)) == "retired", 30, "retirement of 0.1")
    place.kill()
    place.start()
    settle(4, adapter(4), 0)
    wait_until(lambda: place.state_of(VersionId(0, 2)) == "retired", 30, "retirement of 0.2")
    assert place.store.manifests() == [VersionId(0, n) for n in (0, 3, 4)]
    assert place.state_of(VersionId(0, 0)) == "active"
    settle(5, base() | adapter(5), None)
    settle(6, adapter(6), 5)
    wait_until(lambda: place.state_of(VersionId(0, 0)) == "retired", 30, "retirement of the first base")
    assert worker.errors == []
