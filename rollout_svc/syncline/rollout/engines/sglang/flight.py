"""One request in flight, which may take several HTTP requests (legs): a commit in place ends a leg, and the next one
goes on behind the tokens that are there.
"""

from __future__ import annotations

import math
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from syncline.contract.recorded import mask_of
from syncline.contract.sglang_rules import MASK_MOST
from syncline.contract.version_path import VersionId
from syncline.rollout.engine import Chunk, Request, Sampling
from syncline.rollout.engines.sampling import Draws
from syncline.rollout.engines.sglang.labels import Attested, Untrue, attested, decode_experts, joined_experts

Routing = tuple[int, int, int, int]
"""(all layers, routing layers, top-k, experts) of a model that routes."""


_ROUNDING = 1e-3  # nats, of a log-prob that is the log of a float32 probability


@dataclass(frozen=True)
class Serving:
    """What a leg was sent under. `label`: the server's weight version; `adapter`: name on the server."""

    version: VersionId
    digest: str
    label: str
    adapter: str | None


@dataclass
class Flight:
    """A request and what of it has come back.

    rid       of the leg on its way; of fixed length, since the server takes one for a prefix of others
    sent      what the leg was sent under; None: no leg is on its way
    ending    the leg was told to end
    most      tokens after which the response ends; stop_ids: or after one of these, where the model chooses its end
    """

    request: Request
    most: int
    stop_ids: frozenset[int] = frozenset()
    rid: str = ""
    sent: Serving | None = None
    ending: bool = False
    tokens: list[int] = field(default_factory=list)
    routes: list[np.ndarray] = field(default_factory=list)  # rows [fed, L, K] of what each leg fed first
    began: float = 0.0  # wall clock, of the leg
    started: float = field(default_factory=time.monotonic)
    failures: int = 0

    @property
    def fed(self) -> int:
        """Tokens whose routes are known."""
        return sum(len(rows) for rows in self.routes)

    def body(self) -> dict[str, Any]:
        """The next leg."""
        self.rid = secrets.token_hex(16)
        self.ending = False
        self.began = time.time()
        sampling = self.request.sampling
        ignores = sampling.length == "lognormal"
        parameters: dict[str, Any] = {
            "max_new_tokens": self.most - len(self.tokens),
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k or -1,
            "ignore_eos": ignores,
        }
        body: dict[str, Any] = {
            "rid": self.rid,
            "input_ids": [*self.request.prompt, *self.tokens],
            "sampling_params": parameters,
            "return_logprob": True,
            "stream": False,
        }
        if self.request.experts:
            body["return_routed_experts"] = True
        if sampling.record_mask:
            body["return_sampling_mask"] = True
        return body

    def land(self, reply: dict[str, Any], routing: Routing | None) -> list[tuple[Attested, Chunk]]:
        """The chunks of a leg's reply, each with what the server attests; versions are put in by the engine.

        Raises `Untrue` for a reply whose parts do not agree.
        """
        sent = self.sent
        if sent is None:
            raise Untrue(f"trajectory {self.request.trajectory}: a reply without a leg")
        meta, tokens = reply["meta_info"], reply["output_ids"]
        rows = meta.get("output_token_logprobs", [])
        if [row[1] for row in rows] != tokens:
            raise Untrue(
                f"trajectory {self.request.trajectory}: log-probs are of other tokens than the output"
            )
        logprobs, mask = [float(row[0]) for row in rows], None
        if self.request.sampling.record_mask:
            logprobs, mask = processed(self.request.trajectory, meta, tokens, logprobs)
        finish = finish_of(meta) or self._end(tokens)
        start, now = len(self.tokens), time.time()
        if routing is not None and self.request.experts:
            self._routed(meta, len(tokens), routing)
        self.tokens += tokens
        ended = finish is not None
        spans = attested(meta, len(tokens)) if tokens else ()
        chunks = []
        for span in spans:
            last = ended and span.end == len(tokens)
            chunk = Chunk(
                trajectory=self.request.trajectory,
                start=start + span.start,
                tokens=tuple(tokens[span.start : span.end]),
                logprobs=tuple(logprobs[span.start : span.end]),
                mask=None if mask is None else mask_of(mask[span.start : span.end]),
                version=sent.version,
                digest=sent.digest,
                adapter=sent.adapter,
                began=self.began,
                ended=now,
                finish=finish if last else None,
                experts=joined_experts(self.routes) if last else None,
                decode=time.monotonic() - self.started if last else 0.0,
            )
            chunks.append((span, chunk))
        self.sent = None
        return chunks

    def _end(self, tokens: list[int]) -> Literal["stop", "length"] | None:
        """How an aborted leg's `tokens` end the response, if they do.

        The server calls a leg aborted also where its last token was the response's last: another leg would sample
        on behind a stop token, or ask for no token at all.
        """
        if tokens and self.request.sampling.length == "stop" and tokens[-1] in self.stop_ids:
            return "stop"
        return "length" if len(self.tokens) + len(tokens) >= self.most else None

    def _routed(self, meta: dict[str, Any], tokens: int, routing: Routing) -> None:
        """Keep the rows that this leg fed first: those before were the routes when their successors were sampled."""
        layers, routed, topk, experts = routing
        rows = len(self.request.prompt) + len(self.tokens) + tokens - 1
        text = meta.get("routed_experts")
        if text is None:
            if tokens:
                raise Untrue(f"trajectory {self.request.trajectory}: routed experts are missing")
            return
        if not tokens:
            return  # the next leg feeds the same again
        ids = decode_experts(text, rows, layers, routed, topk, experts)
        self.routes.append(ids[self.fed :])


def processed(
    trajectory: str, meta: Mapping[str, Any], tokens: Sequence[int], scaled: Sequence[float]
) -> tuple[list[float], list[list[int]]]:
    """Log-probs after the cut, and the ids that it left, of a reply's output tokens.

    scaled   the same tokens' log-probs before the cut, which none of the others can be below
    Raises `Untrue` for a mask that cannot be that of these tokens.
    """
    masks: list[list[int]] = meta.get("output_token_sampling_mask") or []
    found = [float(value) for value in meta.get("output_token_sampling_logprobs") or []]
    if not len(masks) == len(found) == len(tokens):
        raise Untrue(
            f"trajectory {trajectory}: sampling masks of {len(masks)} and log-probs of {len(found)} of "
            f"{len(tokens)} tokens"
        )
    for token, mask, after, before in zip(tokens, masks, found, scaled, strict=True):
        if token not in mask or after < before - _ROUNDING:
            raise Untrue(
                f"trajectory {trajectory}: token {token} has log-prob {after} after the cut and {before} before it, "
                f"and a sampling mask of {len(mask)} ids"
            )
    return found, masks


def finish_of(meta: dict[str, Any]) -> Literal["stop", "length"] | None:
    """How a leg ended; None: it was aborted."""
    match meta["finish_reason"]["type"]:
        case "stop":
            return "stop"
        case "length":
            return "length"
        case "abort":
            return None
        case other:
            raise Untrue(f"finish reason {other!r} is none that is known")


def longest(sampling: Sampling, seed: tuple[int, ...]) -> int:
    """Tokens after which a response ends, drawn from the seed where its length is."""
    return Draws(seed).length(sampling)[1]


def refused(sampling: Sampling) -> str:
    """Why the server cannot sample so under the recorded convention; empty: it can."""
    if sampling.record_mask and not 2 <= sampling.top_k <= MASK_MOST:
        return f"record_mask: SGLang records the mask of a top_k from 2 to {MASK_MOST} alone"
    if sampling.length == "stop" and sampling.min_tokens > 0:
        return "min_tokens: SGLang masks stop tokens before it takes log-probs: they would be of another distribution"
    if (sampling.top_k == 1 or sampling.top_p < 1e-6) and not math.isclose(sampling.temperature, 1.0):
        return "top_k 1 with a temperature: SGLang reports a greedy batch's log-probs without it"
    return ""
