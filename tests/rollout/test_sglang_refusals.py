"""What an SGLang server cannot do is refused before it starts, by the key that asks for it."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
import torch
from conformance.forge import MODELS
from msgspec.structs import replace

from syncline.contract.compile import CannotCompile
from syncline.contract.job import JobSpec, ModelSpec
from syncline.contract.precision import Adapter, Convert, PrecisionContract
from syncline.contract.recipes import RECIPES
from syncline.contract.sglang_rules import problems
from syncline.gateway import server_fit
from syncline.rollout.engines.sglang.fused import FusedModel
from syncline.rollout.engines.sglang.groups import aligned, flattened
from syncline.rollout.engines.sglang.hashes import checksum
from syncline.rollout.engines.sglang.model import Model

LORA = replace(
    RECIPES["bf16"],
    name="lora_test",
    adapter=Adapter(targets=("model.layers.*.self_attn.*_proj.weight",), rank=4, alpha=8.0),
)
EXPERTS = replace(
    LORA, adapter=Adapter(targets=("model.layers.*.experts.*.down_proj.weight",), rank=4, alpha=8.0)
)


def spec_of(server: dict[str, Any] | None = None, hardware: str = "cpu", **keys: Any) -> JobSpec:
    base: dict[str, Any] = {"name": "t", "model": {"name": "tiny-moe"}, "device": {"hardware": hardware}}
    base |= {"schedule": {"in_flight": "drain"}}
    rollout = {"engine": "sglang", "sglang": server or {}}
    return JobSpec.model_validate_json(json.dumps({**base, "rollout": rollout, **keys}))


@pytest.mark.parametrize(
    ("spec", "path", "says"),
    [
        (spec_of({"tp": 2}), "rollout.sglang.tp", "one process"),
        (spec_of({"update": "group"}, "hopper"), "rollout.sglang.update", "over gloo"),
        (
            spec_of(rollout={"engine": "reference", "sglang": {"update": "buckets"}}),
            "rollout.sglang",
            "no meaning",
        ),
    ],
)
def test_keys_of_the_server_are_refused_where_they_mean_nothing(spec: JobSpec, path: str, says: str) -> None:
    (problem,) = problems(spec)
    assert problem.path == path
    assert says in problem.message


def test_what_the_server_can_do_is_not_refused() -> None:
    for update in ("disk", "buckets", "group"):
        assert not list(problems(spec_of({"update": update})))
    assert not list(problems(spec_of({"tp": 2}, "hopper")))


def custom(contract: PrecisionContract) -> dict[str, Any]:
    return {"precision": {"custom": json.loads(msgspec.json.encode(contract))}}


@pytest.mark.parametrize(
    ("contract", "model", "refused"),
    [(EXPERTS, "tiny-moe", True), (LORA, "tiny-moe", False), (EXPERTS, "tiny-dense", False)],
)
def test_adapters_on_experts_are_refused_at_the_door(
    contract: PrecisionContract, model: str, refused: bool
) -> None:
    found = server_fit.problems(MODELS, spec_of(model={"name": model}, **custom(contract)))
    assert [problem.path for problem in found] == ["precision.custom.adapter.targets.0"] * refused
    assert all("Triton kernels alone" in problem.message for problem in found)


def test_models_and_routes_that_the_server_has_nothing_for_are_refused_at_the_door() -> None:
    (problem,) = server_fit.problems(MODELS, spec_of(model={"name": "tiny-hybrid"}))
    assert problem.path == "model.name"
    assert "linear attention" in problem.message
    bridge = replace(RECIPES["mxfp8"], name="bridge", convert=Convert(route="bf16_bridge"))
    (problem,) = server_fit.problems(MODELS, spec_of(**custom(bridge)))
    assert problem.path == "precision.custom.convert.route"


# ---- behind the door
def model_of(contract: PrecisionContract, tp: int = 1, hardware: Any = "cpu") -> Model:
    return Model(MODELS, ModelSpec(name="tiny-moe"), contract, hardware, 8, tp)


def test_the_launch_plan_refuses_them_too() -> None:
    with pytest.raises(CannotCompile, match=r"adapter\.targets.*model\.layers\.0.*Triton"):
        model_of(EXPERTS)
    with pytest.raises(CannotCompile, match=r"rollout\.sglang\.tp.*one process"):
        model_of(RECIPES["bf16"], tp=2)


def test_ranks_are_asked_for_where_there_are_gpus() -> None:
    plan = model_of(RECIPES["bf16"], 2, "hopper").launch
    assert plan.arguments[plan.arguments.index("--tp-size") + 1] == "2"
    assert plan.tp == 2
    assert "--tp-size" not in model_of(RECIPES["bf16"], 1, "hopper").launch.arguments


def test_mxfp8_experts_lie_gate_first_on_cpu() -> None:
    plan = model_of(RECIPES["mxfp8"]).launch
    assert plan.arguments[plan.arguments.index("--moe-runner-backend") + 1] == "triton"
    assert "--moe-runner-backend" not in model_of(RECIPES["mxfp8"], hardware="blackwell").launch.arguments


# ---- ranks and buckets, without a server
def test_each_rank_reads_back_its_own_part() -> None:
    one, two = (model_of(RECIPES["bf16"], tp, "hopper") for tp in (1, 2))
    shapes = {name: window.shape for name, window in one.expected.state.windows.items()}
    read = {name: torch.randn(shape, generator=torch.Generator().manual_seed(n)) for n, (name, shape) in
            enumerate(sorted(shapes.items()))}  # fmt: skip
    whole = FusedModel(one.config, shapes, one.expected.plan, torch.float32).checksums(read.__getitem__)
    parts = FusedModel(two.config, shapes, two.expected.plan, torch.float32, 2).checksums(read.__getitem__)
    assert parts.keys() == {f"{name} on tp rank {rank}" for name in whole for rank in (0, 1)}
    down = "model.layers.0.self_attn.o_proj.weight"
    width = shapes[down][1] // 2
    for rank in (0, 1):
        due = checksum(read[down][:, rank * width : (rank + 1) * width].contiguous())
        assert parts[f"{down} on tp rank {rank}"] == due
        assert parts[f"model.norm.weight on tp rank {rank}"] == whole["model.norm.weight"]


def test_a_broadcast_bucket_has_every_tensor_at_a_multiple_of_its_size() -> None:
    tensors = {
        "a": torch.ones(3, dtype=torch.uint8),
        "b": torch.arange(6, dtype=torch.bfloat16).reshape(2, 3),
        "c": torch.ones(3, dtype=torch.float32),
        "d": torch.ones(5).to(torch.float8_e4m3fn),
    }
    at = 0
    for tensor in aligned(tensors).values():
        assert at % tensor.dtype.itemsize == 0
        at += tensor.nbytes
    flat = flattened(aligned(tensors))
    assert (flat.dtype, flat.numel()) == (torch.uint8, at)
    assert torch.equal(flat[:12].view(torch.float32), tensors["c"])
