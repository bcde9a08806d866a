"""What a request keeps from step to step, kind by kind: as decoding left it, against a prefill of the same tokens.

A log-prob says that something of it is wrong; these say what, and in which layer. Each request runs alone: what its
neighbours do to it is compared elsewhere. Legend: T tokens of a context, C tokens that a query chooses.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from math import inf, isfinite
from typing import Any, NamedTuple

import torch
from msgspec.structs import replace
from torch import Tensor, nn

from syncline.contract.events import WorkItem
from syncline.contract.schemes import KV_QUANTISED
from syncline.contract.token_path import trajectory_id
from syncline.lab.ladder.records import Check, absent
from syncline.lab.ladder.subject import PROMPTS, Subject
from syncline.lab.pair import JOB, samples
from syncline.rollout.engines.batching import Batch
from syncline.rollout.engines.kv import decode, parts, stored_of
from syncline.rollout.engines.reference import ReferenceEngine
from syncline.rollout.engines.states import StateLayer
from syncline.trainer.engines.torch import TorchEngine

STEPS = 8
REQUESTS = 3
CONVOLUTION, RECURRENT, CONTEXT = "convolution window", "recurrent state", "KV cache"
KINDS = (CONVOLUTION, RECURRENT, CONTEXT)
"""In the order in which one layer's feed each other."""
INDEX = "sparse-attention index"
SWAPS = 0.002
"""Share of an index's choices: two tokens whose scores are equal to the last bits may change places."""

States = dict[str, dict[tuple[int, str], Tensor]]
"""Kind -> layer and what it is of it -> values of one request."""
Chosen = list[list[set[int]]]
"""Indexer by indexer, query by query: the tokens that are attended to."""


class Alone(NamedTuple):
    """One request after some decode steps, beside a prefill of what it was fed. `first`: query of the first step."""

    decoded: States
    prefilled: States
    chosen: Chosen
    wanted: Chosen
    first: int


def checks(subject: Subject, order: float, source: str) -> Iterator[Check]:
    """One check per kind; what the model does not keep is said. `order`: what another order of additions may do."""
    if subject.rollouts.shows_state:
        runs = [_alone(subject, 3 * PROMPTS + n) for n in range(REQUESTS)]
        yield from _states(runs, order, source)
        if runs[0].wanted:
            most = max(SWAPS, order)
            yield _index("decode", [(r.chosen, r.wanted, r.first) for r in runs], most, source)
            yield _index("trainer", _of_trainer(subject), most, source)
        else:
            yield absent(INDEX, "attention has no indexer: each query reads its whole context")
        return
    for kind in (*KINDS, INDEX):
        yield absent(kind, "it lies in the server's process, and shows in log-probs alone")


def _states(runs: Sequence[Alone], order: float, source: str) -> list[Check]:
    """A check per kind, that with the lowest layer at fault first: what is above it only reads what it says."""
    found = []
    for kind in KINDS:
        if kind not in runs[0].decoded:
            found.append((sys.maxsize, absent(kind, "no layer keeps one")))
            continue
        apart = defaultdict[tuple[int, str], float](float)
        for run in runs:
            for where, values in run.prefilled[kind].items():
                off = float((run.decoded[kind][where] - values).norm() / values.norm())
                apart[where] = max(apart[where], off if isfinite(off) else inf)
        wrong = sorted(where for where, off in apart.items() if off > order)
        check = Check(
            name=f"{kind}: decode against prefill",
            found=max(apart.values()),
            bound=order,
            source=source,
            unit="of its norm",
            where=f"first in layer {wrong[0][0]}, {wrong[0][1]}" if wrong else "",
        )
        found.append((wrong[0][0] if wrong else sys.maxsize, check))
    return [check for _, check in sorted(found, key=lambda pair: pair[0])]


def _index(who: str, runs: Sequence[tuple[Chosen, Chosen, int]], bound: float, source: str) -> Check:
    """Index sets of each query from `first` on."""
    unequal: dict[int, int] = defaultdict(int)
    total: dict[int, int] = defaultdict(int)
    for found, wanted, first in runs:
        for n, (own, due) in enumerate(zip(found, wanted, strict=True)):
            assert len(own) == len(due), "one context"
            for a, b in list(zip(own, due, strict=True))[first:]:
                unequal[n] += len(b - a)
                total[n] += len(b)
    shares = {n: unequal[n] / total[n] for n in total}
    worst = max(shares, key=lambda n: shares[n])
    return Check(
        name=f"{INDEX}: {who} against prefill",
        found=shares[worst],
        bound=bound,
        source=source,
        unit="of choices, in the worst layer",
        where="" if shares[worst] <= bound else f"indexer {worst}",
    )


# ---- one request, alone ---------------------------------------------------------------------------------------
def _alone(subject: Subject, prompt: int) -> Alone:
    rollout = subject.pair.rollout
    assert isinstance(rollout, ReferenceEngine), "it shows its state"
    item = WorkItem(
        job=JOB,
        trajectory=trajectory_id(JOB, prompt, 0),
        group=prompt,
        index=0,
        prompt=prompt,
        traceparent="",
        submitted_at=0.0,
    )
    request = subject.pair.prompter.request(item, attempt=0)
    long = replace(
        request.sampling, length="lognormal", length_sigma=0.0, length_median=2 * STEPS, max_tokens=2 * STEPS
    )
    rollout.submit(replace(request, sampling=long))
    (batch,) = rollout._lanes
    model = batch.weights.model
    with _indices(model) as stepped:
        for _ in range(STEPS):
            rollout.step()
    decoded = _decoded(batch)
    context = batch._table.context(0)
    with torch.inference_mode(), _indices(model) as at_once:
        _, cache, _ = batch._prefill([context], False)
    rollout.abort(item.trajectory)
    return Alone(decoded, _prefilled(cache), _sets(stepped), _sets(at_once), len(request.prompt))


def _decoded(batch: Batch) -> States:
    """What the batch's one row keeps, in its slots."""
    found: States = defaultdict(dict)
    geometry = batch._cache.geometry
    for n, layer in enumerate(batch._cache.slot_layers):
        if isinstance(layer, StateLayer):
            for (kind, i), buffer in layer.buffers.items():
                found[_kind(kind)][n, f"part {i}"] = buffer[:1].float().clone()
        else:
            length, _ = layer.get_mask_sizes(0)
            held = {k: b[:1].narrow(-2, geometry.column - length, length) for k, b in layer.buffers.items()}
            found[CONTEXT] |= _values(n, held)
    return dict(found)


def _prefilled(cache: Any) -> States:
    """What a prefill of one context leaves."""
    found: States = defaultdict(dict)
    for n, layer in enumerate(cache.layers):
        if hasattr(layer, "recurrent_states"):
            for kind, states in (("conv", layer.conv_states), ("recurrent", layer.recurrent_states)):
                for i, state in states.items():
                    if state is not None:
                        found[_kind(kind)][n, f"part {i}"] = state.float().clone()
        else:
            found[CONTEXT] |= _values(n, stored_of(layer))
    return dict(found)


def _kind(of_layer: str) -> str:
    return RECURRENT if of_layer == "recurrent" else CONVOLUTION


def _values(layer: int, stored: Mapping[str, Tensor]) -> dict[tuple[int, str], Tensor]:
    """Keys, values and index keys in FP32; of those that are quantised, what their codes stand for."""
    found: dict[tuple[int, str], Tensor] = {}
    for name in KV_QUANTISED["fp8_e4m3"]:
        if parts(name)[1] in stored:
            found[layer, name] = decode(name, stored, torch.float32)
        elif name in stored:
            found[layer, name] = stored[name].float().clone()
    return found


# ---- index sets -----------------------------------------------------------------------------------------------
@contextmanager
def _indices(model: nn.Module) -> Iterator[dict[str, list[Tensor]]]:
    """Indexer -> what it has chosen in each forward pass: [1, queries, C]."""
    caught: dict[str, list[Tensor]] = {}
    with ExitStack() as stack:
        for name, module in model.named_modules():
            if type(module).__name__.endswith("Indexer"):
                taken = caught.setdefault(name, [])
                hook = module.register_forward_hook(lambda m, a, out, taken=taken: taken.append(out))
                stack.callback(hook.remove)
        yield caught


def _sets(caught: Mapping[str, Sequence[Tensor]]) -> Chosen:
    """A query may be given tokens behind it where fewer than C are before: those are masked, and left out here."""
    rows = [[row for out in outs for row in out[0].tolist()] for outs in caught.values()]
    return [[{i for i in row if i <= n} for n, row in enumerate(queries)] for queries in rows]


def _of_trainer(subject: Subject) -> list[tuple[Chosen, Chosen, int]]:
    """The trainer's, as it multiplies for rollout, beside rollout's under a wide context."""
    pair, trainer = subject.pair, subject.pair.trainer
    assert isinstance(trainer, TorchEngine), "a small spec names it"
    found = []
    for record in subject.records:
        with _indices(trainer._need().loaded.model) as own:
            trainer.score(samples([record]), as_rollout=True)
        with _indices(subject.serving().model) as due:
            pair.rollout.score(record.tokens[:-1], record.segments[0].end - 1, buffer="active", kv="wide")
        found.append((_sets(own), _sets(due), 0))
    return found
