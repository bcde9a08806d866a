"""Whole jobs over REST: the reference rollout, and a Megatron trainer of two ranks that replays recorded routes."""

from __future__ import annotations

import pytest
from guarantees import check
from safetensors.torch import load_file
from specs import spec
from stack import Stack

from syncline.contract.adapters import is_adapter
from syncline.contract.version_path import opened
from syncline.runtime.store import BlobStore

pytest.importorskip("megatron.core", reason="the extra `megatron` is not installed")


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("parallel", [{"tp": 2}, {"dp": 2, "ep": 2}], ids=["tp2", "ep2"])
@pytest.mark.parametrize("mode", ["colocated", "disjoint"])
def test_a_job_trains_on_two_ranks_and_its_trainer_may_die(
    stack: Stack, parallel: dict[str, int], mode: str
) -> None:
    updates = 6
    job = stack.submit(
        spec(
            model={"name": "tiny-moe"},
            optimizer={"lr": 3e-4},
            schedule={"mode": mode, "updates": updates, "max_lag": 2},
            checkpoint={"every": 2},
            trainer={"engine": "megatron", "parallel": parallel, "router_replay": True},
        )
    )
    stack.wait_update(job, 3, 200)
    stack.kill("trainer")
    assert stack.wait(job, 300)["state"] == "succeeded"
    check(stack.runs / job, stack.summary(job), updates, max_lag=2)
    metrics = stack.get(f"/v1/jobs/{job}/metrics")["items"]
    assert len(metrics) == updates
    for update in metrics:
        if update["lag_max"] == 0:
            assert min(update["route_agreement"]) >= 0.999, "both sides hold one version"


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_over_ranks_only_the_adapter_moves_and_the_base_stays_to_the_byte(stack: Stack) -> None:
    """K3's way on a model that Megatron builds: experts frozen as MXFP4 codes in rollout, as BF16 in the trainer, and
    an adapter on attention that two ranks train, with layers that run again. The trainer is killed on the way.
    """
    updates = 4
    custom = {
        "name": "k3_tiny",
        "families": [{"name": "experts", "match": ["*.mlp.experts.*_proj.weight"], "weight": "mxfp4"}],
        "adapter": {"rank": 4, "alpha": 8.0, "targets": ["*.self_attn.[qkvo]_proj.weight"]},
        "in_flight": "drain",
    }
    job = stack.submit(
        spec(
            model={"name": "tiny-moe"},
            precision={"custom": custom},
            loss={"kl": {"coefficient": 0.01}},
            schedule={"mode": "colocated", "updates": updates, "in_flight": "drain"},
            checkpoint={"every": 2},
            retention={"versions": 10},
            trainer={"engine": "megatron", "parallel": {"tp": 2}, "recompute": "layers"},
        )
    )
    stack.wait_update(job, 2, 200)
    stack.kill("trainer")
    assert stack.wait(job, 300)["state"] == "succeeded"
    run = stack.runs / job
    check(run, stack.summary(job), updates, max_lag=1)
    store, key = BlobStore(run / "store"), (run / "key").read_bytes()
    manifests = [opened(store.read_manifest(v), key) for v in store.manifests()]
    assert len(manifests) >= updates
    bases = [{t.name: t.digest for t in m.tensors if not is_adapter(t.name)} for m in manifests]
    assert all(base == bases[0] for base in bases)
    adapters = [tuple(sorted((t.name, t.digest) for t in m.tensors if is_adapter(t.name))) for m in manifests]
    assert len(set(adapters)) > 1, "it moves, in updates whose rewards differ"
    assert {len(adapter) for adapter in adapters} == {16}
    saved = [load_file(f) for f in (run / "checkpoints" / f"update-{updates:06d}").glob("rank-*.safetensors")]
    names = {n for tensors in saved for n in tensors if n.startswith("parameter.")}
    assert len(names) == 16
    assert all(is_adapter(name) for name in names)
