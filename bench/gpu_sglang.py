"""An SGLang server on this machine's GPUs beside the trainer in this process: read-back, agreement, seconds.

    python bench/gpu_sglang.py --hardware hopper [--tp 2] [--update buckets] [--model tiny-moe] [--json FILE] [--dry]

At most 5 minutes. SGLang's environment is `.venv-sglang`, or what SYNCLINE_SGLANG names. Without a GPU it says so and
ends with code 2, unless `--dry`, which runs all of it on the CPU: a check of this file, no measurement. BF16 weights.

read-back   each version is hashed by the server and compared, parameter by parameter: a stage that fails says which
agreement   largest |log-prob of decode - trainer's| and |prefill's - trainer's| of the same tokens and version
stage       seconds from a manifest to a server that holds it, of two versions
sampling    tokens per second of one batch
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from syncline.contract.job import JobSpec
from syncline.lab.pair import DRAIN, JOB, KEY, Pair
from syncline.rollout.engines.sglang.local import local_engine

ROOT = Path(__file__).parents[1]
MODELS = ROOT / "examples" / "models"
PYTHON = Path(os.environ.get("SYNCLINE_SGLANG", ROOT / ".venv-sglang" / "bin" / "python")).absolute()
GROUPS, SIZE = 8, 4


def spec(model: str, hardware: str, server: dict[str, Any]) -> JobSpec:
    """Steps large enough to tell versions apart."""
    return JobSpec.model_validate(
        {
            "name": "bench",
            "model": {"name": model},
            "task": {"environment": "characters", "options": {"game": "kind", "alphabet": 36}},
            "sampling": {"max_tokens": 32, "length": "lognormal", "length_median": 16},
            "batch": {"groups": GROUPS, "group_size": SIZE},
            "optimizer": {"lr": 1e-2},
            "schedule": {"mode": "colocated", "max_lag": 0, "in_flight": "drain"},
            "rollout": {"engine": "sglang", "sglang": server},
            "device": {"hardware": hardware},
        }
    )


def measure(model: str, hardware: str, server: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Two versions through the server, with an update between them."""
    asked = spec(model, hardware, server)
    engine = local_engine(asked, MODELS, PYTHON, folder / "worker", JOB, KEY, DRAIN)
    out: dict[str, Any] = {"model": model, "hardware": hardware, **server}
    try:
        pair = Pair(asked, MODELS, folder / "pair", rollout=lambda *_: engine)
        began = time.monotonic()
        engine.process.start()
        engine.process.wait()
        out["start, s"] = time.monotonic() - began
        for number in (0, 1):
            began = time.monotonic()
            pair.publish()
            out[f"stage of version {number}, s"] = time.monotonic() - began
            began = time.monotonic()
            records = pair.sample(range(GROUPS), SIZE)
            tokens = sum(record.sampled for record in records)
            out[f"tokens per second, version {number}"] = tokens / (time.monotonic() - began)
            own, prefill = pair.score_trainer(records), pair.score_rollout(records)
            out[f"decode against trainer, version {number}"] = _furthest([r.logprobs for r in records], own)
            out[f"prefill against trainer, version {number}"] = _furthest(prefill, own)
            if number == 0:
                pair.train(records, pair.rewards(records))
    finally:
        engine.close()
        engine.process.stop()
    return out


def _furthest(left: list[Any], right: list[Any]) -> float:
    pairs = zip(left, right, strict=True)
    return max(abs(float(a) - float(b)) for x, y in pairs for a, b in zip(x, y, strict=True))


def main() -> int:
    """Print the figures; 2 without a GPU, 1 if the server and the trainer do not agree."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hardware", default="hopper", help="as device.hardware")
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--update", default="disk", choices=("disk", "buckets", "group"))
    parser.add_argument("--model", default="tiny-moe", help="a folder of examples/models")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--dry", action="store_true", help="on the CPU: checks this file, measures nothing")
    given = parser.parse_args()
    if not given.dry and not torch.cuda.is_available():
        print("no GPU here: nothing to measure (--dry runs this file on the CPU)", file=sys.stderr)
        return 2
    torch.set_float32_matmul_precision("highest")
    hardware = "cpu" if given.dry else given.hardware
    with tempfile.TemporaryDirectory() as folder:
        figures = measure(given.model, hardware, {"tp": given.tp, "update": given.update}, Path(folder))
    for name, value in figures.items():
        print(f"{name:36} {value}")
    if given.json is not None:
        given.json.write_text(json.dumps(figures, indent=2))
    bound = 1e-4 if given.dry else 0.1  # a GPU's BF16 kernels against FP32 sums: to be learned
    gaps = [value for name, value in figures.items() if " against " in name]
    return 0 if max(gaps) < bound else 1


if __name__ == "__main__":
    sys.exit(main())
