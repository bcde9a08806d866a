"""The GPU script without a GPU: it says so; and its logic on a small size, with torch alone."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).parents[2] / "bench" / "gpu_precision.py"
ALONE = """
import runpy, sys
for name in ("msgspec", "pydantic", "numba", "redis", "transformers"):
    sys.modules[name] = None
sys.argv = ["gpu_precision.py", "--device", "cpu", "--json", sys.argv[2]]
sys.path[0] = {folder!r}
runpy.run_path({script!r}, run_name="__main__")
"""


def test_without_a_gpu_it_says_so_and_measures_nothing(tmp_path: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    path = tmp_path / "figures.json"
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--json", str(path)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert "sees no NVIDIA GPU here; nothing was measured" in done.stderr
    assert done.stdout == ""
    assert not path.exists()


def test_it_runs_with_torch_alone_and_names_its_emulation(tmp_path: Path) -> None:
    """On the CPU the products are emulated and say so; codes multiply to what their values do."""
    path = tmp_path / "figures.json"
    code = ALONE.format(folder=str(SCRIPT.parent), script=str(SCRIPT))
    done = subprocess.run(
        [sys.executable, "-c", code, "-", str(path)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "DRY RUN" in done.stdout
    made = json.loads(path.read_text())
    assert made["dry"] is True
    assert [row["product"] for row in made["products"]] == ["FProp", "DGrad", "WGrad"]
    for row in made["products"]:
        assert row["kernel"] == "emulated codes, fp32 partial sums"
        assert row["errors"]["real against QDQ in FP32"] < 1e-6
        assert 0.01 < row["errors"]["QDQ in FP32 against exact"] < 0.06, "E4M3 operands cost a few per cent"
        assert row["errors"]["BF16 against exact"] < 3e-3
        assert all(math.isfinite(value) and value > 0 for value in row["tflops"].values())
        assert not any("kernel alone" in way for way in row["tflops"]), "there is no such kernel here"
    assert made["quantizers"][0]["scheme"] == "copy"
    for row in made["quantizers"][1:]:
        assert row["bytes that differ from the CPU's"] == 0
        assert row["quantize"] > 0
        assert row["dequantize"] > 0


LAYOUTS = """
import sys
sys.path.insert(0, {folder!r})
import torch, torch.nn.functional as F, gpu_precision as gpu
from syncline.numerics.quantized import quantize

def meta(q):
    return q._replace(codes=q.codes.to("meta"), scale=q.scale.to("meta"))

for tokens, k, n in ((512, 384, 256), (128, 1024, 512)):
    a = meta(quantize(torch.randn(tokens, k), gpu.TILE, "a"))
    for scheme in (gpu.BLOCK, gpu.TILE):
        b = meta(quantize(torch.randn(n, k), scheme, "b"))
        assert gpu.kernel_alone(a, b)().shape == (tokens, n)
try:  # scales as they lie in memory
    tile, block = F.ScalingType.BlockWise1x128, F.ScalingType.BlockWise128x128
    F.scaled_mm(a.codes, b.codes.T, a.scale, tile, b.scale, block)
except RuntimeError as refused:
    print("refused:", refused)
"""


def test_the_layouts_of_the_real_kernel_are_those_that_torch_asks_for() -> None:
    """Without a GPU: torch checks shapes and strides on the device "meta", and refuses others."""
    code = LAYOUTS.format(folder=str(SCRIPT.parent))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("refused: For 1x128 x 128x128 blockwise scaling")
