"""Fixed prefixes that each version is scored on, so that a worker can prove that it holds the same weights."""

from __future__ import annotations

import hashlib
from array import array
from pathlib import Path

from syncline.contract.job import JobSpec
from syncline.contract.version_path import Canary
from syncline.environments.environment import load
from syncline.reference.model import TextCodec, model_folder
from syncline.trainer.engine import Sample, TrainerEngine

COUNT = 4
PREFIX = 64  # prompt tokens at most
CONTINUED = 12


def prefixes(spec: JobSpec, models: Path) -> list[Sample]:
    """The first prompts of the data set, each with a continuation that depends on its place alone.

    The continuation is no text: ids spread over the vocabulary touch more of the weights than likely ones.
    """
    folder = model_folder(models, spec.model.name)
    codec = TextCodec(folder.path)
    vocab = int(folder.config.get_text_config(decoder=True).vocab_size)
    environment = load(spec.task, spec.seeds.data)
    samples = []
    for index in range(COUNT):
        prompt = codec.encode(environment.prompt(index).plain())[:PREFIX]
        drawn = hashlib.shake_256(f"canary {index}".encode()).digest(4 * CONTINUED)
        tail = [int.from_bytes(drawn[i : i + 4], "little") % vocab for i in range(0, len(drawn), 4)]
        samples.append(
            Sample(
                trajectory=f"canary {index}",
                tokens=array("i", prompt + tail),
                positions=array("i", range(len(prompt), len(prompt) + CONTINUED)),
                behaviour=array("f", [0.0] * CONTINUED),
                loss_mask=bytes(CONTINUED),
                advantage=0.0,
                temperature=1.0,
            )
        )
    return samples


def score(engine: TrainerEngine, samples: list[Sample]) -> tuple[Canary, ...]:
    """The prefixes with their log-probs under the weights as rollout will hold them."""
    return tuple(
        Canary(tokens=tuple(s.tokens), prompt=s.positions[0], logprobs=tuple(logprobs))
        for s, logprobs in zip(samples, engine.score(samples, as_rollout=True), strict=True)
    )
