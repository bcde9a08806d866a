"""What is exported scores as the trainer does, and nothing is exported that was altered or is not whole."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor
from trained_job import MODELS, TrainedJob, load, logprobs
from transformers import AutoTokenizer

from syncline.contract.exported import RECORD, ExportRecord
from syncline.contract.version_path import VersionId, opened, sign
from syncline.exporting.export import export
from syncline.exporting.files import INDEX
from syncline.exporting.held import CannotExport, held, origin_of
from syncline.reference.chunks import fit_chunks
from syncline.reference.model import load_model, round_to_bf16

SILENT = lambda done, total: None  # noqa: E731
LORA: dict[str, Any] = {
    "custom": {
        "name": "lora_bf16",
        "about": "an adapter over a BF16 base",
        "adapter": {"rank": 4, "alpha": 6.0, "targets": ["model.layers.*.self_attn.*_proj.weight"]},
    }
}


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> TrainedJob:
    return TrainedJob(tmp_path_factory.mktemp("runs"))


def made(job: TrainedJob, *words: Any, **more: Any) -> Path:
    return export(job.request(*words, **more), job.folder, job.models, SILENT)


def record(folder: Path) -> ExportRecord:
    """The export's record; every file is as it says."""
    told = msgspec.json.decode((folder / RECORD).read_bytes(), type=ExportRecord)
    for file in told.files:
        assert hashlib.sha256((folder / file.name).read_bytes()).hexdigest() == file.sha256, file.name
    there = {p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file()}
    assert there == {RECORD, *(file.name for file in told.files)}
    return told


@pytest.mark.parametrize(
    ("model", "precision"),
    [
        ("tiny-dense", {"recipe": "bf16"}),
        ("tiny-moe", {"recipe": "bf16"}),
        ("tiny-dense", {"recipe": "int4_qat_w4a16"}),
        ("tiny-moe", {"recipe": "mxfp4_qat_w4a16"}),
    ],
)
def test_a_fixed_prefix_scores_exactly_as_by_the_trainer(
    tmp_path: Path, model: str, precision: dict[str, Any]
) -> None:
    """By plain transformers, in FP32 arithmetic as the trainer's: to the bit, and differently at each version."""
    job = TrainedJob(tmp_path, model=model, precision=precision)
    scores = []
    for number in (1, 2):
        folder = made(job, number, "hf")
        told = record(folder)
        assert told.version == VersionId(0, number)
        found = logprobs(load(folder))
        assert found == job.score(number)
        scores.append(found)
    assert scores[0] != scores[1]
    card = (folder / "README.md").read_text()
    assert told.manifest in card
    assert job.contract.digest() in card


def test_an_adapter_scores_exactly_as_by_the_trainer(tmp_path: Path) -> None:
    job = TrainedJob(tmp_path, precision=LORA)
    folder = made(job, 2, "lora")
    assert logprobs(adapted(job, folder)) == job.score(2)
    assert logprobs(load_base(job)) != job.score(2)
    with pytest.raises(CannotExport, match="nothing is merged"):
        origin_of(held(job.folder), job.contract, VersionId(0, 2), "hf", None)
    beside = made(job, 2, "sglang")
    assert logprobs(adapted(job, beside / "adapter", load(beside))) == job.score(2)


def test_an_adapter_over_delta_attention_scores_as_by_the_trainer(tmp_path: Path) -> None:
    """In the trainer's chunks, which change the order of additions, exactly; in the library's own, closely."""
    job = TrainedJob(tmp_path, model="tiny-kimi", precision={"recipe": "lora_frozen_mxfp4"})
    model = adapted(job, made(job, 2, "lora"))
    due = job.score(2)
    assert logprobs(model) == pytest.approx(due, abs=5e-6)
    fit_chunks(model)
    assert logprobs(model) == due


def load_base(job: TrainedJob) -> Any:
    """The base as the job's spec names it."""
    model = load_model(job.models, job.spec.model, job.spec.seeds.model).model
    round_to_bf16(model)
    model.save_pretrained(job.folder / "base")
    return load(job.folder / "base")


def adapted(job: TrainedJob, folder: Path, base: Any = None) -> Any:
    """The base with the adapter in `folder`, applied by what its config says and no more."""
    model = load_base(job) if base is None else base
    config = json.loads((folder / "adapter_config.json").read_text())
    tensors = {name: t.float() for name, t in load_file(folder / "adapter_model.safetensors").items()}
    scale = config["lora_alpha"] / (config["r"] ** 0.5 if config["use_rslora"] else config["r"])
    used = set()
    for name, module in model.named_modules():
        parts = [f"base_model.model.{name}.lora_{x}.weight" for x in "AB"]
        meant = any(name == t or name.endswith(f".{t}") for t in config["target_modules"])
        if meant and parts[0] in tensors:
            _attach(module, tensors[parts[0]], tensors[parts[1]], scale)
            used |= set(parts)
    assert used == tensors.keys()
    return model


def _attach(module: Any, a: Tensor, b: Tensor, scale: float) -> None:
    base = module.forward

    def forward(x: Tensor) -> Tensor:
        y: Tensor = base(x) + scale * F.linear(F.linear(x, a), b)
        return y

    module.forward = forward


# ---- what lies in the folder ----------------------------------------------------------------------------------
def test_a_checkpoint_gives_the_bytes_of_its_version(dense: TrainedJob) -> None:
    one, other = made(dense, 2, "hf"), made(dense, 2, "hf", "checkpoint")
    left, right = load_file(one / "model.safetensors"), load_file(other / "model.safetensors")
    assert left.keys() == right.keys()
    assert all(torch.equal(left[name], right[name]) for name in left)
    assert record(other).manifest == ""
    assert "not signed" in (other / "README.md").read_text()


@pytest.mark.parametrize(("model", "recipe"), [("tiny-dense", "fp32"), ("tiny-glm", "glm52")])
def test_wide_weights_that_no_version_holds_are_in_the_checkpoint(
    tmp_path: Path, model: str, recipe: str
) -> None:
    """FP32 masters, or the BF16 weights under codes that rollout alone multiplies: as the trainer scores them."""
    job = TrainedJob(tmp_path, updates=1, model=model, precision={"recipe": recipe})
    assert logprobs(load(made(job, 1, "hf", "checkpoint"))) == job.score(1)
    if recipe == "glm52":
        with pytest.raises(CannotExport, match="use --from checkpoint"):
            origin_of(held(job.folder), job.contract, VersionId(0, 1), "hf", None)


def test_a_checkpoint_of_experts_gives_the_bytes_of_its_version(tmp_path: Path) -> None:
    job = TrainedJob(tmp_path, updates=1, model="tiny-moe")
    one, other = made(job, 1, "hf"), made(job, 1, "hf", "checkpoint")
    left, right = load_file(one / "model.safetensors"), load_file(other / "model.safetensors")
    assert left.keys() == right.keys()
    assert all(torch.equal(left[name], right[name]) for name in left)


def test_shards_are_bounded_and_whole(dense: TrainedJob, tmp_path: Path) -> None:
    whole = load_file(made(dense, 1, "hf") / "model.safetensors")
    (dense.folder / "exports" / "0.1-hf").rename(tmp_path / "whole")
    folder = made(dense, 1, "hf", shard_bytes=40_000)
    index = json.loads((folder / INDEX).read_text())
    files = sorted(folder.glob("model-*.safetensors"))
    assert len(files) > 2
    assert files[0].name == f"model-00001-of-{len(files):05d}.safetensors"
    assert all(file.stat().st_size < 44_000 for file in files)
    found = {name: tensor for file in files for name, tensor in load_file(file).items()}
    assert index["weight_map"].keys() == found.keys() == whole.keys()
    assert all(torch.equal(found[name], whole[name]) for name in whole)
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in whole.values())
    assert logprobs(load(folder)) == dense.score(1)


def test_the_tokenizer_and_the_stop_token_come_along(dense: TrainedJob) -> None:
    folder = made(dense, 0, "hf")
    ours = AutoTokenizer.from_pretrained(MODELS / "tiny-dense")
    assert AutoTokenizer.from_pretrained(folder)("abc")["input_ids"] == ours("abc")["input_ids"]
    model = load(folder)
    assert model.generation_config.eos_token_id == 2
    assert model.config.dtype is torch.float32
    assert json.loads((folder / "config.json").read_text())["dtype"] == "bfloat16"


def test_the_rollout_representation_is_the_stored_bytes(tmp_path: Path) -> None:
    job = TrainedJob(tmp_path, updates=1, precision={"recipe": "int4_qat_w4a16"})
    folder = made(job, 1, "sglang")
    manifest = opened(job.store.read_manifest(VersionId(0, 1)), b"a key")
    tensors = load_file(folder / "model.safetensors")
    assert tensors.keys() == {entry.name for entry in manifest.tensors}
    for entry in manifest.tensors:
        raw = tensors[entry.name].contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        assert hashlib.sha256(raw).hexdigest() == entry.digest, entry.name
    told = json.loads((folder / "config.json").read_text())["quantization_config"]
    assert (told["quant_method"], told["format"]) == ("compressed-tensors", "pack-quantized")
    assert "--quantization compressed-tensors" in (folder / "README.md").read_text()


# ---- what is refused ------------------------------------------------------------------------------------------
def test_one_that_is_there_is_left_as_it_is(dense: TrainedJob) -> None:
    folder = made(dense, 2, "hf")
    (folder / "mark").write_text("")
    assert made(dense, 2, "hf") == folder
    assert (folder / "mark").exists()
    (folder / "mark").unlink()


def test_altered_bytes_are_named_and_nothing_is_left(tmp_path: Path) -> None:
    job = TrainedJob(tmp_path, updates=1)
    manifest = opened(job.store.read_manifest(VersionId(0, 1)), b"a key")
    entry = next(e for e in manifest.tensors if e.name.endswith("q_proj.weight"))
    blob = job.store.path(entry.digest)
    raw = bytearray(blob.read_bytes())
    raw[7] ^= 1
    blob.chmod(0o644)
    blob.write_bytes(raw)
    with pytest.raises(CannotExport, match=entry.name):
        made(job, 1, "hf")
    assert list((job.folder / "exports").iterdir()) == []
    blob.unlink()
    with pytest.raises(CannotExport, match=f"blob of {entry.name} is gone"):
        made(job, 1, "hf")
    assert list((job.folder / "exports").iterdir()) == []


def test_a_manifest_of_somebody_else_is_refused(tmp_path: Path) -> None:
    job = TrainedJob(tmp_path, updates=0)
    path = job.folder / "store" / "manifests" / "0.0.json"
    manifest = opened(job.store.read_manifest(VersionId(0, 0)), b"a key")
    path.write_bytes(msgspec.json.encode(sign(manifest, b"another key")))
    with pytest.raises(CannotExport, match="signature"):
        made(job, 0, "hf")
    path.write_bytes(msgspec.json.encode(sign(msgspec.structs.replace(manifest, job="jother"), b"a key")))
    with pytest.raises(CannotExport, match="job jother"):
        made(job, 0, "hf")
    path.write_bytes(msgspec.json.encode(sign(msgspec.structs.replace(manifest, model="0" * 64), b"a key")))
    with pytest.raises(CannotExport, match=r"config\.json has sha256"):
        made(job, 0, "hf")


def test_an_altered_checkpoint_is_refused(tmp_path: Path) -> None:
    job = TrainedJob(tmp_path, updates=0)
    path = job.folder / "checkpoints" / "update-000000" / "weights.safetensors"
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1
    path.write_bytes(raw)
    with pytest.raises(CannotExport, match="not the file that was saved"):
        made(job, 0, "hf", "checkpoint")


def test_a_version_that_is_retired_meanwhile_is_exported_all_the_same(tmp_path: Path) -> None:
    job = TrainedJob(tmp_path, updates=1)
    retired: list[int] = []

    def progress(done: int, total: int) -> None:
        if not retired:
            retired.append(job.store.collect({VersionId(0, 0)}))

    folder = export(job.request(1, "hf"), job.folder, job.models, progress)
    assert retired[0] > 0
    assert logprobs(load(folder)) == job.score(1)
    found = held(job.folder)
    assert found.versions == (VersionId(0, 0),)
    assert origin_of(found, job.contract, VersionId(0, 1), "hf", None) == "checkpoint"
    with pytest.raises(CannotExport, match=r"versions in the store: 0\.0; checkpoints: 0\.0, 0\.1"):
        origin_of(found, job.contract, VersionId(0, 1), "hf", "version")
    with pytest.raises(CannotExport, match=r"no checkpoint of version 0\.7"):
        origin_of(found, job.contract, VersionId(0, 7), "hf", None)
    with pytest.raises(CannotExport, match="has no adapter"):
        origin_of(found, job.contract, VersionId(0, 0), "lora", None)
