"""`python -m syncline.lab.policy ARCHITECTURE FOLDER`: train a tiny policy and keep its weights in BF16.

The policies of the same-version tests were made so. A policy in the middle of its training (entropy about 1) is where
precision shows: a fresh one is near uniform, and a finished one so certain that its mean gap is small and its tail
huge. Trained unquantised, so that no format is favoured.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from syncline.lab.pair import Pair, one_thread
from syncline.lab.task import Architecture, model_name, sort_spec, write_models

UPDATES = 66


def train(
    architecture: Architecture, root: Path, updates: int, seed: int, tell: Callable[[str], None]
) -> Path:
    """Train and write the model folder below `root`: config, tokenizer, `model.safetensors`, `made.json`.

    Returns the folder. The same arguments give the same weights on one kind of machine.
    """
    spec = sort_spec(architecture, seed=seed, updates=updates)
    with tempfile.TemporaryDirectory(prefix="syncline-policy-") as scratch:
        models = Path(scratch) / "models"
        write_models(models)
        pair = Pair(spec, models, Path(scratch) / "pair")
        entropy = reward = 0.0
        for update in range(updates):
            pair.publish()
            first = update * spec.batch.groups
            records = pair.sample(range(first, first + spec.batch.groups), spec.batch.group_size)
            rewards = pair.rewards(records)
            result = pair.train(records, rewards).result
            entropy = result.tally.entropy / result.tally.tokens
            reward = sum(r.value for r in rewards.values() if r.value is not None) / len(rewards)
            tell(f"update {update + 1}/{updates}  reward {reward:.3f}  entropy {entropy:.3f}")
        write_models(root, (architecture,))
        folder = root / model_name(architecture)
        exported = Path(scratch) / "exported"
        pair.trainer.export(exported)
        (folder / "model.safetensors").write_bytes((exported / "model.safetensors").read_bytes())
    made = {
        "command": f"python -m syncline.lab.policy {architecture} FOLDER --updates {updates} --seed {seed}",
        "entropy": round(entropy, 3),
        "reward": round(reward, 3),
    }
    (folder / "made.json").write_text(json.dumps(made, indent=2) + "\n")
    return folder


def main(arguments: Sequence[str] | None = None) -> None:
    """See the module."""
    parser = argparse.ArgumentParser(prog="python -m syncline.lab.policy")
    parser.add_argument("architecture", choices=("dense", "moe"))
    parser.add_argument("folder", type=Path, help="model root: the policy becomes a folder in it")
    parser.add_argument("--updates", type=int, default=UPDATES)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(arguments)
    one_thread()
    folder = train(
        args.architecture,
        args.folder,
        args.updates,
        args.seed,
        _progress,
    )
    sys.stdout.write(f"{folder}\n")


def _progress(line: str) -> None:
    sys.stderr.write(line + "\n")


if __name__ == "__main__":
    main()
