"""Files of ranks become the version that a whole export becomes, or a refusal that names file, tensor or rank."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from exports import CANARY, write
from shard_exports import config_of, write_shards
from sharded import DENSE, MOE, Full, model

from syncline.contract.exports import SHARDS_FILE, ShardedExport, rank_file
from syncline.contract.precision import Family, PrecisionContract
from syncline.contract.recipes import RECIPES
from syncline.contract.schemes import SCHEMES
from syncline.contract.sharding.grid import Grid
from syncline.contract.sharding.layout import Dimensions, Layout
from syncline.contract.version_path import Minted, VersionId, VersionRecord
from syncline.runtime.export_files import write_tensors
from syncline.runtime.store import BlobStore
from syncline.sync.convert import Converted, convert
from syncline.sync.export import BadExport, Export
from syncline.sync.publish import Publisher, Unpublishable
from syncline.sync.source import source_of

DIMS = Dimensions(layers=2, heads=4, kv_heads=2, experts=4)
LAYOUTS = {
    "tp": Layout(engine="megatron_local", grid=Grid(tp=2), model=DENSE, vocab=16),
    "pp": Layout(engine="megatron_te", grid=Grid(tp=2, pp=2), model=MOE, vocab=8),
    "ep": Layout(
        engine="megatron_local",
        grid=Grid(tp=2, ep=2, etp=1),
        model=MOE,
        experts_of=((3, 0), (1, 2)),
    ),
    "more ranks than groups": Layout(engine="megatron_te", grid=Grid(tp=4, dp=2), model=DENSE),
}


def floats(shapes: dict[str, tuple[int, ...]], seed: int = 0) -> Full:
    rng = np.random.default_rng(seed)
    return {name: rng.standard_normal(shape).astype("<f4") for name, shape in shapes.items()}


def halves(full: Full) -> Full:
    """BF16 bits of `full`, cut off."""
    return {name: (array.view("<u4") >> 16).astype("<u2") for name, array in full.items()}


def converted(folder: Path, files: dict[str, str], contract: PrecisionContract, store: Path) -> Converted:
    export = Export(folder, files)
    try:
        return convert(source_of(export, contract), contract, BlobStore(store))
    finally:
        export.close()


@pytest.mark.parametrize("dtype", ["BF16", "F32"])
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_shards_become_what_the_whole_becomes(tmp_path: Path, layout: Layout, dtype: str) -> None:
    full = floats(model(layout.model))
    bits = halves(full)
    parts: dict[str, Any] = {n: ("bfloat16", a) for n, a in bits.items()} if dtype == "BF16" else dict(full)
    whole = converted(
        tmp_path / "w",
        write(tmp_path / "w", parts, config_of(layout.model)),
        RECIPES["bf16"],
        tmp_path / "one",
    )
    files = write_shards(tmp_path / "s", bits if dtype == "BF16" else full, layout, dtype)
    assert len([name for name in files if name.endswith(".safetensors")]) == layout.grid.size
    assert converted(tmp_path / "s", files, RECIPES["bf16"], tmp_path / "two") == whole


@pytest.mark.parametrize("scheme", ["fp8_block", "int4_g32", "nvfp4"])
def test_shards_are_quantised_as_the_whole_is(tmp_path: Path, scheme: str) -> None:
    shapes = model(DIMS, vocab=64, width=128, ffn=256, hidden=128)
    fuse = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")) if scheme == "nvfp4" else ()
    family = Family(name="low", match=("*_proj.weight",), weight=SCHEMES[scheme], fuse=fuse)
    contract = PrecisionContract(name="low", families=(family,))
    layout = Layout(engine="megatron_local", grid=Grid(tp=2, ep=2, etp=1), model=DIMS)
    bits = halves(floats(shapes))
    parts: dict[str, Any] = {name: ("bfloat16", array) for name, array in bits.items()}
    files = write(tmp_path / "w", parts, config_of(DIMS))
    whole = converted(tmp_path / "w", files, contract, tmp_path / "one")
    cut = write_shards(tmp_path / "s", bits, layout, "BF16")
    assert converted(tmp_path / "s", cut, contract, tmp_path / "two") == whole
    assert len(whole.plan.low_bit()) > 10


def test_replicas_may_stay_away_and_a_part_that_nobody_has_is_missed(tmp_path: Path) -> None:
    layout = Layout(engine="megatron_local", grid=Grid(tp=2, dp=2), model=DENSE)
    bits = halves(floats(model(DENSE)))
    every = converted(
        tmp_path / "a", write_shards(tmp_path / "a", bits, layout, "BF16"), RECIPES["bf16"], tmp_path / "one"
    )
    files = write_shards(tmp_path / "b", bits, layout, "BF16", (1, 2))
    assert sorted(files) == ["config.json", rank_file(1), rank_file(2), SHARDS_FILE]
    assert converted(tmp_path / "b", files, RECIPES["bf16"], tmp_path / "two") == every
    files = write_shards(tmp_path / "c", bits, layout, "BF16", (0, 2))
    with pytest.raises(BadExport, match=r"tensor .*is on no given rank; the missing shard is .* on rank 1"):
        converted(tmp_path / "c", files, RECIPES["bf16"], tmp_path / "three")


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Path, dict[str, str]]:
    layout = Layout(engine="megatron_local", grid=Grid(tp=2), model=DENSE)
    return tmp_path / "e", write_shards(tmp_path / "e", halves(floats(model(DENSE))), layout, "BF16")


def refused(folder: Path, files: dict[str, str], says: str) -> None:
    with pytest.raises(BadExport, match=says):
        converted(folder, files, RECIPES["bf16"], folder.parent / "refused")


def stamped(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def test_files_that_changed_places_are_found(pair: tuple[Path, dict[str, str]]) -> None:
    """Both ranks' files have the same names, dtypes and shapes in them."""
    folder, files = pair
    one, two = folder / rank_file(0), folder / rank_file(1)
    one.rename(folder / "aside")
    two.rename(one)
    (folder / "aside").rename(two)
    swapped = files | {rank_file(0): files[rank_file(1)], rank_file(1): files[rank_file(0)]}
    refused(folder, swapped, r"tensor .* on rank 0 .*these are the bytes of .* on rank 1")


def test_a_file_too_few_and_one_too_many(pair: tuple[Path, dict[str, str]]) -> None:
    folder, files = pair
    fewer = {name: digest for name, digest in files.items() if name != rank_file(1)}
    refused(folder, fewer, r"rank-00001.safetensors is not among the stamped files")
    (folder / rank_file(1)).rename(folder.parent / "away")
    refused(folder, fewer, r"rank-00001.safetensors is missing")
    (folder.parent / "away").rename(folder / rank_file(1))
    write_tensors(folder / rank_file(2), {"x": ("U8", (1,))}, [("x", b"\0")])
    more = files | {rank_file(2): stamped(folder / rank_file(2))}
    refused(folder, more, r"rank-00002.safetensors has no shard that shards.json stamps")


def test_a_layout_of_another_model_is_refused(pair: tuple[Path, dict[str, str]]) -> None:
    folder, files = pair
    (folder / "config.json").write_text(json.dumps(config_of(MOE)))
    refused(
        folder,
        files | {"config.json": stamped(folder / "config.json")},
        r"shards.json: the layout is of a model with experts 0, config.json says 4",
    )


def test_stamps_of_another_layout_are_refused(pair: tuple[Path, dict[str, str]]) -> None:
    folder, files = pair
    told = msgspec.json.decode((folder / SHARDS_FILE).read_bytes(), type=ShardedExport)
    other = msgspec.structs.replace(told, layout=msgspec.structs.replace(told.layout, vocab=64))
    (folder / SHARDS_FILE).write_bytes(msgspec.json.encode(other))
    again = files | {SHARDS_FILE: stamped(folder / SHARDS_FILE)}
    refused(folder, again, r"the shards are stamped under layout")
    (folder / SHARDS_FILE).write_bytes(b'{"layout": 3}')
    refused(folder, files | {SHARDS_FILE: stamped(folder / SHARDS_FILE)}, r"shards.json: .*layout")


def test_a_weight_that_is_no_number_is_named_by_its_checkpoint_name(tmp_path: Path) -> None:
    layout = Layout(engine="megatron_local", grid=Grid(tp=2), model=DENSE)
    full = floats(model(DENSE))
    full["model.layers.1.mlp.up_proj.weight"][7, 3] = np.inf
    files = write_shards(tmp_path / "e", halves(full), layout, "BF16")
    refused_by = r"tensor model.layers.1.mlp.up_proj.weight is inf at flat index 45 of shape \[12, 6\]"
    with pytest.raises(ValueError, match=refused_by):
        converted(tmp_path / "e", files, RECIPES["bf16"], tmp_path / "store")


def test_a_version_of_shards_is_published(tmp_path: Path) -> None:
    layout = LAYOUTS["pp"]
    files = write_shards(tmp_path / "export" / "0.0", halves(floats(model(MOE))), layout, "BF16")
    minted = Minted(
        job="j1",
        version=VersionId(0, 0),
        parent=None,
        optimizer_step=0,
        contract=RECIPES["bf16"].digest(),
        artefact="export/0.0",
        files=files,
        canaries=(CANARY,),
        traceparent="",
        minted_at=1.0,
    )
    record = VersionRecord(
        version=minted.version, parent=None, optimizer_step=0, contract=minted.contract, state="minted"
    )
    publisher = Publisher("j1", tmp_path, b"k", RECIPES["bf16"], BlobStore(tmp_path / "store"))
    manifest = publisher.publish(minted, record)
    assert [t.name for t in manifest.tensors] == sorted(model(MOE))
    assert record.convert_trace is not None
    assert record.convert_trace.place == "sync"
    bad = msgspec.structs.replace(
        minted, version=VersionId(0, 1), files=files | {rank_file(3): files[rank_file(2)]}
    )
    with pytest.raises(Unpublishable, match=r"rank-00003.safetensors has sha256"):
        publisher.publish(bad, record)


@pytest.mark.parametrize(
    ("facts", "tensors", "says"),
    [
        ({"a": ("F31", (1,))}, [], "tensor a has dtype F31"),
        ({"a": ("U8", (2,))}, [("a", b"\0")], r"tensor a has 1 bytes; U8 \[2\] has 2"),
        ({"a": ("U8", (1,))}, [("a", b"\0"), ("a", b"\0")], "tensor a is given twice"),
        ({"a": ("U8", (1,))}, [("b", b"\0")], "tensor b is not announced"),
        ({"a": ("U8", (1,)), "b": ("U8", (1,))}, [("b", b"\0")], "tensor a was announced and not given"),
    ],
)
def test_the_writer_refuses_by_name(tmp_path: Path, facts: Any, tensors: Any, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        write_tensors(tmp_path / "x.safetensors", facts, tensors)
