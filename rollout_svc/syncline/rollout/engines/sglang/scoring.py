"""Scores of fixed tokens by the server: a prefill that samples nothing."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from syncline.rollout.engine import Score
from syncline.rollout.engines.sglang.client import Server
from syncline.rollout.engines.sglang.flight import Serving
from syncline.rollout.engines.sglang.labels import Untrue, decode_experts, joined_experts
from syncline.rollout.engines.sglang.model import Model

WIDEST = 8192
"""Vocabulary up to which a score under another temperature is offered: it needs every token's log-prob."""


def check_scored(ids: Sequence[int], vocab: int, temperature: float) -> None:
    """Raise `ValueError` for what must not reach the server: it dies of an id outside the vocabulary."""
    if not ids or min(ids) < 0 or max(ids) >= vocab:
        raise ValueError("tokens to score are none, or one is outside the vocabulary")
    if not math.isclose(temperature, 1.0) and vocab > WIDEST:
        raise ValueError(
            f"temperature {temperature}: SGLang scores prefixes at 1, and {vocab} log-probs per token are too many"
        )


def score(
    server: Server,
    serving: Serving,
    ids: Sequence[int],
    positions: Sequence[int],
    temperature: float,
    experts: bool,
    model: Model,
) -> Score:
    """Log-probs of `ids[i]` for each i of `positions`, under `serving`. Raises `Untrue` if another version answers."""
    scaled = not math.isclose(temperature, 1.0)
    body: dict[str, Any] = {
        "input_ids": list(ids),
        "sampling_params": {"max_new_tokens": 0, "temperature": 1.0},
        "return_logprob": True,
        "logprob_start_len": 0,
    }
    if serving.adapter is not None:
        body["lora_path"] = serving.adapter
    last = model.vocab - 1
    if scaled:
        body["token_ids_logprob"] = list(range(model.vocab))
    elif last in ids:
        body["token_ids_logprob"] = [last]
    routing = model.routing if experts else None
    if routing is not None:
        body["return_routed_experts"] = True
    meta = server.generate(body)["meta_info"]
    if meta["weight_version"] != serving.label:
        raise Untrue(f"scored under weight version {meta['weight_version']!r}, not {serving.label!r}")
    rows = meta["input_token_logprobs"]
    # the server takes the vocabulary's last id for padding, and scores token 0 in its place
    if [row[1] for row in rows] != [0 if token == last else token for token in ids]:
        raise Untrue("scores are of other tokens than those that were sent")
    asked = meta["input_token_ids_logprobs"] if "token_ids_logprob" in body else []
    if scaled:
        logprobs = tuple(_scaled(asked[i], ids[i], temperature) for i in positions)
    else:
        logprobs = tuple(float(asked[i][0][0] if ids[i] == last else rows[i][0]) for i in positions)
    found = None
    if routing is not None:
        layers, routed, topk, count = routing
        found = joined_experts(
            [decode_experts(meta["routed_experts"], len(ids) - 1, layers, routed, topk, count)]
        )
    return Score(logprobs=logprobs, experts=found)


def _scaled(row: Sequence[Sequence[Any]], token: int, temperature: float) -> float:
    """Log-prob of `token` with logits over `temperature`, from the log-probs of the whole vocabulary."""
    wide = torch.empty(len(row), dtype=torch.float64)
    for value, index, *_ in row:
        wide[int(index)] = float(value)
    return float(torch.log_softmax(wide / temperature, dim=-1)[token])
