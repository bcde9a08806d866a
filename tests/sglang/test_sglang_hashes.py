"""The server's hash of CUDA tensors: its own Triton kernel, run in Triton's interpreter, beside the one made here."""

from __future__ import annotations

import os
import subprocess

import torch
from fleet import PYTHON

from syncline.rollout.engines.sglang.hashes import cuda_checksum

SIZES = (1, 3, 4, 1000, 4 * 8192, 4 * 8192 + 2, 9 * 8192 * 4 + 10)
"""Bytes: below a word, whole tiles, and tiles with a part behind them."""

KERNEL = """
import importlib.util, sys, pathlib, torch
where = next(pathlib.Path(p) / "sglang/kernels/ops/memory/gpu_tensor_hash.py" for p in sys.path
             if (pathlib.Path(p) / "sglang/kernels/ops/memory/gpu_tensor_hash.py").is_file())
spec = importlib.util.spec_from_file_location("kernel", where)
kernel = importlib.util.module_from_spec(spec)
spec.loader.exec_module(kernel)
for size in map(int, sys.argv[1:]):
    generator = torch.Generator().manual_seed(size)
    raw = torch.randint(0, 256, (size,), generator=generator, dtype=torch.uint8)
    print(f"{kernel.gpu_tensor_hash(raw):016x}")
"""


def test_the_cuda_hash_is_that_of_the_servers_kernel() -> None:
    # -O leaves out the assertion that the tensor is on a GPU: the interpreter runs the kernel on this one
    told = subprocess.run(
        [str(PYTHON), "-O", "-c", KERNEL, *map(str, SIZES)],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert told.returncode == 0, told.stderr
    made = []
    for size in SIZES:
        generator = torch.Generator().manual_seed(size)
        made.append(cuda_checksum(torch.randint(0, 256, (size,), generator=generator, dtype=torch.uint8)))
    assert told.stdout.split() == made
    assert len(set(made)) == len(made)
