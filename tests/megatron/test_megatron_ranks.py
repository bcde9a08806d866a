"""Several ranks: exports to the byte, one SGD step as the torch engine's, resume elsewhere, a dead rank named."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from conformance.trainer_engine import MODELS, distance, samples, spec_of, widest
from safetensors.torch import save_file

pytest.importorskip("megatron.core", reason="the extra `megatron` is not installed")

from ranked import FP32, TOPOLOGIES, end_followers, exported, same_bytes, saved, saved_by_torch, spec

from syncline.contract.job import ModelSpec
from syncline.reference.model import export_state, load_model
from syncline.trainer.engines.megatron.engine import MegatronEngine
from syncline.trainer.engines.megatron.families import UnknownFamily
from syncline.trainer.engines.megatron.precision import check_contract
from syncline.trainer.engines.megatron.topology import RefusedTopology
from syncline.trainer.engines.torch import TorchEngine


@pytest.fixture(autouse=True, scope="module")
def no_followers_left() -> Iterator[None]:
    yield
    end_followers()


def fitting(topology: str, model: str) -> dict[str, int]:
    if model == "tiny-dense" and "ep2" in topology:
        pytest.skip("the model has no experts: refused by name, as the test of refusals asserts")
    return TOPOLOGIES[topology]


@pytest.mark.parametrize("topology", TOPOLOGIES, scope="module")
@pytest.mark.parametrize("model", ["tiny-moe", "tiny-dense"])
def test_exports_losses_and_one_sgd_step_are_those_of_torch(
    topology: str, model: str, tmp_path: Path
) -> None:
    parallel = fitting(topology, model)
    narrow, plain = MegatronEngine(spec(parallel, model), MODELS, tmp_path / "n"), spec_of(model)
    narrow.wake()
    other = TorchEngine(plain, MODELS, tmp_path / "o")
    other.wake()
    assert same_bytes(exported(narrow, tmp_path / "n0"), exported(other, tmp_path / "o0"))
    one = MegatronEngine(spec(parallel, model, **FP32), MODELS, tmp_path / "m")
    two = TorchEngine(spec_of(model, **FP32), MODELS, tmp_path / "t")
    one.wake()
    two.wake()
    start = exported(two, tmp_path / "t0")
    mine, theirs = one.step(samples(), 1), two.step(samples(), 1)
    assert widest(mine.logprobs, theirs.logprobs) < 1e-5
    assert mine.loss == pytest.approx(theirs.loss, abs=1e-5)
    assert mine.grad_norm == pytest.approx(theirs.grad_norm, rel=1e-5)
    left, right = exported(one, tmp_path / "m1"), exported(two, tmp_path / "t1")
    assert distance(right, start) > 1e-3
    assert distance(left, right) < 1e-6


@pytest.mark.parametrize("kind", ["gspo", "cispo", "decoupled_ppo"])
@pytest.mark.parametrize("model", ["tiny-moe", "tiny-dense"])
def test_every_loss_has_the_torch_engines_gradient(kind: str, model: str, tmp_path: Path) -> None:
    """PPO is in the tests around; with KL, entropy and a correction each adds its own term."""
    parts: dict[str, Any] = {
        "loss": {
            "kind": kind,
            "entropy": 0.01,
            "kl": {"coefficient": 0.1},
            "correction": {"kind": "truncate"},
        },
        **FP32,
    }
    one = MegatronEngine(spec({"tp": 2}, model, **parts), MODELS, tmp_path / "m")
    two = TorchEngine(spec_of(model, **parts), MODELS, tmp_path / "t")
    one.wake()
    two.wake()
    for update in (1, 2):  # the reference policy is another one from the second on
        mine, theirs = one.step(samples(seed=update), update), two.step(samples(seed=update), update)
        assert mine.loss == pytest.approx(theirs.loss, abs=1e-5)
        assert mine.grad_norm == pytest.approx(theirs.grad_norm, rel=1e-5)
    # the learning rate is 0.1: gradients of two steps agree to 1e-5
    assert distance(exported(one, tmp_path / "m1"), exported(two, tmp_path / "t1")) < 1e-6


@pytest.mark.parametrize("topology", TOPOLOGIES, scope="module")
@pytest.mark.parametrize("model", ["tiny-moe", "tiny-dense"])
def test_under_adam_gradients_are_those_of_torch(topology: str, model: str, tmp_path: Path) -> None:
    """Adam divides by what is nearly zero, so weights say little: its first moment is the gradient, times 0.1."""
    parts: dict[str, Any] = {"optimizer": {"name": "adamw", "lr": 1e-3}, **FP32}
    one = MegatronEngine(spec(fitting(topology, model), model, **parts), MODELS, tmp_path / "m")
    two = TorchEngine(spec_of(model, **parts), MODELS, tmp_path / "t")
    one.wake()
    two.wake()
    one.step(samples(), 1)
    two.step(samples(), 1)
    (tmp_path / "saved").mkdir()
    one.save(tmp_path / "saved")
    for field, power in (("exp_avg", 1), ("exp_avg_sq", 2)):
        mine, theirs = saved(tmp_path / "saved", field), saved_by_torch(two, field)
        largest = max(float(t.abs().max()) for t in theirs.values())
        assert largest > 1e-4**power
        assert distance(mine, theirs) < 1e-5 * largest


LATENT = {
    "model_type": "deepseek_v3",
    "architectures": ["DeepseekV3ForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "max_position_embeddings": 1024,
    "initializer_range": 0.06,
    "tie_word_embeddings": False,
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 24,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "num_hidden_layers": 4,
    "first_k_dense_replace": 1,
    "intermediate_size": 128,
    "moe_intermediate_size": 32,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 2.5,
    "norm_topk_prob": True,
}


def latent_models(root: Path, **changed: Any) -> Path:
    """A model root with one tiny DeepseekV3."""
    folder = root / "models" / "tiny-latent"
    folder.mkdir(parents=True)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(MODELS / "tiny-moe" / name, folder / name)
    (folder / "config.json").write_text(json.dumps(LATENT | changed))
    return folder.parent


def biased(models: Path) -> None:
    """Weights for the tiny DeepseekV3 whose routers' bias decides: a fresh one's is zero."""
    loaded = load_model(models, ModelSpec(name="tiny-latent"), 0)
    generator = torch.Generator().manual_seed(5)
    full = {name: tensor.clone() for name, tensor in export_state(loaded.model, loaded.plan)}
    biases = [name for name in full if name.endswith("e_score_correction_bias")]
    assert len(biases) == 3
    for name in biases:
        full[name] = torch.randn(full[name].shape, generator=generator)
    save_file(full, models / "tiny-latent" / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize("topology", ["tp1", "ep2", "pp2"], scope="module")
@pytest.mark.parametrize("recipe", ["fp32", "bf16"])
def test_latent_attention_scores_and_steps_as_transformers_does(
    topology: str, recipe: str, tmp_path: Path
) -> None:
    models = latent_models(tmp_path)
    biased(models)
    pretrained = {"model": ModelSpec(name="tiny-latent", weights="pretrained")}
    precision = {"precision": {"recipe": recipe}}
    mine_spec = spec(TOPOLOGIES[topology], "tiny-latent", **precision).model_copy(update=pretrained)
    one = MegatronEngine(mine_spec, models, tmp_path / "m")
    two = TorchEngine(
        spec_of("tiny-latent", **precision).model_copy(update=pretrained), models, tmp_path / "t"
    )
    one.wake()
    two.wake()
    assert same_bytes(exported(one, tmp_path / "m0"), exported(two, tmp_path / "t0"))
    assert widest(one.score(samples()), two.score(samples())) < 1e-5
    mine, theirs = one.step(samples(), 1), two.step(samples(), 1)
    assert mine.grad_norm == pytest.approx(theirs.grad_norm, rel=1e-5)
    if recipe == "fp32":  # BF16 rounds a last bit of the FP32 masters to its neighbour
        assert distance(exported(one, tmp_path / "m1"), exported(two, tmp_path / "t1")) < 1e-6


def test_latent_attention_is_refused_where_it_would_train_or_route_wrongly(tmp_path: Path) -> None:
    with pytest.raises(RefusedTopology, match=r"tp 2 with latent attention .* trains wrongly"):
        MegatronEngine(spec({"tp": 2}, "tiny-latent"), latent_models(tmp_path / "a"), tmp_path)
    grouped = latent_models(tmp_path / "b", n_group=4, topk_group=2)
    with pytest.raises(UnknownFamily, match="n_group 4 with topk_group 2"):
        MegatronEngine(spec({}, "tiny-latent"), grouped, tmp_path)


def test_a_checkpoint_goes_on_exactly_and_under_another_layout(tmp_path: Path) -> None:
    adam: dict[str, Any] = {"optimizer": {"name": "adamw", "lr": 0.001}, **FP32}
    first = MegatronEngine(spec({"tp": 2}, **adam), MODELS, tmp_path / "a")
    first.wake()
    first.step(samples(seed=1), 1)
    (tmp_path / "saved").mkdir()
    first.save(tmp_path / "saved")
    held = exported(first, tmp_path / "a0")
    first.sleep()
    first.wake()
    first.step(samples(seed=2), 2)
    end = first.export(tmp_path / "a1")
    again = MegatronEngine(spec({"tp": 2}, **adam), MODELS, tmp_path / "b")
    again.wake()
    again.load(tmp_path / "saved")
    again.step(samples(seed=2), 2)
    assert again.export(tmp_path / "b1") == end
    whole = exported(again, tmp_path / "b2")
    elsewhere = MegatronEngine(spec({"dp": 2, "ep": 2}, **adam), MODELS, tmp_path / "c")
    elsewhere.wake()
    elsewhere.load(tmp_path / "saved")
    assert same_bytes(exported(elsewhere, tmp_path / "c0"), held)
    elsewhere.step(samples(seed=2), 2)
    # Adam divides by the root of a tiny second moment: one step of 1e-3 magnifies rounding there
    assert distance(exported(elsewhere, tmp_path / "c1"), whole) < 1e-4


@pytest.mark.parametrize(
    ("model", "parallel", "why"),
    [
        ("tiny-moe", {"tp": 2, "etp": 1}, "trains wrongly"),
        ("tiny-dense", {"dp": 2, "ep": 2}, "no experts"),
        ("tiny-moe", {"tp": 2, "ep": 4}, "does not divide"),
        ("tiny-moe", {"tp": 2, "ep": 2, "etp": 2, "dp": 2, "pp": 2}, "on CPU"),
    ],
)
def test_topologies_are_refused_by_name(
    model: str, parallel: dict[str, int], why: str, tmp_path: Path
) -> None:
    with pytest.raises(RefusedTopology, match=why):
        MegatronEngine(spec(parallel, model), MODELS, tmp_path)


@pytest.mark.parametrize(
    ("recipe", "why"),
    [
        ("mxfp8", "--fp8-recipe mxfp8 .*need Transformer Engine"),
        ("nvfp4_selective", "--fp4-format e2m1 .*need Transformer Engine"),
        ("unified_fp8", "--fp8-recipe blockwise .*need Transformer Engine"),
        ("nvfp4_w4a4", "families.0.weight.format: 'nvfp4': its outer scale"),
    ],
)
def test_low_bit_contracts_are_refused_with_the_reason(recipe: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        check_contract(spec_of(precision={"recipe": recipe}).contract())
