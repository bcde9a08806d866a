"""A cold engine: scores a trajectory's tokens under any version, without a line of the rollout engine.

The weights come from the store's blobs through `transformers.from_pretrained`, the log-probabilities from plain
forward passes. What it says of a version is therefore no echo of what the engine reported.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from syncline.contract.token_path import Trajectory
from syncline.contract.version_path import VersionId, VersionManifest, opened
from syncline.runtime.store import BlobStore

_DTYPES = {"BF16": torch.bfloat16, "F32": torch.float32}


def manifest(run: Path, version: VersionId) -> VersionManifest:
    """The signed manifest of `version` in the job folder `run`, opened with the job's key."""
    return opened(BlobStore(run / "store").read_manifest(version), (run / "key").read_bytes())


@lru_cache(maxsize=64)
def model(run: Path, version: VersionId, config: Path) -> Any:
    """A `transformers` model that holds `version`, loaded as a stranger would load the checkpoint."""
    from transformers import AutoModelForCausalLM

    folder = run / "cold" / str(version)
    folder.mkdir(parents=True, exist_ok=True)
    store = BlobStore(run / "store")
    tensors = {
        entry.name: torch.frombuffer(bytearray(store.read(entry.digest)), dtype=_DTYPES[entry.dtype])
        .reshape(entry.shape)
        .clone()
        for entry in manifest(run, version).tensors
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(json.loads(config.read_text())))
    loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return loaded.train(False)


def _gather(logits_TV: torch.Tensor, ids: Sequence[int], temperature: float) -> list[float]:
    logprobs_TV = torch.log_softmax(logits_TV.float() / temperature, dim=-1)
    return [float(logprobs_TV[i, token]) for i, token in enumerate(ids)]


@torch.no_grad()
def score_span(
    run: Path, config: Path, t: Trajectory, span: int, under: VersionId | None = None
) -> list[float]:
    """Log-probs of the tokens of span `span`, as a cold engine computes them.

    under   the version held while the span is scored; None: the version that the span names. Earlier spans of a
            carried context keep the versions they name, since their KV was made by those.
    """
    prompt = t.segments[0].end
    target = t.spans[span]
    version = under or target.version
    ids = list(t.tokens)
    if target.context == "recomputed":
        held = model(run, version, config)
        end = prompt + target.end
        logits = held(torch.tensor([ids[:end]])).logits[0]
        rows = logits[prompt + target.start - 1 : end - 1]
        return _gather(rows, ids[prompt + target.start : end], t.convention.temperature)
    return _score_carried(run, config, t, span, version)


def _score_carried(run: Path, config: Path, t: Trajectory, span: int, version: VersionId) -> list[float]:
    """Replay the KV history: the context since the last recomputation was fed under the versions that fed it."""
    from transformers import DynamicCache

    prompt = t.segments[0].end
    ids = list(t.tokens)
    first = span
    while first > 0 and t.spans[first].context == "carried":
        first -= 1
    cache = DynamicCache(config=model(run, t.spans[first].version, config).config)
    fed = 0
    rows: list[torch.Tensor] = []
    for number in range(first, span + 1):
        part = t.spans[number]
        held = model(run, version if number == span else part.version, config)
        # the span's engine feeds everything but its last sampled token, which the next span's engine feeds
        until = prompt + part.end - 1
        logits = held(torch.tensor([ids[fed:until]]), cache=cache, use_cache=True).logits[0]
        if number == span:
            rows = [logits[prompt + part.start - 1 - fed :]]
        fed = until
    return _gather(
        rows[0], ids[prompt + t.spans[span].start : prompt + t.spans[span].end], t.convention.temperature
    )


def gap(left: Sequence[float], right: Sequence[float]) -> float:
    """Largest absolute difference. Refuses unequal lengths."""
    if len(left) != len(right):
        raise ValueError(f"{len(left)} against {len(right)} log-probs")
    return max((abs(a - b) for a, b in zip(left, right, strict=True)), default=0.0)
