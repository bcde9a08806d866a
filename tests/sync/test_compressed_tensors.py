"""INT4, MXFP4 and NVFP4 checkpoints as compressed-tensors reads them: the values that our own loader reads.

These formats are `not run on SGLang` here, whose kernels for them need a GPU. Its loader takes the same tensors under
the same names, and compressed-tensors is the library that defines what they mean.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from conformance.model_exports import converted, tensors_of

from syncline.contract.recipes import RECIPES
from syncline.numerics.quantized import Quantized, dequantize
from syncline.runtime.store import BlobStore
from syncline.sync.convert import Converted

ct = pytest.importorskip("compressed_tensors", reason="needs compressed-tensors (extra bench-peers)")
TORCH = {"U8": torch.uint8, "I32": torch.int32, "I64": torch.int64, "F32": torch.float32}
TORCH |= {"F8_E4M3": torch.float8_e4m3fn}


def parts_of(done: Converted, store: BlobStore, name: str) -> dict[str, torch.Tensor]:
    """The checkpoint tensors of weight `name`, by suffix."""
    return {
        t.name.removeprefix(name): torch.frombuffer(store.read(t.digest), dtype=TORCH[t.dtype]).reshape(
            t.shape
        )
        for t in done.tensors
        if (t.source or t.name) == name
    }


def theirs(found: dict[str, torch.Tensor], form: str, shape: tuple[int, int]) -> torch.Tensor:
    """float32 values, every step but the last product by compressed-tensors."""
    if form == "int4":
        from compressed_tensors.compressors.pack_quantized.helpers import unpack_from_int32

        codes: torch.Tensor = unpack_from_int32(found["_packed"], 4, torch.Size(found["_shape"].tolist()))
        return codes.float() * found["_scale"].repeat_interleave(32, 1)
    from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8

    packed = found["_packed" if form == "mxfp4" else ""]
    values: torch.Tensor = unpack_fp4_from_uint8(packed, *shape, dtype=torch.float32)
    if form == "mxfp4":
        return values * torch.exp2(found["_scale"].float() - 127).repeat_interleave(32, 1)
    scale = found["_scale"].float() * found["_scale_2"]
    return values * scale.repeat_interleave(16, 1)


@pytest.mark.parametrize(
    ("recipe", "form"), [("int4_qat_w4a16", "int4"), ("mxfp4_qat_w4a16", "mxfp4"), ("nvfp4_w4a4", "nvfp4")]
)
def test_both_loaders_read_the_same_values(tmp_path: Path, recipe: str, form: str) -> None:
    store = BlobStore(tmp_path / "store")
    done, _ = converted(tmp_path / "e", "tiny-moe", tensors_of("tiny-moe"), RECIPES[recipe], store)
    for entry in done.plan.low_bit():
        assert entry.weight is not None
        found = parts_of(done, store, entry.name)
        n, k = entry.shape
        codes: Any = found["_packed" if form != "nvfp4" else ""]
        own = dequantize(Quantized(entry.weight, codes, found["_scale"], found.get("_scale_2"), (n, k)))
        assert torch.equal(own, theirs(found, form, (n, k))), entry.name
