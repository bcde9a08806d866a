"""`convert.place = "trainer_rank"`: a trainer makes the codes and scales that sync would, and others are refused."""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from conformance.trainer_engine import MODELS, samples, spec_of
from safetensors.torch import load_file, save_file

from syncline.contract.exports import CONVERTED_FILE, ConvertedExport
from syncline.contract.precision import PrecisionContract
from syncline.contract.recipes import RECIPES
from syncline.runtime.store import BlobStore
from syncline.sync.adapter import convert_version
from syncline.sync.convert import Converted
from syncline.sync.export import BadExport, Export, NonFinite
from syncline.sync.source import source_of
from syncline.trainer.engine import NonFiniteWeights
from syncline.trainer.engines.torch import TorchEngine

PAIRS = [
    ("tiny-dense", "bf16"),
    ("tiny-dense", "fp32"),
    ("tiny-moe", "unified_fp8"),
    ("tiny-moe", "int4_qat_w4a16"),
    ("tiny-moe", "mxfp8"),
    ("tiny-moe", "mxfp4_qat_w4a16"),
    ("tiny-moe", "nvfp4_w4a4"),
    ("tiny-kimi", "lora_frozen_mxfp4"),
]
NAME = "model.layers.1.self_attn.o_proj.weight"


def contract_of(recipe: str, place: str) -> dict[str, Any]:
    made: dict[str, Any] = msgspec.to_builtins(RECIPES[recipe])
    return made | {"convert": made["convert"] | {"place": place}}


def engine_of(model: str, recipe: str, place: str, scratch: Path) -> TorchEngine:
    spec = spec_of(model, precision={"custom": contract_of(recipe, place)})
    engine = TorchEngine(spec, MODELS, scratch)
    engine.wake()
    return engine


def converted(folder: Path, files: dict[str, str], contract: PrecisionContract, store: Path) -> Converted:
    export = Export(folder, files)
    try:
        return convert_version(source_of(export, contract), contract, BlobStore(store), None)
    finally:
        export.close()


@pytest.mark.parametrize(("model", "recipe"), PAIRS)
def test_the_manifest_lists_the_same_tensors(tmp_path: Path, model: str, recipe: str) -> None:
    """After a step, so that masters are no BF16 values."""
    done = {}
    for place in ("sync", "trainer_rank"):
        engine = engine_of(model, recipe, place, tmp_path / place)
        engine.step(samples(4), 1)
        files = engine.export(tmp_path / f"{place}.export")
        contract = engine._contract
        done[place] = converted(tmp_path / f"{place}.export", files, contract, tmp_path / f"{place}.store")
        assert (CONVERTED_FILE in files) is (place == "trainer_rank")
    one, other = done["sync"], done["trainer_rank"]
    assert other.tensors == one.tensors
    assert (other.ties, other.padding, other.nbytes) == (one.ties, one.padding, one.nbytes)
    assert (one.trace.place, other.trace.place) == ("sync", "trainer_rank")
    assert other.trace.bytes == one.trace.bytes


class Ready:
    """An export of codes and scales that a test may alter, each time from the same start."""

    def __init__(self, tmp: Path, recipe: str) -> None:
        engine = engine_of("tiny-moe", recipe, "trainer_rank", tmp / "scratch")
        self.contract = engine._contract
        self._tmp, self._first = tmp, tmp / "first"
        self._files = engine.export(self._first)
        self.tensors = load_file(self._first / "model.safetensors")
        self.told = msgspec.json.decode((self._first / CONVERTED_FILE).read_bytes(), type=ConvertedExport)

    def converted(
        self, tensors: dict[str, torch.Tensor], told: ConvertedExport | None = None, drop: bool = False
    ) -> Converted:
        folder = self._tmp / "again"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(self._first, folder)
        save_file(tensors, folder / "model.safetensors")
        (folder / CONVERTED_FILE).write_bytes(msgspec.json.encode(told or self.told))
        if drop:
            (folder / CONVERTED_FILE).unlink()
        files = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}
        return converted(folder, files, self.contract, self._tmp / "store")


@pytest.fixture(scope="module")
def fp8(tmp_path_factory: pytest.TempPathFactory) -> Ready:
    return Ready(tmp_path_factory.mktemp("fp8"), "unified_fp8")


def test_what_is_not_the_plans_is_refused_by_name(fp8: Ready) -> None:
    scale = f"{NAME}_scale_inv"
    good = fp8.tensors
    assert fp8.converted(good).tensors
    for changed, says in (
        ({n: t for n, t in good.items() if n != scale}, rf"tensor {scale} is missing"),
        (good | {"model.extra": torch.ones(2)}, r"tensor model\.extra is not one that the plan makes"),
        (good | {NAME: good[NAME].float()}, rf"tensor {NAME} is F32 \[64, 64\], the plan makes it F8_E4M3"),
        (good | {scale: good[scale].repeat(2, 1)}, rf"tensor {scale} is F32 \[2, 1\], .* F32 \[1, 1\]"),
        (
            good | {"model.norm.weight": good["model.norm.weight"].float()},
            r"tensor model\.norm\.weight is F32 \[64\], the plan makes it BF16",
        ),
    ):
        with pytest.raises(BadExport, match=says):
            fp8.converted(changed)


def test_codes_and_scales_that_are_no_numbers_are_refused_by_name_and_index(fp8: Ready) -> None:
    scale, codes = f"{NAME}_scale_inv", fp8.tensors[NAME].clone()
    codes.view(torch.uint8)[3, 5] = 0xFF
    for changed, says in (
        ({NAME: codes}, rf"tensor {NAME} is no number at flat index {3 * 64 + 5}"),
        ({scale: torch.full((1, 1), torch.inf)}, rf"tensor {scale} is no number at flat index 0"),
    ):
        with pytest.raises(NonFinite, match=says):
            fp8.converted(fp8.tensors | changed)


def test_what_the_trainer_says_of_its_codes_must_be_the_contracts(fp8: Ready) -> None:
    told = fp8.told
    with pytest.raises(BadExport, match=r"the export was converted by plan 00, the contract's is"):
        fp8.converted(fp8.tensors, msgspec.structs.replace(told, plan="00"))
    shapes = told.shapes | {"model.norm.weight": (32,)}
    with pytest.raises(BadExport, match=r"the export was converted by plan"):
        fp8.converted(fp8.tensors, msgspec.structs.replace(told, shapes=shapes))
    with pytest.raises(BadExport, match=r"the export is wide, .*convert.place 'trainer_rank'"):
        fp8.converted(fp8.tensors, drop=True)


def test_a_stored_shape_that_is_another_is_refused(tmp_path: Path) -> None:
    ready = Ready(tmp_path, "int4_qat_w4a16")
    shape = f"{NAME}_shape"
    assert ready.tensors[shape].tolist() == [64, 64]
    with pytest.raises(BadExport, match=rf"tensor {shape} says \[64, 32\], it is \[64, 64\]"):
        ready.converted(ready.tensors | {shape: torch.tensor([64, 32])})


def test_a_weight_that_cannot_be_quantised_is_not_exported(tmp_path: Path) -> None:
    """Finite, and beyond what a scale of the format stands for."""
    engine = engine_of("tiny-dense", "unified_fp8", "trainer_rank", tmp_path / "scratch")
    parameter = dict(engine._need().loaded.model.named_parameters())[NAME]
    with torch.no_grad():
        parameter[2, 1] = 3.4e38
    with pytest.raises(NonFiniteWeights, match=rf"not exported: tensor {NAME}, from row 0,"):
        engine.export(tmp_path / "e")
