"""Blockwise FP8 on an NVIDIA GPU: how far its three products are from the emulations, and how fast. Under 5 minutes.

    python bench/gpu_precision.py [--json FILE]

Needs torch and this repository, nothing else. Without a GPU it says so and ends with code 2.

Products: FProp Y = X W^T, DGrad = G W, WGrad = G^T X; activations and gradients in 1x128 tiles, weights in 128x128
blocks. `real` is `numerics.gemm.from_codes`: torch's scaled matmul where the device has one for such blocks (Hopper);
elsewhere it is an emulation, and the column `kernel` says so. QDQ multiplies dequantised operands, held in FP32 or
rounded to BF16, in FP32 (no TF32). Errors are RMS of the difference over RMS of the reference; `exact` is the FP64
product of the BF16 operands. TFLOP/s count 2 M N K, whatever a way does beside.

Quantizers: GB per second of BF16 input, beside a copy on the same device, and bytes against those of the CPU.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import torch_alone  # noqa: F401  (before syncline)

from syncline.contract.schemes import SCHEMES, Scheme
from syncline.numerics import gemm
from syncline.numerics.quantized import Quantized, dequantize, quantize

TILE, BLOCK = SCHEMES["fp8_tile"], SCHEMES["fp8_block"]


@dataclasses.dataclass(frozen=True)
class Size:
    """`tokens` x `k` activations, `n` x `k` weights, `side` x `side` tensors to quantise; timed runs of each way."""

    tokens: int
    k: int
    n: int
    side: int
    runs: int


FULL = Size(tokens=8192, k=4096, n=4096, side=8192, runs=20)
DRY = Size(tokens=256, k=384, n=256, side=256, runs=2)


# ---- products -------------------------------------------------------------------------------------------------
def products(device: torch.device, size: Size) -> list[dict[str, Any]]:
    """One row per product. Rows of activations and gradients differ in size, as tokens do."""
    generator = torch.Generator(device).manual_seed(0)

    def normal(rows: int, columns: int, spread: float, uneven: float) -> torch.Tensor:
        x = torch.randn(rows, columns, generator=generator, device=device) * spread
        return (x * torch.exp2(uneven * torch.randn(rows, 1, generator=generator, device=device))).bfloat16()

    x, w = normal(size.tokens, size.k, 1.0, 1.0), normal(size.n, size.k, 0.02, 0.0)
    g = normal(size.tokens, size.n, 1e-3, 1.0)
    return [
        product("FProp", x, w, BLOCK, size.runs),
        product("DGrad", g, w.T.contiguous(), BLOCK, size.runs),
        product("WGrad", g.T.contiguous(), x.T.contiguous(), TILE, size.runs),
    ]


def product(name: str, left: torch.Tensor, right: torch.Tensor, scheme: Scheme, runs: int) -> dict[str, Any]:
    """left [M, K] times right [N, K] transposed, by each way: errors and TFLOP/s."""
    a, b = quantize(left, TILE, "left"), quantize(right, scheme, "right")
    wide = [dequantize(q).contiguous() for q in (a, b)]
    narrow = [q.bfloat16() for q in wide]
    exact = left.double() @ right.double().T
    qdq = wide[0] @ wide[1].T
    real, output = real_product(a, b)
    plain = left @ right.T
    row: dict[str, Any] = {
        "product": name,
        "shape": [left.shape[0], right.shape[0], left.shape[1]],
        "kernel": gemm.kernel_of(a, stacked(b)),
        "output": output,
        "errors": {
            "real against QDQ in FP32": error(real, qdq),
            "QDQ in FP32, rounded to BF16, against itself": error(qdq.bfloat16(), qdq),
            "QDQ with BF16 operands against QDQ in FP32": error(narrow[0].float() @ narrow[1].float().T, qdq),
            "real against exact": error(real, exact),
            "QDQ in FP32 against exact": error(qdq, exact),
            "BF16 against exact": error(plain, exact),
        },
    }
    del exact, qdq, plain
    ways: dict[str, Callable[[], Any]] = {
        "real": lambda: real_product(a, b),
        "real, quantising both operands": lambda: real_product(
            quantize(left, TILE, "left"), quantize(right, scheme, "right")
        ),
        "QDQ in FP32": lambda: wide[0] @ wide[1].T,
        "QDQ in FP32, quantising and back": lambda: qdq_product(left, right, scheme),
        "BF16": lambda: left @ right.T,
    }
    if row["kernel"].startswith("scaled_mm"):
        ways = {"real, the kernel alone, BF16 out": kernel_alone(a, b), **ways}
    work = 2 * left.shape[0] * left.shape[1] * right.shape[0]
    row["tflops"] = {way: work / seconds(run, runs, left.device) / 1e12 for way, run in ways.items()}
    return row


def stacked(q: Quantized) -> Quantized:
    """A matrix as a stack of one, as `gemm` takes weights."""
    return q._replace(codes=q.codes.unsqueeze(0), scale=q.scale.unsqueeze(0), shape=(1, *q.shape))


def real_product(a: Quantized, b: Quantized) -> tuple[torch.Tensor, str]:
    """From codes and scales, in the widest output that the kernel gives, and that output's name."""
    whole = torch.tensor([a.shape[0]], dtype=torch.int32)
    if REFUSES_FP32:
        return gemm.from_codes(a, stacked(b), whole, torch.bfloat16), "bfloat16"
    try:
        return gemm.from_codes(a, stacked(b), whole, torch.float32), "float32"
    except (RuntimeError, ValueError) as refused:
        REFUSES_FP32.append(str(refused))
        return real_product(a, b)


def kernel_alone(a: Quantized, b: Quantized) -> Callable[[], torch.Tensor]:
    """torch's scaled matmul with scales laid out before: 1x128 by columns, 128x128 with K blocks padded to 4."""
    left = a.scale.T.contiguous().T
    if b.scheme.rows == 1:
        right, recipe = b.scale.T.contiguous().T, F.ScalingType.BlockWise1x128
    else:
        right, recipe = (
            F.pad(b.scale, (0, -b.scale.shape[1] % 4)).contiguous().T,
            F.ScalingType.BlockWise128x128,
        )
    return lambda: F.scaled_mm(
        a.codes, b.codes.T, left, F.ScalingType.BlockWise1x128, right, recipe, output_dtype=torch.bfloat16
    )


REFUSES_FP32: list[str] = []
"""What the kernel said to an FP32 output, once it was asked."""


def qdq_product(left: torch.Tensor, right: torch.Tensor, scheme: Scheme) -> torch.Tensor:
    return dequantize(quantize(left, TILE, "left")) @ dequantize(quantize(right, scheme, "right")).T


def error(found: torch.Tensor, reference: torch.Tensor) -> float:
    """RMS of the difference over RMS of the reference."""
    wide = reference.double()
    return float((found.double() - wide).square().mean().sqrt() / wide.square().mean().sqrt())


# ---- quantizers -----------------------------------------------------------------------------------------------
def quantizers(device: torch.device, size: Size) -> list[dict[str, Any]]:
    """One row per scheme, and first a copy."""
    generator = torch.Generator(device).manual_seed(1)
    x = (torch.randn(size.side, size.side, generator=generator, device=device) * 0.02).bfloat16()
    there, bytes_ = torch.empty_like(x), x.numel() * 2
    copied = seconds(lambda: there.copy_(x), size.runs, device)
    rows: list[dict[str, Any]] = [{"scheme": "copy", "quantize": bytes_ / copied / 1e9}]
    for name, scheme in SCHEMES.items():
        q = quantize(x, scheme, name)
        to = seconds(lambda s=scheme: quantize(x, s), size.runs, device)  # type: ignore[misc]
        back = seconds(lambda q=q: dequantize(q, torch.bfloat16), size.runs, device)  # type: ignore[misc]
        rows.append(
            {
                "scheme": name,
                "quantize": bytes_ / to / 1e9,
                "dequantize": bytes_ / back / 1e9,
                "bytes that differ from the CPU's": differing(x[:512, :1024].contiguous(), scheme),
            }
        )
    return rows


def differing(x: torch.Tensor, scheme: Scheme) -> int:
    """Bytes of codes, scales and dequantised values that this device and the CPU do not share, over many binades."""
    spread = torch.exp2(torch.arange(x.shape[1], device=x.device) % 61 - 30.0)
    x = (x * spread).bfloat16()
    here, there = quantize(x, scheme, "here"), quantize(x.cpu(), scheme, "there")
    pairs = [(here.codes, there.codes), (here.scale, there.scale)]
    pairs += [
        (dequantize(here, dtype), dequantize(there, dtype)) for dtype in (torch.float32, torch.bfloat16)
    ]
    raw = [[t.cpu().contiguous().view(torch.uint8) for t in pair] for pair in pairs]
    return sum(int((a != b).sum()) for a, b in raw)


# ---- time and words -------------------------------------------------------------------------------------------
def seconds(work: Callable[[], Any], runs: int, device: torch.device) -> float:
    """Median of `runs` after three more. On a GPU by its own events."""
    for _ in range(3):
        work()
    took: list[float] = []
    for _ in range(runs):
        if device.type == "cuda":
            start, end = (torch.cuda.Event(enable_timing=True) for _ in "se")  # type: ignore[no-untyped-call]
            start.record()
            work()
            end.record()
            end.synchronize()
            took.append(float(start.elapsed_time(end)) / 1e3)
        else:
            began = time.perf_counter()
            work()
            took.append(time.perf_counter() - began)
    return sorted(took)[len(took) // 2]


def machine(device: torch.device) -> dict[str, Any]:
    facts: dict[str, Any] = {"torch": torch.__version__, "cuda": torch.version.cuda, "device": str(device)}
    if device.type == "cuda":
        facts["gpu"] = torch.cuda.get_device_name(device)
        facts["capability"] = list(torch.cuda.get_device_capability(device))
    return facts


def said(made: dict[str, Any]) -> str:
    """The document as text."""
    lines = [", ".join(f"{key} {value}" for key, value in made["machine"].items())]
    if made["dry"]:
        lines.append(
            "DRY RUN on the CPU: it shows that the script works; no figure of it says anything about a GPU"
        )
    for row in made["products"]:
        m, n, k = row["shape"]
        lines.append(
            f"\n{row['product']} [{m} x {n}, contraction {k}], kernel: {row['kernel']}, {row['output']} out"
        )
        lines += [f"  error    {what:<46} {value:.3e}" for what, value in row["errors"].items()]
        lines += [f"  TFLOP/s  {what:<46} {value:.4g}" for what, value in row["tflops"].items()]
    lines.append("\nGB/s of BF16        quantize  dequantize  bytes that differ from the CPU's")
    for row in made["quantizers"]:
        back, differ = row.get("dequantize"), row.get("bytes that differ from the CPU's", "")
        lines.append(
            f"  {row['scheme']:<16} {row['quantize']:>9.4g}  {'' if back is None else f'{back:.4g}':>10}  {differ}"
        )
    lines += [f"\nan FP32 output was refused: {text}" for text in made["refused"]]
    lines.append(f"\n{made['seconds']:.0f} s")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="write everything there too")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.json is not None and not asked.json.absolute().parent.is_dir():
        parser.error(f"--json {asked.json}: there is no such folder")
    if asked.device == "cuda" and not torch.cuda.is_available():
        print(
            f"gpu_precision: torch {torch.__version__} sees no NVIDIA GPU here; nothing was measured",
            file=sys.stderr,
        )
        raise SystemExit(2)
    device = torch.device(asked.device)
    dry = device.type == "cpu"
    torch.set_float32_matmul_precision("highest")
    began = time.monotonic()
    size = DRY if dry else FULL
    made: dict[str, Any] = {"machine": machine(device), "dry": dry}
    made |= {"products": products(device, size), "quantizers": quantizers(device, size)}
    made |= {"refused": REFUSES_FP32, "seconds": time.monotonic() - began}
    print(said(made))
    if asked.json is not None:
        asked.json.write_text(json.dumps(made, indent=1) + "\n")


if __name__ == "__main__":
    main()
