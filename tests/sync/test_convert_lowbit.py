"""Low-bit conversion: the artefact of each recipe, the same bytes every time, shared outer scales, refusals by name."""

from __future__ import annotations

import hashlib
import json
import random
import subprocess
import sys
import tracemalloc
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from conformance.model_exports import converted, tensors_of, write_export
from torch import Tensor

from syncline.contract.artefact import encoded
from syncline.contract.plan import resolve
from syncline.contract.precision import Convert, Family, PrecisionContract
from syncline.contract.recipes import RECIPES
from syncline.contract.schemes import NVFP4_FLOOR, SCHEMES, Scheme
from syncline.contract.version_path import Minted, VersionId, VersionRecord
from syncline.numerics.quantized import Quantized, dequantize, quantize
from syncline.runtime.store import BlobStore
from syncline.sync.convert import Converted, convert
from syncline.sync.export import BadExport, Export, NonFinite
from syncline.sync.publish import PLAN_FILE, Publisher, Unpublishable

PAIRS = [
    ("tiny-dense", "unified_fp8"),
    ("tiny-moe", "unified_fp8"),
    ("tiny-moe", "int4_qat_w4a16"),
    ("tiny-moe", "mxfp8"),
    ("tiny-moe", "mxfp4_qat_w4a16"),
    ("tiny-moe", "nvfp4_w4a4"),
    ("tiny-moe", "nvfp4_selective"),
    ("tiny-glm", "glm52"),
    ("tiny-kimi", "lora_frozen_mxfp4"),
    ("tiny-hybrid", "qwen38"),
]
TORCH = {
    "F8_E4M3": torch.float8_e4m3fn,
    "U8": torch.uint8,
    "I32": torch.int32,
    "I64": torch.int64,
    "F32": torch.float32,
}


def blobs(done: Converted, store: BlobStore) -> dict[str, Tensor]:
    """The low-bit tensors of a conversion, as torch reads them."""
    return {
        t.name: torch.frombuffer(store.read(t.digest), dtype=TORCH[t.dtype]).reshape(t.shape)
        for t in done.tensors
        if t.dtype in TORCH
    }


@pytest.mark.parametrize(("model", "recipe"), PAIRS)
def test_the_artefact_is_that_of_the_quantisers(tmp_path: Path, model: str, recipe: str) -> None:
    """Each low-bit weight, quantised whole by `numerics`, has the bytes that conversion made band by band."""
    contract, tensors, store = RECIPES[recipe], tensors_of(model), BlobStore(tmp_path / "store")
    done, _ = converted(tmp_path / "e", model, tensors, contract, store)
    plan = resolve(contract, {name: tuple(t.shape) for name, t in tensors.items()})
    assert done.plan == plan
    assert done.representation == contract.representation
    assert [t.name for t in done.tensors] == sorted(t.name for t in done.tensors)
    found, low = blobs(done, store), {entry.name for entry in plan.low_bit()}
    assert low
    for name, tensor in tensors.items():
        listed = next((t for t in done.tensors if t.name == name and t.dtype == "BF16"), None)
        assert (listed is None) == (name in low)
        if listed is not None:
            assert bytes(store.read(listed.digest)) == tensor.view(torch.int16).numpy().tobytes()
    outers: dict[str, float] = {}
    for entry in plan.low_bit():
        scheme = entry.weight
        assert scheme is not None
        codes = found[f"{entry.name}_packed" if scheme.format in ("int4", "mxfp4") else entry.name]
        suffix = "_scale" if scheme.format in ("int4", "mxfp4", "nvfp4") else "_scale_inv"
        outer = found.get(f"{entry.name}_scale_2")
        made = quantize(tensors[entry.name], scheme, entry.name, outer)
        assert torch.equal(codes.view(torch.uint8), made.codes.view(torch.uint8))
        assert torch.equal(found[entry.name + suffix].view(torch.uint8), made.scale.view(torch.uint8))
        if outer is not None:
            assert outers.setdefault(entry.outer or entry.name, float(outer)) == float(outer)
    members: dict[str, list[float]] = {}
    for entry in plan.low_bit():
        members.setdefault(entry.outer or entry.name, []).append(float(tensors[entry.name].abs().max()))
    for group, outer_scale in outers.items():
        assert outer_scale == float(np.float32(max(*members[group], NVFP4_FLOOR)) / np.float32(2688))


def test_codes_stand_for_the_weights(tmp_path: Path) -> None:
    """What a reader that knows only names and the format makes of the blobs lies within the format's error."""
    tensors, store = tensors_of("tiny-moe"), BlobStore(tmp_path / "store")
    done, _ = converted(tmp_path / "e", "tiny-moe", tensors, RECIPES["int4_qat_w4a16"], store)
    found, name = blobs(done, store), "model.layers.0.mlp.experts.2.up_proj.weight"
    words = found[f"{name}_packed"].numpy().view("<u4")
    nibbles = (words[:, :, None] >> (4 * np.arange(8, dtype="<u4"))) & 15
    values = (nibbles.reshape(len(words), -1).astype("f4") - 8) * found[f"{name}_scale"].numpy().repeat(32, 1)
    wide = tensors[name].float().numpy()
    assert found[f"{name}_shape"].tolist() == list(wide.shape)
    groups = np.abs(wide).reshape(len(wide), -1, 32).max(-1).repeat(32, 1)
    assert (np.abs(values - wide) <= groups / 14 * (1 + 1e-6)).all()
    assert np.abs(values - wide).max() > 0


@pytest.mark.parametrize("recipe", ["unified_fp8", "nvfp4_w4a4", "int4_qat_w4a16"])
def test_converting_again_gives_the_same_bytes(
    tmp_path: Path, recipe: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With another order of tensors, other files, other bands and another thread count."""
    contract, tensors = RECIPES[recipe], tensors_of("tiny-moe")
    first, _ = converted(tmp_path / "a", "tiny-moe", tensors, contract, BlobStore(tmp_path / "one"))
    names = list(tensors)
    random.Random(3).shuffle(names)
    shuffled = {name: tensors[name] for name in names}
    files = [names[::3], names[1::3], names[2::3]]
    monkeypatch.setattr("syncline.numerics.checkpoint.BAND", 128 * 64)
    before = torch.get_num_threads()
    torch.set_num_threads(2 if before == 1 else 1)
    try:
        again, _ = converted(
            tmp_path / "b", "tiny-moe", shuffled, contract, BlobStore(tmp_path / "two"), files
        )
    finally:
        torch.set_num_threads(before)
    assert again == first
    repeated, _ = converted(tmp_path / "c", "tiny-moe", tensors, contract, BlobStore(tmp_path / "one"))
    assert repeated == msgspec.structs.replace(first, new_bytes=0)


def test_a_weight_that_is_no_number_is_refused_by_name_and_index(tmp_path: Path) -> None:
    alone, fused = "model.layers.1.self_attn.o_proj.weight", "model.layers.1.self_attn.q_proj.weight"
    for i, (recipe, bad, name, dtype) in enumerate(
        [
            ("unified_fp8", "nan", alone, torch.bfloat16),
            ("nvfp4_w4a4", "inf", alone, torch.bfloat16),
            ("nvfp4_w4a4", "nan", fused, torch.bfloat16),  # found while the group's amax is looked for
            ("mxfp8", "-inf", alone, torch.float32),
            ("int4_qat_w4a16", "nan", alone, torch.float16),
        ]
    ):
        tensors = tensors_of("tiny-moe", dtype=dtype)
        tensors[name] = tensors[name].clone()
        tensors[name][40, 3] = float(bad)
        store = BlobStore(tmp_path / f"store{i}")
        with pytest.raises(NonFinite, match=rf"tensor {name} is {bad} at flat index {40 * 64 + 3} of shape"):
            converted(tmp_path / f"e{i}", "tiny-moe", tensors, RECIPES[recipe], store)


def test_a_contract_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadExport, match=r"family experts: pattern .* matches no tensor"):
        converted(
            tmp_path / "e",
            "tiny-dense",
            tensors_of("tiny-dense"),
            RECIPES["nvfp4_selective"],
            BlobStore(tmp_path),
        )
    integers = {name: t.int() if "o_proj" in name else t for name, t in tensors_of("tiny-dense").items()}
    with pytest.raises(BadExport, match=r"o_proj.weight has dtype I32, which has no low-bit conversion"):
        converted(tmp_path / "i", "tiny-dense", integers, RECIPES["unified_fp8"], BlobStore(tmp_path))


def test_padding_is_written_down(tmp_path: Path) -> None:
    """A K that the block does not divide is filled with zeros, and the manifest says what it was."""
    scheme = Scheme(format="mxfp4", rows=1, columns=32, rule="even", padding="zero")
    contract = PrecisionContract(
        name="padded", families=(Family(name="low", match=("*.kv_b_proj.weight",), weight=scheme),)
    )
    tensors, store = tensors_of("tiny-glm"), BlobStore(tmp_path / "store")
    done, _ = converted(tmp_path / "e", "tiny-glm", tensors, contract, store)
    names = [name for name in tensors if name.endswith("kv_b_proj.weight")]
    assert done.padding == {f"{name}_packed": tuple(tensors[name].shape) for name in names}
    found = blobs(done, store)
    for name in names:
        codes, scale = found[f"{name}_packed"], found[f"{name}_scale"]
        assert codes.shape[1] * 2 == 32 > tensors[name].shape[1] == 16
        whole = dequantize(Quantized(scheme, codes, scale, None, (len(codes), 32)))
        assert not whole[:, 16:].any()
        assert torch.allclose(whole[:, :16], tensors[name].float(), rtol=0, atol=0.1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_bridge_publishes_bf16_and_the_same_plan(tmp_path: Path, dtype: torch.dtype) -> None:
    contract = RECIPES["unified_fp8"]
    bridge = msgspec.structs.replace(contract, convert=Convert(route="bf16_bridge"))
    tensors = tensors_of("tiny-moe", dtype=dtype)
    done, _ = converted(tmp_path / "e", "tiny-moe", tensors, bridge, BlobStore(tmp_path / "store"))
    assert {t.dtype for t in done.tensors} == {"BF16"}
    assert {t.name for t in done.tensors} == set(tensors)
    assert done.plan.low_bit() == resolve(contract, {n: tuple(t.shape) for n, t in tensors.items()}).low_bit()
    low, wide = done.trace.uses[1], done.trace.uses[0]
    assert (low.family, low.communicated) == ("linear", "BF16 values, quantised by the engine")
    assert (wide.family, wide.communicated) == ("", "BF16")
    assert set(done.trace.bytes) == {"artefact", "wide"}


@pytest.mark.parametrize(("model", "recipe"), [("tiny-moe", "unified_fp8"), ("tiny-moe", "nvfp4_selective")])
def test_the_trace_says_what_was_written(tmp_path: Path, model: str, recipe: str) -> None:
    contract, store = RECIPES[recipe], BlobStore(tmp_path / "store")
    done, _ = converted(tmp_path / "e", model, tensors_of(model), contract, store)
    on_disk = {t.name: store.path(t.digest).stat().st_size for t in done.tensors}
    wide = sum(size for t, size in zip(done.tensors, on_disk.values(), strict=True) if t.dtype == "BF16")
    codes = sum(on_disk[entry.name] for entry in done.plan.low_bit())
    total = sum(on_disk.values())
    assert done.trace.bytes == {
        "artefact": total,
        "codes": codes,
        "wide": wide,
        "scales": total - codes - wide,
    }
    families = {use.family: use for use in done.trace.uses}
    (family,) = contract.families
    assert families[family.name].tensors == len(done.plan.low_bit())
    assert families[family.name].encoded == encoded(family.weight)
    assert families[""].encoded == "BF16 values"
    assert total < 0.8 * 2 * sum(t.numel() for t in tensors_of(model).values())


def test_memory_is_that_of_a_tensor_and_not_of_the_model(tmp_path: Path) -> None:
    """Sixteen matrices of 4 MiB: numpy's and Python's own peak stays under two of them."""
    tensors: dict[str, Tensor] = {
        f"model.layers.{i}.{leaf}_proj.weight": torch.randn(1024, 2048).bfloat16()
        for i in range(8)
        for leaf in ("gate", "up")
    }
    contract = PrecisionContract(
        name="fused",
        families=(
            Family(
                name="low",
                match=("*_proj.weight",),
                weight=SCHEMES["nvfp4"],
                fuse=(("gate_proj", "up_proj"),),
            ),
        ),
    )
    files = write_export(tmp_path / "e", "tiny-dense", tensors)
    (tmp_path / "e" / "config.json").write_text(json.dumps({"tie_word_embeddings": False}))
    files["config.json"] = hashlib.sha256((tmp_path / "e" / "config.json").read_bytes()).hexdigest()
    export, store = Export(tmp_path / "e", files), BlobStore(tmp_path / "store")
    convert(export, contract, store)  # first-use costs
    tracemalloc.start()
    done = convert(export, contract, store)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    export.close()
    assert len(done.tensors) == 3 * 16
    assert peak < 2 * 4 * 2**20 * 2


def test_the_plan_is_written_once_for_people(tmp_path: Path) -> None:
    contract = RECIPES["nvfp4_selective"]
    publisher = Publisher("j1", tmp_path, b"k", contract, BlobStore(tmp_path / "store"))

    def publish(number: int, tensors: dict[str, Tensor]) -> VersionRecord:
        files = write_export(tmp_path / "export" / f"0.{number}", "tiny-moe", tensors)
        minted = Minted(
            job="j1",
            version=VersionId(0, number),
            parent=None,
            optimizer_step=number,
            contract=contract.digest(),
            artefact=f"export/0.{number}",
            files=files,
            canaries=(),
            traceparent="",
            minted_at=1.0,
        )
        record = VersionRecord(
            version=minted.version,
            parent=None,
            optimizer_step=number,
            contract=minted.contract,
            state="minted",
        )
        manifest = publisher.publish(minted, record)
        assert manifest.plan == resolve(contract, {n: tuple(t.shape) for n, t in tensors.items()}).digest()
        return record

    record = publish(0, tensors_of("tiny-moe"))
    assert record.convert_trace is not None
    assert record.convert_trace.bytes["artefact"] == record.nbytes
    written = (tmp_path / PLAN_FILE).read_bytes()
    entries = {entry["name"]: entry for entry in json.loads(written)["entries"]}
    gate = entries["model.layers.0.mlp.experts.0.gate_proj.weight"]
    assert gate["weight"]["format"] == "nvfp4"
    assert gate["outer"] == "model.layers.0.mlp.experts.0.gate_proj+up_proj"
    assert entries["model.layers.0.mlp.gate.weight"]["reason"].startswith("wide: router")
    publish(1, tensors_of("tiny-moe", seed=1))
    assert (tmp_path / PLAN_FILE).read_bytes() == written
    with pytest.raises(Unpublishable, match=r"is not the job's: precision_plan\.json"):
        publish(2, {**tensors_of("tiny-moe"), "model.extra.weight": torch.ones(2)})


def test_torch_is_loaded_for_low_bit_weights_alone(tmp_path: Path) -> None:
    """A process that converts: bf16 leaves torch out, a contract with families brings it in."""
    write_export(tmp_path / "e", "tiny-moe", tensors_of("tiny-moe"))
    script = """
import hashlib, sys
from pathlib import Path
from syncline.contract.recipes import RECIPES
from syncline.runtime.store import BlobStore
import syncline.sync.control
from syncline.sync.convert import convert
from syncline.sync.export import Export
folder = Path(sys.argv[1]) / "e"
files = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}
export = Export(folder, files)
convert(export, RECIPES[sys.argv[2]], BlobStore(Path(sys.argv[1]) / "store"))
print("torch" in sys.modules)
"""
    for recipe, loaded in (("bf16", "False"), ("unified_fp8", "True")):
        done = subprocess.run(
            [sys.executable, "-c", script, str(tmp_path), recipe],
            capture_output=True,
            text=True,
            timeout=120,
            check=True,
        )
        assert done.stdout.strip() == loaded
