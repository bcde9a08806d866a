"""A whole job of K3's recipe whose trainer is killed: the base stands still over epochs, the adapter alone moves."""

from __future__ import annotations

import pytest
from guarantees import check, segment_files
from safetensors.torch import load_file
from specs import spec
from stack import Stack

from syncline.contract.adapters import is_adapter
from syncline.contract.version_path import opened
from syncline.runtime import segments
from syncline.runtime.store import BlobStore


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_only_the_adapter_moves_over_a_killed_trainer(stack: Stack) -> None:
    updates = 6
    job = stack.submit(
        spec(
            model={"name": "tiny-kimi"},
            precision={"recipe": "lora_frozen_mxfp4"},
            loss={"kl": {"coefficient": 0.01}},
            schedule={"mode": "colocated", "updates": updates, "in_flight": "drain"},
            checkpoint={"every": 2},
            retention={"versions": 3},
        )
    )
    stack.wait_update(job, 3, 200)
    stack.kill("trainer")
    assert stack.wait(job, 300)["state"] == "succeeded"
    run = stack.runs / job
    check(run, stack.summary(job), updates, max_lag=1)

    store = BlobStore(run / "store")
    key = (run / "key").read_bytes()
    manifests = {v: opened(store.read_manifest(v), key) for v in store.manifests()}
    assert {v.epoch for v in manifests} == {1} or {v.epoch for v in manifests} == {0, 1}
    bases = [{t.name: t.digest for t in m.tensors if not is_adapter(t.name)} for m in manifests.values()]
    assert all(base == bases[0] for base in bases)
    adapters = [{t.name: t.digest for t in m.tensors if is_adapter(t.name)} for m in manifests.values()]
    assert len({tuple(sorted(a.items())) for a in adapters}) == len(adapters)
    assert len(adapters[0]) == 28

    shown = {v["version"]: v for v in stack.get(f"/v1/jobs/{job}/versions")["items"]}
    alone = [v["new_bytes"] for v in shown.values() if v["new_bytes"]]
    assert alone.count(max(alone)) == 1, "a base that was stored is stored again"
    assert sorted(alone)[-2] <= 2 * sum(
        t.nbytes for t in manifests[max(manifests)].tensors if is_adapter(t.name)
    )

    for path in segment_files(run):
        for row in segments.read(path).rows:
            (span,) = row.trajectory.spans
            assert span.adapter == f"lora_frozen_mxfp4@{span.version}"
    saved = load_file(run / "checkpoints" / f"update-{updates:06d}" / "weights.safetensors")
    names = {name.removeprefix("parameter.") for name in saved} - {"base.sha256"}
    assert names
    assert all(name.endswith((".lora_A", ".lora_B")) for name in names)
