"""Score and train step of the torch trainer engine, next to a plain torch loop with padding.

Both run in this process, repetition by repetition: the same model from the same weights (BF16 values), the same
trajectories of mixed length, PPO's clipped loss, AdamW, one thread. The plain loop is what one writes first: batches of
16 in order of arrival, padded to their longest row, logits and log-softmax of every position, a mask over the loss.
The engine does its usual work beside: BF16 copies of FP32 masters, finite checks, entropy and the tally of the loss.

Ratios are of CPU seconds of the whole process, which a busy machine stretches less than wall-clock seconds. Tokens are
sampled tokens.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import tempfile
import time
from array import array
from collections.abc import Callable, Sequence
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from engine import load
from rows import MODELS, Row, Say, note, table
from torch import Tensor

from syncline.contract.job import JobSpec
from syncline.reference.model import load_model, round_to_bf16
from syncline.trainer.engine import Sample
from syncline.trainer.engines.torch import TorchEngine

COMMAND = "python bench/train_step.py"
PLAIN_ROWS = 16
LR, CLIP = 1e-6, 1.0
DENSE: dict[str, Any] = {  # 30 million parameters
    "vocab_size": 32000,
    "hidden_size": 384,
    "intermediate_size": 1536,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "head_dim": 64,
    "num_hidden_layers": 8,
}
CASES = (("tiny-moe", 64), ("dense-30m", 16))


def measure(cases: Sequence[tuple[str, int]] = CASES, repetitions: int = 3) -> list[Row]:
    """The rows of this part. `cases`: model, and trajectories of an update."""
    torch.set_num_threads(1)
    say = Say("train_step", COMMAND)
    with tempfile.TemporaryDirectory(prefix="sl-bench-") as folder:
        models = model_root(Path(folder) / "models")
        for model, count in cases:
            _measure(say, models, Path(folder) / model, model, count, repetitions)
    return say.rows


def model_root(models: Path) -> Path:
    """The tiny models and `dense-30m`."""
    for name in ("tiny-moe", "dense-30m"):
        shutil.copytree(MODELS / ("tiny-dense" if name == "dense-30m" else name), models / name)
    file = models / "dense-30m" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | DENSE))
    return models


def _measure(say: Say, models: Path, scratch: Path, model: str, count: int, repetitions: int) -> None:
    spec = JobSpec.model_validate_json(
        json.dumps(
            {
                "name": "bench",
                "model": {"name": model},
                "optimizer": {"name": "adamw", "lr": LR, "clip_norm": CLIP},
            }
        )
    )
    ours = TorchEngine(spec, models, scratch)
    ours.wake()
    plain = Plain(models, spec)
    todo = samples(count, plain.vocab)
    gap = worst(ours.score(todo), plain.score(todo))
    costs: dict[str, list[float]] = {"our score": [], "plain score": [], "our step": [], "plain step": []}
    for repetition in range(repetitions):
        note(f"train step: {model}, repetition {repetition + 1} of {repetitions}")
        costs["our score"].append(cpu(partial(ours.score, todo)))
        costs["plain score"].append(cpu(partial(plain.score, todo)))
        costs["our step"].append(cpu(partial(ours.step, todo, repetition + 1)))
        costs["plain step"].append(cpu(partial(plain.step, todo)))
    tokens = sum(len(sample.positions) for sample in todo)
    case = f"{model}, {count} trajectories"
    against = f"a plain loop over torch {version('torch')}, padded batches of {PLAIN_ROWS}"
    both = {
        who: [a + b for a, b in zip(costs[f"{who} score"], costs[f"{who} step"], strict=True)]
        for who in ("our", "plain")
    }
    for what, mine, theirs in (
        ("score", costs["our score"], costs["plain score"]),
        ("train step", costs["our step"], costs["plain step"]),
        ("score and train step", both["our"], both["plain"]),
    ):
        ratios = [p / o for o, p in zip(mine, theirs, strict=True)]
        say.ratio(case, f"tokens per CPU second, {what}, engine over plain", ratios, against)
    say.count(case, "tokens sampled", tokens, "tokens")
    say.count(case, "largest log-prob difference to the plain loop", gap, "nats")
    for who, seconds in both.items():
        say.time(
            case, f"tokens per CPU second, score and step, {who}", [tokens / s for s in seconds], "tokens/s"
        )


def samples(count: int, vocab: int) -> list[Sample]:
    """Trajectories as long as those of `engine.py`, with advantages of both signs."""
    drawn, out = random.Random(1), []
    todo = load(count, vocab)
    for i, (prompt, length) in enumerate(zip(todo.prompts, todo.lengths, strict=True)):
        response = [drawn.randrange(4, vocab) for _ in range(length)]
        out.append(
            Sample(
                trajectory=f"t{i}",
                tokens=array("i", [*prompt, *response]),
                positions=array("i", range(len(prompt), len(prompt) + length)),
                behaviour=array("f", [-4.6 + 0.1 * drawn.random() for _ in range(length)]),
                loss_mask=bytes([1] * length),
                advantage=1.0 if i % 2 else -0.5,
                temperature=1.0,
            )
        )
    return out


# ---- the plain loop ------------------------------------------------------------------------------------------
class Plain:
    """A policy gradient in torch as one writes it first."""

    def __init__(self, models: Path, spec: JobSpec) -> None:
        loaded = load_model(models, spec.model, spec.seeds.model)
        round_to_bf16(loaded.model)
        self.vocab = loaded.vocab
        self._model, self._loss = loaded.model, spec.loss
        self._optimizer = torch.optim.AdamW(
            self._model.parameters(),
            lr=LR,
            betas=spec.optimizer.betas,
            weight_decay=spec.optimizer.weight_decay,
        )

    def score(self, todo: Sequence[Sample]) -> list[list[float]]:
        out: list[list[float]] = []
        with torch.no_grad():
            for at in range(0, len(todo), PLAIN_ROWS):
                part = todo[at : at + PLAIN_ROWS]
                logprobs_BT = self._logprobs(part)
                out += [logprobs_BT[b][[p - 1 for p in s.positions]].tolist() for b, s in enumerate(part)]
        return out

    def step(self, todo: Sequence[Sample]) -> None:
        tokens = sum(sum(s.loss_mask) for s in todo)
        for at in range(0, len(todo), PLAIN_ROWS):
            part = todo[at : at + PLAIN_ROWS]
            logprobs_BT = self._logprobs(part)
            mask_BT, old_BT = torch.zeros_like(logprobs_BT), torch.zeros_like(logprobs_BT)
            for b, sample in enumerate(part):
                columns = [p - 1 for p in sample.positions]
                mask_BT[b, columns] = 1.0
                old_BT[b, columns] = torch.tensor(sample.behaviour)
            advantages_B1 = torch.tensor([s.advantage for s in part])[:, None]
            ratio_BT = ((logprobs_BT - old_BT) * mask_BT).exp()
            clipped_BT = ratio_BT.clamp(1 - self._loss.clip_low, 1 + self._loss.clip_high)
            loss_BT = -torch.minimum(ratio_BT * advantages_B1, clipped_BT * advantages_B1)
            ((loss_BT * mask_BT).sum() / tokens).backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self._model.parameters(), CLIP)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)

    def _logprobs(self, part: Sequence[Sample]) -> Tensor:
        """Of each token but the first, [B, T - 1]."""
        width = max(len(s.tokens) for s in part)
        ids_BT = torch.tensor([list(s.tokens) + [0] * (width - len(s.tokens)) for s in part])
        mask_BT = torch.tensor([[1] * len(s.tokens) + [0] * (width - len(s.tokens)) for s in part])
        logits_BTV = self._model(input_ids=ids_BT, attention_mask=mask_BT, use_cache=False).logits
        logprobs_BTV = torch.log_softmax(logits_BTV[:, :-1], dim=-1)
        return logprobs_BTV.gather(-1, ids_BT[:, 1:, None])[..., 0]


def worst(ours: Sequence[Sequence[float]], plain: Sequence[Sequence[float]]) -> float:
    """Largest difference."""
    return max(
        abs(a - b) for one, other in zip(ours, plain, strict=True) for a, b in zip(one, other, strict=True)
    )


def cpu(run: Callable[[], object]) -> float:
    """CPU seconds of this process, all its threads."""
    began = time.process_time()
    run()
    return time.process_time() - began


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=[model for model, _ in CASES], help="this model alone")
    parser.add_argument("--repetitions", type=int, default=3)
    given = parser.parse_args()
    chosen = [case for case in CASES if given.model in (None, case[0])]
    print(table(measure(chosen, given.repetitions)))
