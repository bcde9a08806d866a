"""Score and train step of the torch trainer engine next to TRL's GRPO step, on the same trajectories.

TRL runs in a process of its own (`trl_peer_run.py`, the peers' environment) and steps when it is told to, so that both
take turns, repetition by repetition. It gets the trajectories of `train_step.py` through its `rollout_func`, in place
of sampling, and trains on them as ever: rewards, advantages, shuffling, batches of 16 and of all rows padded to the
longest, loss with entropy, backward, clipping, AdamW. Its fused head makes no logits of prompts and padding.

Of its step everything behind `_prepare_inputs` is counted, so sampling, rewards and advantages are not. It has no pass
for old log-probs where it samples by itself and takes each sample once; with vLLM it has one, with which `score and
train step` compares. `against its step alone` leaves that pass out of TRL's side and not out of ours.

CPU seconds of each process with all its threads; one thread. Ours has BF16 copies of FP32 masters, finite checks and
tallies, TRL FP32 weights and its metrics.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from queue_peers import PEERS
from rows import Row, Say, note, table
from train_step import CASES, LR, model_root, samples
from train_step import cpu as cpu_of
from trl_peer import RUN, order_of, saved

from syncline.contract.job import JobSpec
from syncline.trainer.engine import Sample
from syncline.trainer.engines.torch import TorchEngine

COMMAND = "python bench/trl_step.py"
GROUP = 8


class Stepper:
    """TRL's trainer, stepping on demand."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def step(self) -> dict[str, float]:
        """One optimizer step: CPU seconds by part. Raises `RuntimeError` if it ended."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write("step\n")
        self._process.stdin.flush()
        for line in self._process.stdout:
            if line.startswith("bench {"):
                told: dict[str, float] = json.loads(line.removeprefix("bench "))
                return told
        raise RuntimeError(f"{RUN.name} ended with code {self._process.wait()}")


def measure(
    cases: Sequence[tuple[str, int]] = CASES, repetitions: int = 3, environment: Path = PEERS
) -> list[Row]:
    """The rows of this part; none without the peers' environment. `cases` as in `train_step.py`."""
    torch.set_num_threads(1)
    say = Say("trl_step", COMMAND)
    python = environment / "bin" / "python"
    if not python.exists():
        note(f"trl_step: no {environment.name} (make peers-venv): TRL is left out")
        return say.rows
    with tempfile.TemporaryDirectory(prefix="sl-bench-") as folder:
        models = model_root(Path(folder) / "models")
        for model, count in cases:
            for micro in dict.fromkeys((16, count)):
                _measure(say, python, models, Path(folder), model, count, micro, repetitions)
    return say.rows


def _measure(
    say: Say, python: Path, models: Path, folder: Path, model: str, count: int, micro: int, repetitions: int
) -> None:
    spec = JobSpec.model_validate_json(
        json.dumps(
            {"name": "bench", "model": {"name": model}, "optimizer": {"lr": LR}, "loss": {"entropy": 0.01}}
        )
    )
    ours = TorchEngine(spec, models, folder / f"{model}-{micro}")
    ours.wake()
    todo = samples(count, ours.describe().vocab)
    tokens = sum(len(sample.positions) for sample in todo)
    costs: dict[str, list[float]] = {"score": [], "step": [], "TRL score": [], "TRL step": []}
    ours.score(todo)
    with stepping(python, models, folder, model, todo, micro, repetitions + 1) as trl:
        trl.step()  # the first one pays for what is set up
        for repetition in range(repetitions):
            note(f"trl_step: {model}, batches of {micro}, repetition {repetition + 1} of {repetitions}")
            costs["score"].append(cpu_of(partial(ours.score, todo)))
            costs["step"].append(cpu_of(partial(ours.step, todo, repetition + 1)))
            told = trl.step()
            if told["tokens"] != tokens:
                raise RuntimeError(f"TRL trained on {told['tokens']} tokens of {tokens}")
            costs["TRL score"].append(told["scored"])
            costs["TRL step"].append(told["step"])
        version = str(told["version"])
    _rows(say, f"{model}, {count} trajectories", f"{version}, batches of {micro}", tokens, costs)


def _rows(say: Say, case: str, against: str, tokens: int, costs: dict[str, list[float]]) -> None:
    each = list(zip(*costs.values(), strict=True))
    for figure, ratios in (
        ("score", [t / o for o, _, t, _ in each]),
        ("train step", [t / o for _, o, _, t in each]),
        ("score and train step", [(a + b) / (c + d) for c, d, a, b in each]),
        ("score and train step, against its step alone", [b / (c + d) for c, d, _, b in each]),
    ):
        say.ratio(case, f"tokens per CPU second, {figure}, engine over TRL", ratios, against)
    for who, seconds in costs.items():
        say.time(case, f"CPU, {who}, {against}", seconds, "s")
    say.count(case, "tokens sampled", tokens, "tokens")


@contextmanager
def stepping(
    python: Path, models: Path, folder: Path, model: str, todo: Sequence[Sample], micro: int, steps: int
) -> Iterator[Stepper]:
    """TRL on the trajectories, ready to step; it ends with the context."""
    order = order_of(saved(models, folder / "trl", model, 0), folder, steps, 1, 0) | {
        "samples": [_told(sample) for sample in todo],
        "rows": len(todo),
        "micro": micro,
        "group_size": GROUP,
        "max_tokens": max(len(sample.positions) for sample in todo),
        "entropy": 0.01,
        "lr": LR,
        "warmup": 0,
    }
    file = folder / "order.json"
    file.write_text(json.dumps(order))
    process = subprocess.Popen(
        [str(python), str(RUN), "step", str(file)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        yield Stepper(process)
    finally:
        process.kill()
        process.wait()


def _told(sample: Sample) -> dict[str, Any]:
    first = sample.positions[0]
    return {
        "prompt": list(sample.tokens[:first]),
        "response": list(sample.tokens[first:]),
        "behaviour": list(sample.behaviour),
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=[model for model, _ in CASES], help="this model alone")
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--peers", type=Path, default=PEERS, help="the peers' environment")
    given = parser.parse_args()
    chosen = [case for case in CASES if given.model in (None, case[0])]
    print(table(measure(chosen, given.repetitions, given.peers)))
