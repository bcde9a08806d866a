"""Precision at the door: contracts against headers, the plan before and after sync, the trace of components."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from left_behind import metrics
from safetensors.numpy import save_file
from serving import SPEC, Server, problem

from syncline.contract.plan import PrecisionPlan, resolve
from syncline.contract.precision_trace import ComponentTrace, Use
from syncline.contract.recipes import RECIPES
from syncline.contract.streams import METRICS, VERSIONS
from syncline.contract.version_path import VersionId, VersionRecord
from syncline.gateway.precision_plan import header_shapes

SHAPES = {
    "model.embed_tokens.weight": (16, 64),
    "model.layers.0.self_attn.q_proj.weight": (64, 64),
    "model.layers.1.self_attn.q_proj.weight": (64, 64),
    "model.layers.0.mlp.gate.weight": (4, 64),
    "model.norm.weight": (64,),
}
INT4 = {"name": "linear", "match": ["*_proj.weight"], "weight": "int4_g32"}


@pytest.fixture
def weighted(another: Callable[..., Server], tmp_path: Path) -> Server:
    """A gateway whose model `tiny` has weights, in two files."""
    folder = tmp_path / "models" / "tiny"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text('{"model_type": "qwen3_moe"}')
    names = sorted(SHAPES)
    for i, part in enumerate((names[:2], names[2:])):
        save_file({n: np.zeros(SHAPES[n], np.float32) for n in part}, folder / f"model-{i}.safetensors")
    return another(models=tmp_path / "models", runs=tmp_path / "runs")


def custom(**keys: Any) -> dict[str, Any]:
    return {"precision": {"custom": {"name": "mine", "families": [{**INT4, **keys}]}}}


def refused(server: Server, changes: dict[str, Any]) -> dict[str, str]:
    body = problem(server.http.post("/v1/jobs", json={**SPEC, **changes}), 422)
    return {error["path"]: error["message"] for error in body["errors"]}


def test_headers_are_read_without_their_tensors(weighted: Server) -> None:
    assert header_shapes(weighted.settings.models / "tiny") == SHAPES


def test_hardware_that_the_engines_do_not_run_on_is_refused(weighted: Server) -> None:
    changes = {"device": {"hardware": "hopper"}, "precision": {"recipe": "unified_fp8", "emulation": False}}
    told = refused(weighted, changes)
    assert list(told) == ["device.hardware"]
    assert "'hopper', and the engines of this installation run on the CPU" in told["device.hardware"]


def test_replay_without_routers_is_refused(weighted: Server) -> None:
    (weighted.settings.models / "tiny" / "config.json").write_text('{"model_type": "qwen3"}')
    told = refused(weighted, {"trainer": {"router_replay": True}})
    assert told == {"trainer.router_replay": "model 'tiny' has no routers: there is nothing to replay"}


def test_a_contract_that_fits_is_resolved_at_submit(weighted: Server) -> None:
    job = weighted.http.post("/v1/jobs", json={**SPEC, **custom()}).json()
    told = job["precision"]
    assert (told["contract"], told["plan"], told["low_bit"]) == ("mine", "resolved", 2)
    assert told["runs"] == "emulation"
    assert told["emulations"] == ["codes decoded before an FP32 GEMM"]
    found = weighted.http.get(f"/v1/jobs/{job['id']}/precision").json()
    assert found["plan_digest"] == told["plan_digest"]
    groups = {g["name"]: (g["tensors"], g["format"], g["reason"]) for g in found["groups"]}
    assert groups["model.layers.*.self_attn.q_proj.weight"][:2] == (2, "int4")
    assert groups["model.layers.*.mlp.gate.weight"] == (1, "", "wide: router")


@pytest.mark.parametrize(
    ("changes", "path"),
    [
        (custom(match=["*_proj.weight", "*.w1.weight"]), "precision.custom.families.0.match.1"),
        (custom(keep=["*.w1.weight"]), "precision.custom.families.0.keep.0"),
        (custom(weight="int4_g128"), "precision.custom.families.0.weight"),
        ({"precision": {"recipe": "nvfp4_selective"}}, "precision.recipe"),
        (
            {
                "precision": {
                    "custom": {"name": "m", "adapter": {"rank": 1, "alpha": 1, "targets": ["*.x.weight"]}}
                }
            },
            "precision.custom.adapter.targets.0",
        ),
    ],
)
def test_a_contract_that_does_not_fit_is_refused_with_its_key(
    weighted: Server, changes: dict[str, Any], path: str
) -> None:
    assert path in refused(weighted, changes)


def test_a_file_without_a_header_is_named(weighted: Server) -> None:
    (weighted.settings.models / "tiny" / "z.safetensors").write_bytes(b"\xff" * 64)
    assert "z.safetensors" in refused(weighted, custom())["model.name"]


def test_a_job_may_ask_for_native_kernels_alone(server: Server) -> None:
    told = refused(server, {"precision": {"recipe": "unified_fp8", "emulation": False}})
    assert "FP32 partial sums" in told["precision.emulation"]
    taken = server.submit(precision={"recipe": "bf16", "emulation": False})
    assert server.http.get(f"/v1/jobs/{taken}").json()["precision"]["runs"] == "native"


def test_without_weights_the_plan_is_validating_until_sync_has_resolved_it(server: Server) -> None:
    job = server.submit(precision={"recipe": "int4_qat_w4a16"})
    assert server.http.get(f"/v1/jobs/{job}").json()["precision"]["plan"] == "validating"
    empty = server.http.get(f"/v1/jobs/{job}/precision").json()
    assert (empty["plan"], empty["plan_digest"], empty["groups"], empty["trace"]) == (
        "validating",
        None,
        [],
        [],
    )
    plan = resolve(RECIPES["int4_qat_w4a16"], SHAPES)
    write_plan(server, job, plan)
    told = server.http.get(f"/v1/jobs/{job}").json()["precision"]
    assert (told["plan"], told["plan_digest"], told["low_bit"]) == ("resolved", plan.digest(), 2)


def test_a_job_that_ended_without_a_plan_says_so(server: Server) -> None:
    job = server.submit()
    server.set_state(job, "failed")
    assert server.http.get(f"/v1/jobs/{job}").json()["precision"]["plan"] == "unresolved"


def test_the_plan_is_read_in_pages(server: Server) -> None:
    job = server.submit()
    plan = resolve(RECIPES["bf16"], SHAPES)
    write_plan(server, job, plan)
    seen: list[str] = []
    after = ""
    while True:
        page = server.http.get(f"/v1/jobs/{job}/precision/tensors?limit=2{after}").json()
        seen += [entry["name"] for entry in page["items"]]
        if page["next"] is None:
            break
        after = f"&after={page['next']}"
    assert seen == sorted(SHAPES)
    problem(server.http.get(f"/v1/jobs/{job}/precision/tensors?after=nothing"), 422)


def test_a_plan_that_cannot_be_read_is_an_error_and_no_plan(server: Server) -> None:
    job = server.submit()
    folder = server.settings.job_dir(job)
    folder.mkdir(parents=True)
    (folder / "precision_plan.json").write_text("{}")
    assert "precision_plan.json" in problem(server.http.get(f"/v1/jobs/{job}/precision"), 500)["detail"]


def test_the_trace_joins_an_update_with_the_version_that_it_started_from(server: Server) -> None:
    job = server.submit()
    parts = {name: part(name) for name in ("fprop", "dgrad", "wgrad", "optimizer")}
    made = msgspec.structs.replace(metrics(8), trace=tuple(parts.values()))
    server.bus.append(METRICS.at(job), made)
    for number, label in ((7, "of 7"), (8, "of 8")):
        record = VersionRecord(
            version=VersionId(0, number),
            parent=None,
            optimizer_step=number,
            contract="c",
            state="active",
            rollout_trace=part("rollout", label),
            convert_trace=part("convert", label),
        )
        server.bus.hset(VERSIONS.at(job), f"0.{number}", msgspec.json.encode(record))
    found = server.http.get(f"/v1/jobs/{job}/precision").json()
    assert found["traced_update"] == 8
    told = {c["component"]: c["uses"][0]["encoded"] for c in found["trace"]}
    assert list(told) == ["rollout", "fprop", "dgrad", "wgrad", "optimizer", "convert"]
    assert (told["rollout"], told["convert"], told["fprop"]) == ("of 7", "of 7", "bf16 values")


def test_recipes_are_shown_whole(server: Server) -> None:
    items = server.http.get("/v1/recipes").json()["items"]
    assert items.keys() == RECIPES.keys()
    assert msgspec.convert(items["nvfp4_w4a4"], type(RECIPES["bf16"])) == RECIPES["nvfp4_w4a4"]


def write_plan(server: Server, job: str, plan: PrecisionPlan) -> None:
    """What sync does."""
    folder = server.settings.job_dir(job)
    folder.mkdir(parents=True)
    (folder / "precision_plan.json").write_bytes(msgspec.json.format(msgspec.json.encode(plan), indent=1))


def part(component: Any, encoded: str = "bf16 values") -> ComponentTrace:
    use = Use(
        family="",
        tensors=1,
        encoded=encoded,
        operands="original",
        kernel="wide fp32",
        persistent="bf16 values",
    )
    return ComponentTrace(component=component, uses=(use,))
