"""The Megatron trainer on this machine beside the torch engine: agreement, time of an update, memory. Under 5 minutes.

    python bench/gpu_megatron.py [--tp 2] [--pp 1] [--ep 1] [--dp 1] [--model tiny-moe] [--json FILE] [--dry]

One rank per GPU (`rank % GPUs`). Without a GPU it says so and ends with code 2, unless `--dry`, which runs all of it on
the CPU: a check of this file, and no measurement. FP32 parameters, SGD, no TF32.

agreement   largest |difference| of exported tensors (start: must be 0; after one SGD step), of log-probs, and of the
            gradient norm against the torch engine on the same kind of device
update      median seconds of `step` after two that are not counted; the same batch for both engines
memory      bytes of rank 0's device while awake, and after sleep
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from array import array
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from syncline.contract.job import JobSpec
from syncline.trainer.engine import Sample, TrainerEngine
from syncline.trainer.engines.megatron import ranks
from syncline.trainer.engines.megatron.engine import MegatronEngine
from syncline.trainer.engines.torch import TorchEngine

MODELS = Path(__file__).parents[1] / "examples" / "models"


def spec(model: str, **trainer: Any) -> JobSpec:
    """FP32 and SGD, so that weights move by the gradient."""
    return JobSpec.model_validate(
        {
            "name": "bench",
            "model": {"name": model},
            "precision": {"recipe": "fp32"},
            "optimizer": {"name": "sgd", "lr": 0.1, "clip_norm": 1e9},
            "trainer": trainer,
        }
    )


def batch(count: int, tokens: int) -> list[Sample]:
    """Random ids below 100, the same for everybody; the first quarter of each is the prompt."""
    generator = torch.Generator().manual_seed(0)
    prompt = tokens // 4
    return [
        Sample(
            trajectory=f"t{i}",
            tokens=array("i", torch.randint(3, 100, (tokens,), generator=generator).tolist()),
            positions=array("i", range(prompt, tokens)),
            behaviour=array("f", [-4.6] * (tokens - prompt)),
            loss_mask=bytes([1] * (tokens - prompt)),
            advantage=1.0 if i % 2 else -1.0,
            temperature=1.0,
        )
        for i in range(count)
    ]


def seconds(engine: TrainerEngine, some: list[Sample], runs: int) -> float:
    """Median of `runs` updates."""
    taken = []
    for update in range(runs + 2):
        began = time.perf_counter()
        engine.step(some, update + 1)
        taken.append(time.perf_counter() - began)
    return statistics.median(taken[2:])


def used() -> int:
    """Bytes that torch has reserved on this process's device; 0 without one."""
    return torch.cuda.memory_reserved() if torch.cuda.is_available() else 0


def lone_export(engine: TrainerEngine, folder: Path) -> dict[str, torch.Tensor]:
    """Full tensors, gathered by sync where ranks wrote shards."""
    files = engine.export(folder)
    if "shards.json" not in files:
        return load_file(folder / "model.safetensors")
    from syncline.sync.export import Export
    from syncline.sync.source import source_of

    source = source_of(Export(folder, files), spec("tiny-moe").contract())
    read = {name: source.read(name) for name in source.facts()}
    return {
        n: torch.frombuffer(bytearray(r.data), dtype=torch.float32).reshape(r.shape) for n, r in read.items()
    }


def measure(model: str, parallel: dict[str, int], dry: bool) -> dict[str, Any]:
    """Every figure of this file."""
    some = batch(4, 16) if dry else batch(32, 512)
    runs = 1 if dry else 10
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        mine = MegatronEngine(spec(model, engine="megatron", parallel=parallel), MODELS, folder / "m")
        theirs = TorchEngine(spec(model), MODELS, folder / "t", "cpu" if dry else "cuda")
        mine.wake()
        theirs.wake()
        start = _furthest(lone_export(mine, folder / "m0"), lone_export(theirs, folder / "t0"))
        one, two = mine.step(some, 1), theirs.step(some, 1)
        assert one.grad_norm is not None
        assert two.grad_norm is not None
        pairs = zip(one.logprobs, two.logprobs, strict=True)
        out: dict[str, Any] = {
            "device": mine.describe().device if dry else torch.cuda.get_device_name(),
            "model": model,
            "ranks": parallel,
            "export at the start": start,
            "export after one step": _furthest(
                lone_export(mine, folder / "m1"), lone_export(theirs, folder / "t1")
            ),
            "log-probs": max(abs(a - b) for left, right in pairs for a, b in zip(left, right, strict=True)),
            "gradient norm, relative": abs(one.grad_norm - two.grad_norm) / two.grad_norm,
            "update, s": seconds(mine, some, runs),
            "update of the torch engine, s": seconds(theirs, some, runs),
            "awake, bytes": used(),
        }
        theirs.sleep()
        mine.sleep()
        out["asleep, bytes"] = used()
    while ranks._current:
        ranks._current.pop().close()
    return out


def _furthest(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> float:
    assert left.keys() == right.keys()
    return max(float((left[name] - right[name]).abs().max()) for name in left)


def main() -> int:
    """Print the figures; 2 without a GPU, 1 if the engines do not agree."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for key in ("tp", "pp", "ep", "dp"):
        parser.add_argument(f"--{key}", type=int, default=1)
    parser.add_argument("--model", default="tiny-moe", help="a folder of examples/models")
    parser.add_argument("--json", type=Path)
    parser.add_argument(
        "--dry", action="store_true", help="on the CPU, tiny: checks this file, measures nothing"
    )
    given = parser.parse_args()
    if not given.dry and not torch.cuda.is_available():
        print("no GPU here: nothing to measure (--dry runs this file on the CPU)", file=sys.stderr)
        return 2
    torch.set_float32_matmul_precision("highest")
    figures = measure(given.model, {k: getattr(given, k) for k in ("tp", "pp", "ep", "dp")}, given.dry)
    for name, value in figures.items():
        print(f"{name:32} {value}")
    if given.json is not None:
        given.json.write_text(json.dumps(figures, indent=2))
    agree = figures["export at the start"] == 0 and figures["export after one step"] < 1e-4
    return 0 if agree else 1


if __name__ == "__main__":
    sys.exit(main())
