"""Conversion: exact rounding, the same bytes every time, and a name in every refusal."""

from __future__ import annotations

import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from exports import write
from hypothesis import given, settings
from hypothesis import strategies as st

from syncline.contract.recipes import RECIPES
from syncline.runtime.store import BlobStore
from syncline.sync.convert import Converted, convert
from syncline.sync.export import BadExport, Export, NonFinite

F32_MAX_BF16 = np.uint32(0x7F7F0000).view(np.float32)


def converted(tmp_path: Path, parts: dict[str, Any], config: dict[str, Any] | None = None) -> Converted:
    files = write(tmp_path / "e", parts, config or {"tie_word_embeddings": False})
    export = Export(tmp_path / "e", files)
    try:
        return convert(export, RECIPES["bf16"], BlobStore(tmp_path / "store"))
    finally:
        export.close()


@given(bits=st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=300))
@settings(max_examples=150, deadline=None)
def test_rounding_is_torchs(tmp_path_factory: pytest.TempPathFactory, bits: list[int]) -> None:
    """Every finite FP32 bit pattern rounds as an independent cast does; the others are refused."""
    tmp_path = tmp_path_factory.mktemp("c")
    values = np.array(bits, "<u4").view("<f4")
    expected = torch.from_numpy(values.copy()).to(torch.bfloat16)
    if not bool(torch.isfinite(expected).all()):
        index = int((~torch.isfinite(expected)).to(torch.uint8).argmax())
        with pytest.raises(NonFinite, match=f"tensor w .* flat index {index} "):
            converted(tmp_path, {"w": values})
        return
    done = converted(tmp_path, {"w": values})
    assert done.tensors[0].dtype == "BF16"
    raw = bytes(BlobStore(tmp_path / "store").read(done.tensors[0].digest))
    assert raw == expected.view(torch.int16).numpy().tobytes()


def test_all_halves_widen_and_round(tmp_path: Path) -> None:
    """All 63,488 finite FP16 values, subnormals and both zeros included."""
    halves = np.arange(65536, dtype="<u2").view("<f2")
    halves = halves[np.isfinite(halves)]
    done = converted(tmp_path, {"w": halves})
    expected = torch.from_numpy(halves.copy()).to(torch.bfloat16).view(torch.int16).numpy().tobytes()
    assert bytes(BlobStore(tmp_path / "store").read(done.tensors[0].digest)) == expected


@pytest.mark.parametrize(
    ("part", "says"),
    [
        (np.array([0, 1, np.nan, np.inf], "<f4"), "nan at flat index 2"),
        (np.array([[0, 1], [2, -np.inf]], "<f4"), "-inf at flat index 3"),
        (np.array([0, np.inf], "<f2"), "inf at flat index 1"),
        (("bfloat16", np.array([0, 0x7F80], "<u2")), "inf at flat index 1"),
        (np.array([3.39e38, 3.4028235e38], "<f4"), "rounds to infinity in BF16 at flat index 1"),
    ],
)
def test_non_finite_is_refused_by_name_and_index(tmp_path: Path, part: Any, says: str) -> None:
    with pytest.raises(NonFinite, match=f"tensor model.w is .*{says}"):
        converted(tmp_path, {"model.w": part})


def test_the_last_finite_value_passes(tmp_path: Path) -> None:
    done = converted(tmp_path, {"w": np.array([F32_MAX_BF16], "<f4")})
    assert bytes(BlobStore(tmp_path / "store").read(done.tensors[0].digest)) == b"\x7f\x7f"


def test_integers_pass_and_doubles_do_not(tmp_path: Path) -> None:
    parts = {"i": np.array([1, -2], "<i8"), "b": np.array([True, False])}
    done = converted(tmp_path, parts)
    assert [(t.name, t.dtype, t.nbytes) for t in done.tensors] == [("b", "BOOL", 2), ("i", "I64", 16)]
    with pytest.raises(BadExport, match="tensor d has dtype F64"):
        converted(tmp_path, {"d": np.zeros(2, "<f8")})


def test_odd_shapes(tmp_path: Path) -> None:
    parts = {
        "scalar": np.float32(1.5).reshape(()),
        "none": np.zeros((0, 4), "<f4"),
        "odd": np.ones((3, 5, 7), "<f4"),
    }
    done = converted(tmp_path, parts)
    assert [(t.name, t.shape, t.nbytes) for t in done.tensors] == [
        ("none", (0, 4), 0),
        ("odd", (3, 5, 7), 210),
        ("scalar", (), 2),
    ]


def test_again_is_the_same(tmp_path: Path) -> None:
    parts = {"b": np.arange(40, dtype="<f4"), "a": np.ones(3, "<f4")}
    first = converted(tmp_path, dict(parts))
    second = converted(tmp_path, dict(parts))
    assert first.tensors == second.tensors
    assert (first.new_bytes, second.new_bytes) == (86, 0)


EMBED = "model.embed_tokens.weight"


def test_a_redundant_head_is_tied_again(tmp_path: Path) -> None:
    same = np.arange(8, dtype="<f4").reshape(4, 2)
    done = converted(tmp_path, {EMBED: same, "lm_head.weight": same.copy()}, {"tie_word_embeddings": True})
    assert [t.name for t in done.tensors] == [EMBED]
    assert done.ties == (("lm_head.weight", EMBED),)


def test_copies_that_differ_are_refused_by_name(tmp_path: Path) -> None:
    parts = {EMBED: np.ones((4, 2), "<f4"), "lm_head.weight": np.zeros((4, 2), "<f4")}
    with pytest.raises(BadExport, match=rf"lm_head\.weight to {EMBED}"):
        converted(tmp_path, dict(parts), {"text_config": {"tie_word_embeddings": True}})
    assert converted(tmp_path, dict(parts), {"tie_word_embeddings": False}).ties == ()
    assert len(converted(tmp_path, dict(parts), {"model_type": "x"}).tensors) == 2


@pytest.mark.parametrize("config", [{"tie_word_embeddings": True}, {"model_type": "gpt2"}])
def test_an_absent_head_is_tied(tmp_path: Path, config: dict[str, Any]) -> None:
    assert converted(tmp_path, {EMBED: np.ones((4, 2), "<f4")}, config).ties == (("lm_head.weight", EMBED),)


def test_a_tie_without_an_embedding_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadExport, match="tie_word_embeddings with embeddings"):
        converted(tmp_path, {"w": np.ones(2, "<f4")}, {"tie_word_embeddings": True})


def test_a_file_replaced_after_stamping_is_found(tmp_path: Path) -> None:
    files = write(tmp_path / "e", {"w": np.ones(2, "<f4")})
    write(tmp_path / "e", {"w": np.zeros(2, "<f4")})
    with pytest.raises(BadExport, match=r"model\.safetensors has sha256"):
        Export(tmp_path / "e", files)


def test_files_nobody_stamped_or_that_lie_elsewhere(tmp_path: Path) -> None:
    files = write(tmp_path / "e", {"w": np.ones(2, "<f4")})
    with pytest.raises(BadExport, match="not a plain file name"):
        Export(tmp_path / "e", {"../key": "0" * 64, **files})
    (tmp_path / "e" / "more.safetensors").write_bytes(b"x")
    with pytest.raises(BadExport, match=r"more\.safetensors is not among"):
        Export(tmp_path / "e", files)
    (tmp_path / "e" / "more.safetensors").unlink()
    (tmp_path / "e" / "config.json").unlink()
    (tmp_path / "e" / "config.json").symlink_to("/etc/hostname")
    with pytest.raises(BadExport, match=r"config\.json"):
        Export(tmp_path / "e", files)
    with pytest.raises(BadExport, match="No such file"):
        Export(tmp_path / "gone", files)


@given(cut=st.integers(0, 200))
@settings(max_examples=30, deadline=None)
def test_a_torn_file_is_refused(tmp_path_factory: pytest.TempPathFactory, cut: int) -> None:
    """However a safetensors file is cut, with a digest that matches the torn file."""
    import hashlib

    tmp_path = tmp_path_factory.mktemp("t")
    files = write(tmp_path / "e", {"w": np.arange(30, dtype="<f4")})
    path = tmp_path / "e" / "model.safetensors"
    torn = path.read_bytes()[: min(cut, path.stat().st_size - 1)]
    path.write_bytes(torn)
    with pytest.raises(BadExport):
        list(
            Export(tmp_path / "e", {**files, "model.safetensors": hashlib.sha256(torn).hexdigest()}).tensors()
        )


def test_memory_is_bounded_by_the_largest_tensor(tmp_path: Path) -> None:
    """Twelve tensors of 4 MB: the peak stays below two of them plus the chunks."""
    parts: dict[str, Any] = {f"w{i}": np.full(1 << 20, i, "<f4") for i in range(12)}
    files = write(tmp_path / "e", parts)
    del parts
    export = Export(tmp_path / "e", files)
    tracemalloc.start()
    convert(export, RECIPES["bf16"], BlobStore(tmp_path / "store"))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    export.close()
    assert peak < 2 * (4 << 20) + 3 * (4 << 20)
