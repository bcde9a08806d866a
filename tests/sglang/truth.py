"""Spans of a job that SGLang sampled, against a cold engine of the recorded version and of the ones next to it."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

import cold
import torch
from guarantees import segment_files
from stack import ROOT

from syncline.contract.token_path import Trajectory
from syncline.contract.version_path import VersionId
from syncline.runtime import segments
from syncline.runtime.store import BlobStore

CONFIG = ROOT / "examples" / "models" / "tiny-moe" / "config.json"
AGREES = 2e-5  # measured: 1e-6; FP32, another batch shape than the server's
MISMATCH = 20 * AGREES

Part = tuple[Trajectory, int]
"""A trajectory and the number of one of its spans."""


def records_of(run: Path) -> list[Trajectory]:
    """Every trajectory that was trained on, in batch order."""
    return [row.trajectory for path in segment_files(run) for row in segments.read(path).rows]


def neighbours(known: list[VersionId], version: VersionId) -> list[VersionId]:
    """The versions right before and after in the store. Their numbers need not be next: one that another overtakes
    before it is converted never gets there, and no worker can have read it.
    """
    at = known.index(version)
    return [*known[:at][-1:], *known[at + 1 :][:1]]


@torch.no_grad()
def gaps(run: Path, version: VersionId, parts: list[Part]) -> list[float]:
    """Largest |reported - scored| log-prob of each part, scored by a cold engine of `version` in one forward pass.

    Padded on the right: attention is causal, and experts see one token at a time.
    """
    ids = [t.tokens[: t.segments[0].end + t.spans[n].end] for t, n in parts]
    widest = max(len(row) for row in ids)
    fed = torch.tensor([[*row, *[0] * (widest - len(row))] for row in ids])
    logits_BTV = cold.model(run, version, CONFIG)(fed).logits
    out = []
    for row, (t, n) in enumerate(parts):
        span, prompt = t.spans[n], t.segments[0].end
        assert n == 0 or span.context == "recomputed"
        first, end = prompt + span.start, prompt + span.end
        scaled_TV = logits_BTV[row, first - 1 : end - 1].float() / t.convention.temperature
        if t.mask is not None:
            for n, support in enumerate(t.mask.supports()[span.start : span.end]):
                left_V = torch.full_like(scaled_TV[n], -torch.inf)
                left_V[list(support)] = scaled_TV[n][list(support)]
                scaled_TV[n] = left_V
        sampled = torch.tensor(t.tokens[first:end])
        scored = torch.log_softmax(scaled_TV, -1).gather(1, sampled[:, None])[:, 0]
        out.append(cold.gap(t.logprobs[span.start : span.end], scored.tolist()))
    return out


def every_span_is_true(run: Path) -> list[Trajectory]:
    """All trained trajectories of the job in folder `run`. Each span is true under the version that it names, and
    false under both versions next to that one.
    """
    records = records_of(run)
    known = BlobStore(run / "store").manifests()
    own, near = defaultdict[VersionId, list[Part]](list), defaultdict[VersionId, list[Part]](list)
    for t in records:
        for number, span in enumerate(t.spans):
            own[span.version].append((t, number))
            for version in neighbours(known, span.version):
                near[version].append((t, number))
    true = [gap for version, parts in own.items() for gap in gaps(run, version, parts)]
    false = [gap for version, parts in near.items() for gap in gaps(run, version, parts)]
    assert len(true) == sum(len(t.spans) for t in records)
    assert len(false) > 1.5 * len(true), "most versions have two neighbours"
    assert max(true) < AGREES
    assert min(false) > AGREES, "a neighbour explains a span as well"
    distinct = sum(gap > MISMATCH for gap in false)
    assert distinct >= 0.95 * len(false), sorted(false)[:10]
    return records
