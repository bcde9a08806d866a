"""TRL's GRPO trainer on CPU, run by an interpreter of its own (`.venv-peers`); it knows nothing of this project.

    python bench/trl_peer_run.py race ORDER.json     trains on a task until its steps are over
    python bench/trl_peer_run.py step ORDER.json     steps on given samples, one for each line of its standard input

Prints lines of JSON behind the word `bench`. CPU seconds are of this process with all its threads; clocks begin where
`trainer.train()` is called, so that imports and the model's loading count for nobody.

The trainer is TRL's as it comes; a subclass reads the clock around its parts. What TRL sets by itself and is changed
here: float32 instead of bfloat16 and no gradient checkpointing (both would make it slower), no auxiliary loss of the
router, no reports, no checkpoints.
"""

from __future__ import annotations

import json
import logging
import sys
import time
import warnings
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

Answer = dict[str, Any]


class Timed(GRPOTrainer):  # type: ignore[misc]
    """TRL's trainer with a clock. `prepared`: CPU seconds of generation, rewards and advantages of this step;
    `scored`: those of a pass for the old log-probs, which TRL makes where sampler and trainer may differ."""

    prepared = scored = 0.0
    scores = False

    def _prepare_inputs(self, generation_batch: Any) -> Any:
        began = time.process_time()
        inputs = super()._prepare_inputs(generation_batch)
        self.prepared += time.process_time() - began
        return inputs

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        out = super()._generate_and_score_completions(inputs)
        if self.scores:  # as `_generate_and_score_completions` does it, if it does
            began = time.process_time()
            with torch.no_grad():
                old, _, _ = self._get_per_token_logps_and_entropies(
                    self.model,
                    torch.cat([out["prompt_ids"], out["completion_ids"]], dim=1),
                    torch.cat([out["prompt_mask"], out["completion_mask"]], dim=1),
                    out["completion_ids"].size(1),
                    batch_size=self.args.per_device_train_batch_size,
                )
            out["old_per_token_logps"] = old
            self.scored += time.process_time() - began
        return out


class Clock(TrainerCallback):
    """Notes each optimizer step. `asked`: waits for a line of standard input before it, tells of it behind it."""

    def __init__(self, rewards: Rewards, asked: bool) -> None:
        self.trainer: Timed | None = None
        self.steps: list[Answer] = []
        self._rewards, self._asked = rewards, asked
        self._wall = self._cpu = self._began = self.began = 0.0

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._wall, self._cpu = time.perf_counter(), time.process_time()
        self.began = time.time()

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._asked and not sys.stdin.readline().strip():
            control.should_training_stop = True
        assert self.trainer is not None
        self.trainer.prepared = self.trainer.scored = 0.0
        self._began = time.process_time()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        assert self.trainer is not None
        now, prepared, scored = time.process_time(), self.trainer.prepared, self.trainer.scored
        step = {
            "seconds": time.perf_counter() - self._wall,
            "cpu": now - self._cpu,
            "step": now - self._began - prepared,
            "prepared": prepared - scored,
            "scored": scored,
            "reward": self._rewards.mean,
            "tokens": self._rewards.tokens,
            "version": f"TRL {version('trl')}",
        }
        self.steps.append(step)
        if self._asked:
            tell(step)


class Rewards:
    """The game `kind` as a reward function of TRL: the share of positions whose symbol is of the prompt's kind."""

    __name__ = "kind"

    def __init__(self, length: int) -> None:
        self.mean, self.tokens, self._length = 0.0, 0, length

    def __call__(self, prompts: Any, completions: Any, completion_ids: Any, **kwargs: Any) -> list[float]:
        given = [self._score(p, c) for p, c in zip(prompts, completions, strict=True)]
        self.mean, self.tokens = sum(given) / len(given), sum(map(len, completion_ids))
        return given

    def _score(self, prompt: str, text: str) -> float:
        digit, legal = prompt[-2].isdigit(), "abcdefghijklmnopqrstuvwxyz0123456789"
        right = sum(c in legal and c.isdigit() == digit for c in text[: self._length])
        return right / max(self._length, len(text))


class Given(Rewards):
    """Rewards that came with the order, in turns, so that advantages have both signs."""

    __name__ = "given"

    def __init__(self) -> None:
        super().__init__(1)

    def __call__(self, prompts: Any, completions: Any, completion_ids: Any, **kwargs: Any) -> list[float]:
        given = [float(i % 2) for i in range(len(prompts))]
        self.mean, self.tokens = 0.5, sum(map(len, completion_ids))
        return given


def race(order: Answer) -> Answer:
    """Train on the prompts of `order`, in their order; every step's clock and mean reward."""
    rewards = Rewards(order["length"])
    trainer, clock = made(order, rewards, Dataset.from_dict({"prompt": order["prompts"]}), asked=False)
    trainer.train()
    return {"version": f"TRL {version('trl')}", "steps": clock.steps, "began": clock.began}


def step(order: Answer) -> Answer:
    """Steps on the samples of `order`, which TRL takes in place of sampling (`rollout_func`)."""
    rows = order["samples"]

    def rollout(prompts: list[str], trainer: Any) -> Answer:
        return {
            "prompt_ids": [row["prompt"] for row in rows],
            "completion_ids": [row["response"] for row in rows],
            "logprobs": [row["behaviour"] for row in rows],
        }

    prompts = ["a"] * (len(rows) // order["group_size"] * order["steps"])
    trainer, _ = made(order, Given(), Dataset.from_dict({"prompt": prompts}), True, rollout_func=rollout)
    trainer.scores = True
    trainer.train()
    return {"version": f"TRL {version('trl')}"}


def made(order: Answer, rewards: Rewards, prompts: Dataset, asked: bool, **more: Any) -> tuple[Timed, Clock]:
    """The trainer of an order."""
    model = AutoModelForCausalLM.from_pretrained(order["model"], dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(order["model"])
    clock = Clock(rewards, asked)
    trainer = Timed(
        model=model,
        reward_funcs=rewards,
        args=configured(order),
        train_dataset=prompts,
        processing_class=tokenizer,
        callbacks=[clock],
        **more,
    )
    clock.trainer = trainer
    return trainer, clock


def configured(order: Answer) -> GRPOConfig:
    """The job's settings in TRL's words."""
    count = order["rows"]
    sparse = {"router_aux_loss_coef": 0.0} if order["experts"] else {}
    return GRPOConfig(
        output_dir=order["scratch"],
        max_steps=order["steps"],
        per_device_train_batch_size=order["micro"],
        gradient_accumulation_steps=count // order["micro"],
        num_generations=order["group_size"],
        max_completion_length=order["max_tokens"],
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        beta=0.0,
        loss_type="dapo",  # the mean over all tokens of the step
        scale_rewards="group",
        epsilon=0.2,
        entropy_coef=order["entropy"],
        learning_rate=order["lr"],
        lr_scheduler_type="constant_with_warmup",
        warmup_steps=order["warmup"],
        adam_beta1=0.9,
        adam_beta2=0.98,
        weight_decay=0.0,
        max_grad_norm=1.0,
        shuffle_dataset=False,
        seed=order["seed"],
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        report_to="none",
        logging_strategy="no",
        save_strategy="no",
        disable_tqdm=True,
        **sparse,
    )


def tell(answer: Answer) -> None:
    print("bench " + json.dumps(answer), flush=True)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    given: Answer = json.loads(Path(sys.argv[2]).read_text())
    torch.set_num_threads(given["threads"])
    tell({"race": race, "step": step}[sys.argv[1]](given))
