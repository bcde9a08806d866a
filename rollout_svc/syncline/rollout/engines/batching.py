"""Continuous batching: requests join and leave between decode steps, and each gets the result it gets alone.

A batch belongs to one set of weights at a time. Requests wait until `step`; there, waiting prompts of equal
length are prefilled together (equal prompts once), their state is copied to slots, and then all rows decode
one token. Per-step work in Python does not grow with the number of rows. Legend: R rows, P prompt tokens, V
vocabulary.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import DynamicCache

from syncline.contract.schemes import KvFormat
from syncline.contract.version_path import VersionId
from syncline.rollout.engine import Chunk, Request
from syncline.rollout.engines.kv import CacheBytes, growing_cache
from syncline.rollout.engines.rows import Row, RowTable
from syncline.rollout.engines.sampling import draw
from syncline.rollout.engines.slots import SlotCache
from syncline.rollout.engines.weights import Weights

_PREFILL_TOKENS = 4096  # tokens of one prefill forward pass, unless a single context is longer


class Batch:
    """The requests of one set of weights."""

    def __init__(self, weights: Weights, stop_ids: Sequence[int], limit: int, kv: KvFormat = "wide") -> None:
        if weights.version is None:
            raise RuntimeError("a batch was made for weights that hold no verified version")
        self.weights = weights
        self.version: VersionId = weights.version
        self.waiting: list[Request] = []
        self.sampled = 0
        self.refilled = 0.0  # seconds in which the last swap made contexts anew
        self._kv = kv
        self._table = RowTable(limit)
        self._cache = SlotCache(weights.model.config, kv, across=weights.direct is not None)
        self._stop_ids = torch.tensor(sorted(stop_ids), dtype=torch.int64)
        vocab = weights.model.config.get_text_config(decoder=True).vocab_size
        self._is_stop = np.zeros(vocab, np.bool_)  # by token
        self._is_stop[sorted(stop_ids)] = True
        # plain attention adds its mask, which only transformers makes
        plain = weights.model.config._attn_implementation == "eager"
        self._plain_slots = self._cache.plain
        self._mask_ready = not any(self._cache.is_sliding) and not plain

    @property
    def rows(self) -> int:
        """Requests that decode."""
        return len(self._table.rows)

    @property
    def running(self) -> int:
        """Requests that decode or wait for prefill."""
        return len(self._table.rows) + len(self.waiting)

    def cache_bytes(self) -> CacheBytes:
        """Bytes allocated for the requests' state."""
        return self._cache.nbytes()

    # ---- one step
    @torch.inference_mode()
    def step(self) -> list[Chunk]:
        """Prefill what waits, then decode one token of every row. Returns the chunks of ended requests."""
        chunks: list[Chunk] = []
        if self.waiting:
            requests, self.waiting = self.waiting, []
            for group in _prefill_groups(requests):
                chunks.extend(self._begin(group))
        if self._table.rows:
            chunks.extend(self._decode())
        return chunks

    def _begin(self, requests: list[Request]) -> list[Chunk]:
        """Prefill prompts of one length, sample each request's first token."""
        started, wall = time.monotonic(), time.time()
        prompts = list(dict.fromkeys(request.prompt for request in requests))
        experts = any(request.experts for request in requests)
        logits_NV, cache, routes = self._prefill(prompts, experts)
        number = {prompt: i for i, prompt in enumerate(prompts)}
        index = torch.tensor([number[request.prompt] for request in requests])
        length = len(prompts[0])
        first = self.rows
        self._place(torch.arange(first, first + len(requests)), cache, index, length)
        seconds = time.monotonic() - started
        for request in requests:
            row = Row(request=request, kv=self.version, wall=wall, started=started, prefill=seconds)
            self._table.add(row, length)
        if routes is not None:
            self._table.record_prompt_routes(first, routes.index_select(0, index).numpy())
        self._resize()
        return self._sample(logits_NV.index_select(0, index), first)

    def _decode(self) -> list[Chunk]:
        """Feed each row its last token and sample the next."""
        table, cache = self._table, self._cache
        rows = len(table.rows)
        cache.reserve()
        logits_RV, routes = self._forward(rows)
        if routes is not None:
            table.record_routes(rows, routes.numpy())
        cache.advance()
        table.fed[:rows] += 1
        if not self._plain_slots:  # what transformers made anew; the window's start stays where it is
            self._resize()
        return self._sample(logits_RV, 0)

    def _forward(self, rows: int) -> tuple[Tensor, Tensor | None]:
        """Logits [R, V] of the rows' next tokens, and expert ids [R, layers, topk] if a row wants them."""
        table, taps, wanted = self._table, self.weights.taps, self._table.experts_wanted > 0
        ids_R, fed_R = torch.from_numpy(table.last[:rows]), torch.from_numpy(table.fed[:rows])
        direct = self.weights.direct
        if direct is not None and self._plain_slots:
            logits_RV, caught = direct.step(ids_R, fed_R, self._starts(rows), self._cache, wanted)
        else:
            with taps.catching(wanted) as caught:
                logits_RV = self.weights.model(
                    input_ids=ids_R[:, None],
                    position_ids=fed_R[:, None],
                    attention_mask=self._mask(rows),
                    cache=self._cache,
                    use_cache=True,
                ).logits[:, -1]
        return logits_RV, taps.stacked(caught) if caught else None

    def _starts(self, rows: int) -> NDArray[np.int64]:
        """The first column of the window that each row may see [R]."""
        g = self._cache.geometry
        starts_R: NDArray[np.int64] = g.column - g.low - self._table.fed[:rows]
        return starts_R

    def _mask(self, rows: int) -> Tensor | None:
        """What each row may see of the window as the library takes it [R, C]; None: everything.

        Two-dimensional where sliding layers must cut their own part of it or attention is plain, else ready for
        the attention kernel.
        """
        starts_R, g = self._starts(rows), self._cache.geometry
        if not starts_R.any():
            return None
        mask_RC = torch.from_numpy(np.arange(g.column - g.low + 1)[None, :] >= starts_R[:, None])
        return mask_RC[:, None, None, :] if self._mask_ready else mask_RC

    def _sample(self, logits_RV: Tensor, first: int) -> list[Chunk]:
        """Draw a token for the rows from `first` on (all of them or the newest), record, and end what is
        done.
        """
        table = self._table
        end = first + logits_RV.shape[0]
        table.refill_uniforms(first, end)
        tokens_R, logprobs_R, support_RV = draw(
            logits_RV,
            torch.from_numpy(table.uniforms_now(first, end)),
            table.cuts(first, end),
            table.suppressed(first, end),
            self._stop_ids,
        )
        tokens = tokens_R.numpy()
        table.record(first, end, tokens, logprobs_R.numpy())
        if support_RV is not None:
            table.record_masks(first, support_RV.numpy())
        self.sampled += end - first
        stopped = self._is_stop[tokens]
        done = stopped | (table.sampled[first:end] >= table.most[first:end])
        if not done.any():
            return []
        chunks = []
        for i in np.flatnonzero(done)[::-1]:  # from the back: the last row takes a leaver's place
            chunks.append(self._end(first + int(i), "stop" if stopped[i] else "length"))
        self._resize()
        return chunks

    def _end(self, row: int, finish: Literal["stop", "length"]) -> Chunk:
        chunk = self._table.chunk(row, self.weights, finish)
        self._drop(row)
        return chunk

    # ---- requests
    @torch.inference_mode()
    def drop(self, trajectory: str) -> bool:
        """Forget a request. False: it is not here."""
        for i, request in enumerate(self.waiting):
            if request.trajectory == trajectory:
                del self.waiting[i]
                return True
        for i, row in enumerate(self._table.rows):
            if row.request.trajectory == trajectory:
                self._drop(i)
                self._resize()
                return True
        return False

    def trajectories(self) -> list[str]:
        """All requests here."""
        return [r.trajectory for r in self.waiting] + [row.request.trajectory for row in self._table.rows]

    # ---- a swap under running requests
    @torch.inference_mode()
    def adopt(self, weights: Weights, carried_age: int | None) -> tuple[list[Chunk], int]:
        """Go on with other weights. Returns the spans that this closes, and how many contexts were made anew.

        carried_age   versions that a kept context may be behind; None: keep none
        """
        if weights.version is None:
            raise RuntimeError("a batch was given weights that hold no verified version")
        chunks = [
            self._table.chunk(i, self.weights, None)
            for i, row in enumerate(self._table.rows)
            if self._table.sampled[i] > row.told
        ]
        self.weights, self.version = weights, weights.version
        anew = []
        for i, row in enumerate(self._table.rows):
            if not row.carry(self.version, carried_age):
                anew.append(i)
        began = time.monotonic()
        self._recompute(anew)
        self.refilled = time.monotonic() - began
        return chunks, len(anew)

    def _recompute(self, rows: Iterable[int]) -> None:
        """Feed all but the last token of each row to the present weights, in place of what its slots hold."""
        by_length: dict[int, list[int]] = {}
        for i in rows:
            by_length.setdefault(int(self._table.fed[i]), []).append(i)
        for length, members in by_length.items():
            share = max(1, _PREFILL_TOKENS // length)
            for at in range(0, len(members), share):
                part = members[at : at + share]
                _, cache, _ = self._prefill([self._table.context(i) for i in part], False)
                self._cache.place(torch.tensor(part), cache, torch.arange(len(part)), length)
        self._resize()

    # ---- plumbing
    def _prefill(
        self, contexts: Sequence[tuple[int, ...]], experts: bool
    ) -> tuple[Tensor, DynamicCache, Tensor | None]:
        """Last logits [N, V], state, and expert ids [N, P, layers, topk] of N contexts of one length."""
        cache = growing_cache(self.weights.model.config, self._kv)
        ids_NP = torch.tensor(contexts, dtype=torch.int64)
        taps, direct = self.weights.taps, self.weights.direct
        if direct is not None and self._plain_slots:
            logits_NV, caught = direct.prefill(ids_NP, cache, experts)
        else:
            with taps.catching(experts) as caught:
                out: Any = self.weights.model(input_ids=ids_NP, cache=cache, use_cache=True, logits_to_keep=1)
            logits_NV = out.logits[:, -1]
        routes = taps.stacked(caught).view(*ids_NP.shape, taps.layers, -1) if caught else None
        return logits_NV, cache, routes

    def _place(self, rows: Tensor, cache: DynamicCache, index: Tensor, length: int) -> None:
        self._cache.place(rows, cache, index, length)

    def _drop(self, row: int) -> None:
        last = len(self._table.rows) - 1
        if row != last:
            self._cache.move(last, row)
        self._table.drop(row)

    def _resize(self) -> None:
        """Tell the cache how many rows live and how long the longest is."""
        rows = len(self._table.rows)
        self._cache.set_rows(rows, int(self._table.fed[:rows].max()) if rows else 0)


def _prefill_groups(requests: Sequence[Request]) -> list[list[Request]]:
    """Requests of one prompt length each, in order of arrival, within `_PREFILL_TOKENS` tokens."""
    groups: list[list[Request]] = []
    open_group: dict[int, list[Request]] = {}
    for request in requests:
        length = len(request.prompt)
        group = open_group.get(length)
        if group is not None:
            distinct = {r.prompt for r in group} | {request.prompt}
            if len(distinct) * length > _PREFILL_TOKENS:
                group = None
        if group is None:
            group = open_group[length] = []
            groups.append(group)
        group.append(request)
    return groups
