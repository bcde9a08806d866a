"""The rows of a decode batch as arrays, so that a step costs the same Python for 1 row and for 64.

Legend: R rows, N the table's limit, W sampled tokens kept, T tokens fed, L routing layers, K experts per
token.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from syncline.contract.recorded import mask_of
from syncline.contract.version_path import VersionId
from syncline.rollout.engine import Chunk, Experts, Request
from syncline.rollout.engines.sampling import UNIFORMS, Cuts, Draws
from syncline.rollout.engines.weights import Weights


@dataclass
class Row:
    """What changes seldom about a running request."""

    request: Request
    kv: VersionId  # version of the oldest KV entry of its context
    wall: float  # wall-clock start of the present span
    started: float  # monotonic start of prefill
    prefill: float  # seconds
    told: int = 0  # sampled tokens that chunks have carried away
    context: Literal["recomputed", "carried"] = "recomputed"
    carried_age: int = 0
    masks: list[list[int]] = field(default_factory=list)  # of each sampled token, if they are recorded

    def carry(self, version: VersionId, limit: int | None) -> bool:
        """Keep the context under `version` if it is at most `limit` versions old. False: it must be made
        anew.
        """
        age = version.number - self.kv.number
        if limit is None or version.epoch != self.kv.epoch or age > limit:
            self.kv, self.context, self.carried_age = version, "recomputed", 0
            return False
        self.context, self.carried_age = "carried", age
        return True


class RowTable:
    """Arrays whose first `len(rows)` entries belong to `rows`, in order."""

    def __init__(self, limit: int) -> None:
        self.rows: list[Row] = []
        self.last = np.zeros(limit, np.int64)  # token to feed next
        self.fed = np.zeros(limit, np.int64)  # tokens whose state is in the slots: the next one's position
        self.sampled = np.zeros(limit, np.int64)
        self.least = np.zeros(limit, np.int64)  # stop tokens are suppressed below
        self.most = np.zeros(limit, np.int64)
        self.experts_wanted = 0  # rows that record expert ids
        self._tokens = np.zeros((limit, 16), np.int32)  # [N, W]
        self._logprobs = np.zeros((limit, 16), np.float32)  # [N, W]
        self._uniforms = np.zeros((limit, UNIFORMS), np.float64)
        self._temperature = np.ones((limit, 1), np.float32)
        self._top_p = np.ones((limit, 1), np.float64)
        self._top_k = np.zeros((limit, 1), np.int64)
        self._cutting = 0  # rows with top-p or top-k
        self._masked = 0  # rows that record what it leaves
        self._draws: list[Draws] = []
        self._routes: NDArray[np.unsignedinteger] | None = None  # [N, T, L, K]
        # by row, of one value or a few
        self._each: list[NDArray[np.generic]] = [self.last, self.fed, self.sampled, self.least, self.most]
        self._each += [self._uniforms, self._temperature, self._top_p, self._top_k]
        # the same memory as a draw takes it
        self._tempered, self._topped = torch.from_numpy(self._temperature), torch.from_numpy(self._top_p)
        self._topmost = torch.from_numpy(self._top_k)
        self._unused = 0  # numbers that each row has left at least
        self._limit = limit
        self._all = np.arange(limit)

    def add(self, row: Row, length: int) -> None:
        """A new row behind the others, whose prompt of `length` tokens is in the slots."""
        i, sampling = len(self.rows), row.request.sampling
        draws = Draws(row.request.seed)
        self.rows.append(row)
        self._draws.append(draws)
        self.fed[i], self.sampled[i], self._unused = length, 0, 0
        self.least[i], self.most[i] = draws.length(sampling)
        self._temperature[i, 0] = sampling.temperature
        self._top_p[i, 0] = sampling.top_p
        self._top_k[i, 0] = sampling.top_k
        self._count(row, 1)

    def drop(self, i: int) -> None:
        """Row `i` leaves; the last row takes its place."""
        last = len(self.rows) - 1
        self._count(self.rows[i], -1)
        if i != last:
            for array in self._each:
                array[i] = array[last]
            count = int(self.sampled[last])
            self._tokens[i, :count] = self._tokens[last, :count]
            self._logprobs[i, :count] = self._logprobs[last, :count]
            if self._routes is not None:
                self._routes[i, : self.fed[last]] = self._routes[last, : self.fed[last]]
            self.rows[i], self._draws[i] = self.rows[last], self._draws[last]
        self.rows.pop()
        self._draws.pop()

    # ---- sampling
    def refill_uniforms(self, first: int, end: int) -> None:
        """Draw the next numbers of rows that have used theirs up. For what is sampled now: each row uses one."""
        if self._unused == 0:
            used = self.sampled[first:end] % UNIFORMS
            for i in np.flatnonzero(used == 0):
                self._uniforms[first + i] = self._draws[first + i].uniforms().numpy()
            if first:  # the others have not been looked at
                return
            self._unused = UNIFORMS - int(used.max())
        self._unused -= 1

    def uniforms_now(self, first: int, end: int) -> NDArray[np.float64]:
        """Each row's number for its next token, [R]."""
        numbers: NDArray[np.float64] = self._uniforms[
            self._all[first:end], self.sampled[first:end] % UNIFORMS
        ]
        return numbers

    def cuts(self, first: int, end: int) -> Cuts:
        """Sampling parameters of the rows."""
        recorded = [row.request.sampling.record_mask for row in self.rows[first:end]] if self._masked else []
        return Cuts(
            self._tempered[first:end],
            self._topped[first:end],
            self._topmost[first:end],
            self._cutting > 0,
            torch.tensor(recorded) if recorded else None,
        )

    def suppressed(self, first: int, end: int) -> Tensor | bool:
        """[R] bool: the rows that may draw no stop token yet; or what holds for all."""
        young = self.sampled[first:end] < self.least[first:end]
        count = int(np.count_nonzero(young))
        return count > 0 if count in (0, end - first) else torch.from_numpy(young)

    def record(self, first: int, end: int, tokens: NDArray[np.int64], logprobs: NDArray[np.float32]) -> None:
        """Write the sampled tokens and log-probs [R] of the rows."""
        rows, at = self._all[first:end], self.sampled[first:end]
        self._widen(int(at.max()) + 1)
        self._tokens[rows, at] = tokens
        self._logprobs[rows, at] = logprobs
        self.last[first:end] = tokens
        self.sampled[first:end] += 1

    def record_masks(self, first: int, support: NDArray[np.bool_]) -> None:
        """Write the support [R, V] of the tokens just sampled by the rows from `first` on, where it is recorded."""
        for row, kept in zip(self.rows[first : first + len(support)], support, strict=True):
            if row.request.sampling.record_mask:
                row.masks.append(np.flatnonzero(kept).tolist())

    # ---- expert ids
    def record_prompt_routes(self, first: int, routes: NDArray[np.unsignedinteger]) -> None:
        """Write expert ids [R, P, L, K] of the prompts of the rows from `first` on."""
        count, length = routes.shape[:2]
        self._make_routes(routes, length + 1)
        if self._routes is not None:
            self._routes[first : first + count, :length] = routes

    def record_routes(self, rows: int, routes: NDArray[np.unsignedinteger]) -> None:
        """Write expert ids [R, L, K] of the tokens just fed (positions `fed`)."""
        self._make_routes(routes, int(self.fed[:rows].max()) + 1)
        if self._routes is not None:
            self._routes[self._all[:rows], self.fed[:rows]] = routes

    def _make_routes(self, like: NDArray[np.unsignedinteger], tokens: int) -> None:
        old = self._routes
        if old is not None and old.shape[1] >= tokens:
            return
        self._routes = np.zeros((self._limit, 2 * tokens, *like.shape[-2:]), like.dtype)
        if old is not None:
            self._routes[:, : old.shape[1]] = old

    # ---- what goes out
    def context(self, i: int) -> tuple[int, ...]:
        """The tokens whose state is in row `i`'s slots: all but the last sampled one."""
        row = self.rows[i]
        return (*row.request.prompt, *self._tokens[i, : self.sampled[i] - 1].tolist())

    def chunk(self, i: int, weights: Weights, finish: Literal["stop", "length"] | None) -> Chunk:
        """What row `i` has sampled since its last chunk, stamped with the weights that sampled it."""
        if weights.version is None:
            raise RuntimeError("tokens were sampled by weights that hold no verified version")
        row, end, now = self.rows[i], int(self.sampled[i]), time.time()
        start, began = row.told, row.wall
        row.told, row.wall = end, now
        experts = None
        if finish is not None and row.request.experts and self._routes is not None:
            fed = self._routes[i, : self.fed[i]]
            layers, topk = fed.shape[1:]
            experts = Experts(fed.tobytes(), (len(fed), layers, topk), "u1" if fed.itemsize == 1 else "u2")
        return Chunk(
            trajectory=row.request.trajectory,
            start=start,
            tokens=tuple(self._tokens[i, start:end].tolist()),
            logprobs=tuple(self._logprobs[i, start:end].tolist()),
            version=weights.version,
            digest=weights.digest,
            adapter=weights.adapter,
            context=row.context,
            carried_age=row.carried_age,
            began=began,
            ended=now,
            finish=finish,
            experts=experts,
            mask=mask_of(row.masks[start:end]) if row.request.sampling.record_mask else None,
            prefill=row.prefill,
            decode=time.monotonic() - row.started - row.prefill if finish else 0.0,
        )

    # ---- plumbing
    def _widen(self, tokens: int) -> None:
        width = self._tokens.shape[1]
        if tokens > width:
            wider = max(tokens, 2 * width)
            self._tokens = np.pad(self._tokens, ((0, 0), (0, wider - width)))
            self._logprobs = np.pad(self._logprobs, ((0, 0), (0, wider - width)))

    def _count(self, row: Row, by: int) -> None:
        sampling = row.request.sampling
        self.experts_wanted += by * row.request.experts
        self._cutting += by * (sampling.top_p < 1 or sampling.top_k > 0)
        self._masked += by * sampling.record_mask
