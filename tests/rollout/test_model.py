"""The shared loader: names are the checkpoint's names, loading is strict, random weights follow the seed."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from syncline.contract.job import ModelSpec
from syncline.reference.model import empty_model, export_state, load_model, load_state, round_to_bf16
from syncline.reference.state import named_windows

MODELS = Path(__file__).parents[2] / "examples" / "models"
FAMILIES = ("tiny-dense", "tiny-moe", "tiny-hybrid", "tiny-kimi", "tiny-glm")


@pytest.mark.parametrize("name", FAMILIES)
def test_exported_names_and_bytes_are_those_of_save_pretrained(name: str, tmp_path: Path) -> None:
    loaded = load_model(MODELS, ModelSpec(name=name), seed=3)
    loaded.model.save_pretrained(tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    exported = dict(export_state(loaded.model, loaded.plan))
    assert sorted(exported) == sorted(saved)
    assert list(exported) == sorted(exported)
    for tensor_name, tensor in exported.items():
        assert torch.equal(tensor, saved[tensor_name]), tensor_name


@pytest.mark.parametrize("name", FAMILIES)
def test_a_load_into_undefined_weights_gives_the_same_logits(name: str) -> None:
    loaded = load_model(MODELS, ModelSpec(name=name), seed=3)
    other = empty_model(loaded.folder)
    with torch.no_grad():
        for tensor in other.state_dict().values():
            tensor.fill_(float("nan"))
    load_state(other, {k: v.clone() for k, v in export_state(loaded.model)}, loaded.plan)
    ids = torch.tensor([[1, 50, 60, 70, 51]])
    with torch.inference_mode():
        assert torch.equal(loaded.model(input_ids=ids).logits, other(input_ids=ids).logits)


def test_random_weights_follow_the_seed_alone() -> None:
    torch.manual_seed(99)
    first = dict(export_state(load_model(MODELS, ModelSpec(name="tiny-moe"), seed=7).model))
    torch.manual_seed(1)
    before = torch.get_rng_state()
    again = dict(export_state(load_model(MODELS, ModelSpec(name="tiny-moe"), seed=7).model))
    other = dict(export_state(load_model(MODELS, ModelSpec(name="tiny-moe"), seed=8).model))
    assert torch.equal(before, torch.get_rng_state())
    assert all(torch.equal(first[k], again[k]) for k in first)
    assert not torch.equal(first["model.embed_tokens.weight"], other["model.embed_tokens.weight"])


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("missing", "tensor model.norm.weight is missing"),
        ("extra", "tensor model.extra.weight is not part of the model"),
        ("misshapen", r"tensor model.norm.weight has shape \[65\], the model \[64\]"),
    ],
)
def test_a_faulty_load_names_the_tensor_and_writes_nothing(fault: str, message: str) -> None:
    loaded = load_model(MODELS, ModelSpec(name="tiny-moe"), seed=0)
    before = {k: v.clone() for k, v in export_state(loaded.model, loaded.plan)}
    tensors = {k: v + 1 for k, v in before.items()}
    match fault:
        case "missing":
            del tensors["model.norm.weight"]
        case "extra":
            tensors["model.extra.weight"] = torch.ones(2)
        case _:
            tensors["model.norm.weight"] = torch.ones(65)
    with pytest.raises(ValueError, match=message):
        load_state(loaded.model, tensors, loaded.plan)
    assert all(torch.equal(v, before[k]) for k, v in export_state(loaded.model, loaded.plan))


def test_tied_weights_follow_their_twin_and_two_truths_are_refused() -> None:
    loaded = load_model(MODELS, ModelSpec(name="tiny-dense"), seed=0)
    assert loaded.plan.ties == (("lm_head.weight", "model.embed_tokens.weight"),)
    tensors = {k: v.clone() for k, v in export_state(loaded.model, loaded.plan)}
    assert "lm_head.weight" not in tensors
    tensors["model.embed_tokens.weight"] += 1
    load_state(loaded.model, tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()})
    assert torch.equal(loaded.model.lm_head.weight, tensors["model.embed_tokens.weight"])
    with pytest.raises(ValueError, match=r"lm_head.weight differs from model.embed_tokens.weight"):
        load_state(loaded.model, tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"] + 1})


def test_rounding_gives_bf16_values_in_fp32_tensors() -> None:
    loaded = load_model(MODELS, ModelSpec(name="tiny-kimi"), seed=0)
    views = named_windows(loaded.model, loaded.plan)
    assert any(not torch.equal(v, v.bfloat16().float()) for v in views.values())
    round_to_bf16(loaded.model)
    assert all(v.dtype == torch.float32 and torch.equal(v, v.bfloat16().float()) for v in views.values())


def test_pretrained_weights_are_read_and_a_gap_is_named(tmp_path: Path) -> None:
    made = load_model(MODELS, ModelSpec(name="tiny-moe"), seed=5)
    made.model.save_pretrained(tmp_path / "mine")
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(MODELS / "tiny-moe" / file, tmp_path / "mine")
    spec = ModelSpec(name="mine", weights="pretrained")
    read = load_model(tmp_path, spec, seed=0)
    for (name, ours), (_, theirs) in zip(export_state(made.model), export_state(read.model), strict=True):
        assert torch.equal(ours, theirs), name
    config = json.loads((tmp_path / "mine" / "config.json").read_text())
    (tmp_path / "mine" / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 3}))
    with pytest.raises(ValueError, match=r"model 'mine': missing keys: model.layers.2"):
        load_model(tmp_path, spec, seed=0)


def test_a_model_outside_the_root_and_one_with_code_are_refused(tmp_path: Path) -> None:
    (tmp_path / "root").mkdir()
    (tmp_path / "root" / "link").symlink_to(MODELS / "tiny-moe")
    for name in ("link", "..", "nothing"):
        with pytest.raises(ValueError, match=f"model '{name}'"):
            load_model(tmp_path / "root", ModelSpec.model_construct(name=name, weights="random"), seed=0)
    shutil.copytree(MODELS / "tiny-moe", tmp_path / "root" / "coded")
    config = json.loads((MODELS / "tiny-moe" / "config.json").read_text())
    (tmp_path / "root" / "coded" / "config.json").write_text(
        json.dumps(config | {"auto_map": {"AutoConfig": "x.Y"}})
    )
    with pytest.raises(ValueError, match="auto_map"):
        load_model(tmp_path / "root", ModelSpec(name="coded"), seed=0)


def test_every_character_is_one_token_and_unknown_text_is_refused() -> None:
    codec = load_model(MODELS, ModelSpec(name="tiny-moe"), seed=0).codec
    text = "sort: 3 1 2\n= {x}~"
    ids = codec.encode(text)
    assert ids[0] == 1
    assert len(ids) == len(text) + 1
    assert codec.decode(ids[1:]) == text
    assert codec.decode([*ids[1:], 2]) == text
    with pytest.raises(ValueError, match="does not know"):
        codec.encode("é")
