"""From a probe's answer to the decomposition: per token, and per update. Pure.

Legend: N probed tokens of the update, T tokens of a record, L routing layers, K experts per token.
"""

from __future__ import annotations

import math
from array import array
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from syncline.contract.diagnosis import TERMS, Diagnostics, Probe, Probed, Tail
from syncline.contract.job import JobSpec
from syncline.contract.version_path import VersionId
from syncline.numerics import mismatch
from syncline.numerics.route_agreement import first_diverging_layer, same_sets
from syncline.reference.routes import RecordedRoutes
from syncline.runtime.segment_probes import ProbedToken
from syncline.runtime.segments import SegmentRow
from syncline.trainer.engine import StepResult


@dataclass(frozen=True)
class Question:
    """One probed trajectory. `routes`: ids that the trainer's routers choose freely, [fed, L, K]; None: no routers."""

    row: SegmentRow
    probe: Probe
    routes: Tensor | None


@dataclass
class Asked:
    """The probes of one update, and what came back by trajectory. `logprobs`: the trainer's, before the step."""

    update: int
    version: VersionId
    questions: dict[str, Question]
    noise: list[Probed] = field(default_factory=list)  # decode against prefill, as workers compared them
    answers: dict[str, Probed] = field(default_factory=dict)
    logprobs: dict[str, array[float]] = field(default_factory=dict)
    whole: dict[str, Any] = field(default_factory=dict)  # fields of `Diagnostics` over all loss tokens
    unmeasured: dict[str, str] = field(default_factory=dict)
    unasked: str = ""  # why there is no question

    @property
    def complete(self) -> bool:
        """Whether every answer is in, and the trainer's own scores."""
        return bool(self.logprobs) and self.answers.keys() >= self.questions.keys()


def over_the_update(
    rows: Sequence[SegmentRow], result: StepResult, spec: JobSpec
) -> tuple[dict[str, Any], dict[str, str]]:
    """What is known of all loss tokens, as fields of `Diagnostics`, and why something is not."""
    tally, loss = result.tally, spec.loss
    fields: dict[str, Any] = {}
    unmeasured: dict[str, str] = {}
    if tally.tokens == 0:
        return fields, dict.fromkeys(
            ("clip_fraction", "truncated", "effective_sample_size", "reference_kl"),
            "no token was in the loss",
        )
    fields["clip_fraction"] = tally.clipped / tally.tokens
    if loss.correction.kind == "none":
        unmeasured["truncated"] = "loss.correction.kind is none: no weight is cut"
    else:
        fields["truncated"] = tally.outside / tally.tokens
    ratios = [
        pi - mu
        for row, scored in zip(rows, result.logprobs, strict=True)
        for pi, mu, used in zip(scored, row.trajectory.logprobs, row.used_mask, strict=True)
        if used
    ]
    if all(map(math.isfinite, ratios)):
        fields["effective_sample_size"] = mismatch.effective_sample_size(torch.tensor(ratios).double())
    else:
        unmeasured["effective_sample_size"] = "a log-prob is not finite"
    if loss.kl.coefficient > 0:
        sums = {"k1": tally.k1, "k2": tally.k2, "k3": tally.k3}
        fields["reference_kl"] = {name: total / tally.tokens for name, total in sums.items()}
    else:
        unmeasured["reference_kl"] = "loss.kl.coefficient is 0: the job has no reference policy"
    return fields, unmeasured


def tokens_of(question: Question, answer: Probed, trainer: Sequence[float]) -> list[ProbedToken]:
    """The decomposition of each sampled token. Raises `ValueError` if the answer does not fit or is not finite."""
    t, base = question.row.trajectory, question.probe.version
    parts = mismatch.split(trainer, answer.logprobs, t.logprobs)
    if answer.wide_kv and len(answer.wide_kv) != t.sampled:
        raise ValueError(f"{len(answer.wide_kv)} log-probs with a wide KV cache for {t.sampled} tokens")
    rows = []
    for span in t.spans:
        for i in range(span.start, span.end):
            rows.append(
                ProbedToken(
                    trajectory=t.trajectory,
                    token=i,
                    lag=base.number - span.version.number,
                    version=str(span.version),
                    worker=answer.worker,
                    trainer=trainer[i],
                    rollout=answer.logprobs[i],
                    behaviour=t.logprobs[i],
                    total=float(parts.total_N[i]),
                    mismatch=float(parts.mismatch_N[i]),
                    staleness=float(parts.staleness_N[i]),
                    kv_cache=answer.logprobs[i] - answer.wide_kv[i] if answer.wide_kv else None,
                    first_of_span=i == span.start,
                    carried=span.context == "carried",
                )
            )
    return rows


@dataclass(frozen=True)
class Columns:
    """The terms of `TERMS` as float64 columns, each with the rows that it is over."""

    terms: dict[str, tuple[Tensor, list[ProbedToken]]]
    unmeasured: dict[str, str]


def columns_of(rows: list[ProbedToken], version: VersionId, nothing: str) -> Columns:
    """The terms that `rows` give, and why each other one is absent. `nothing`: why there is no row."""
    if not rows:
        return Columns({}, {term: nothing for term in TERMS if term != "noise_decode"})
    own = [row for row in rows if row.version == str(version)]
    over: dict[str, tuple[list[ProbedToken], str, str]] = {
        "total": (rows, "total", ""),
        "mismatch": (rows, "mismatch", ""),
        "staleness": (rows, "staleness", ""),
        "kv_cache": (
            [row for row in rows if row.kv_cache is not None],
            "kv_cache",
            "the contract's KV cache is wide: there is nothing to compare",
        ),
        "noise_staleness": (own, "staleness", f"no probed token was sampled under {version} itself"),
    }
    found: dict[str, tuple[Tensor, list[ProbedToken]]] = {}
    unmeasured = {}
    for term, (of, column, why) in over.items():
        if of:
            found[term] = torch.tensor([getattr(row, column) for row in of], dtype=torch.float64), of
        else:
            unmeasured[term] = why
    return Columns(found, unmeasured)


def decode_noise(asked: Asked, rows: Sequence[ProbedToken]) -> Tensor:
    """Prefill minus decode log-prob at the sampling version, float64: as workers compared them, and of `rows` alike.

    A row is alike if its version is the one that scored it and its context was computed under that version.
    """
    compared = [
        scored - sampled
        for said in asked.noise
        for scored, sampled in zip(said.logprobs, said.decode, strict=True)
    ]
    fresh = [row.staleness for row in rows if row.version == str(asked.version) and not row.carried]
    return torch.tensor(compared + fresh, dtype=torch.float64)


def routes_of(pairs: Sequence[tuple[Tensor, Tensor]]) -> tuple[tuple[float, ...], dict[str, int]]:
    """Share of tokens routed alike per layer, and tokens by the first layer that differs ("none": no layer does).

    pairs   the trainer's and rollout's ids of the same tokens, [tokens, L, K] each; not empty
    """
    equal_NL = torch.cat([same_sets(ours, theirs) for ours, theirs in pairs])
    first_N = torch.cat([first_diverging_layer(ours, theirs) for ours, theirs in pairs])
    counts = Counter(first_N.tolist())
    named = {("none" if layer < 0 else str(layer)): counts[layer] for layer in sorted(counts)}
    return tuple(equal_NL.double().mean(dim=0).tolist()), named


def unanswered(asked: Asked, closed: str) -> str:
    """Which answers are missing and why, in words; "" if none is. `closed`: why no more can come."""
    whys: Counter[str] = Counter()
    for name, question in asked.questions.items():
        answer = asked.answers.get(name)
        if answer is None:
            whys[f"{question.probe.worker} gave no answer {closed}"] += 1
        elif answer.missed:
            whys[f"{answer.worker} {answer.missed}"] += 1
    if not whys:
        return ""
    told = "; ".join(why if count == 1 else f"{why} ({count} times)" for why, count in whys.items())
    return f"{whys.total()} of {len(asked.questions)} probes without a score: {told}"


def diagnose(asked: Asked, contract: str, closed: str, at: float) -> tuple[Diagnostics, list[ProbedToken]]:
    """The update's record, without baseline and alarms, and its table. `closed` as in `unanswered`."""
    whys = [why for why in (unanswered(asked, closed),) if why]
    rows: list[ProbedToken] = []
    pairs: list[tuple[Tensor, Tensor]] = []
    probed = 0
    for name, question in asked.questions.items():
        answer = asked.answers.get(name)
        if answer is None or answer.missed:
            continue
        if name not in asked.logprobs:
            whys.append(f"the trainer did not come to score {name}")
            continue
        try:
            tokens = tokens_of(question, answer, asked.logprobs[name])
            pair = _pair(question, answer)
        except ValueError as error:
            whys.append(f"{name}: {error}")
            continue
        probed, rows, pairs = probed + 1, rows + tokens, pairs + pair
    unmeasured = {"answers": "; ".join(whys)} if whys else {}
    nothing = unmeasured.get("answers", asked.unasked or "the update trained no trajectory")
    columns = columns_of(rows, asked.version, nothing)
    unmeasured |= columns.unmeasured | asked.unmeasured
    fields = _aggregates(columns.terms)
    noise_N = decode_noise(asked, rows)
    if len(noise_N):
        fields["terms"]["noise_decode"] = mismatch.tail(noise_N)
    else:
        unmeasured["noise_decode"] = "no worker has compared decode with prefill since the last record"
    if pairs:
        fields["routes"], fields["diverging"] = routes_of(pairs)
    else:
        unmeasured["routes"] = "the model does not route" if rows else nothing
    record = Diagnostics(
        update=asked.update,
        version=asked.version,
        contract=contract,
        trajectories=probed,
        tokens=len(rows),
        unmeasured=unmeasured,
        at=at,
        **fields,
        **asked.whole,
    )
    return record, rows


def _pair(question: Question, answer: Probed) -> list[tuple[Tensor, Tensor]]:
    """The trainer's and rollout's ids of the tokens that both fed. Raises `ValueError` if they do not fit."""
    if question.routes is None or answer.experts_shape is None:
        return []
    theirs = RecordedRoutes(answer.experts, answer.experts_shape, answer.experts_dtype).ids()
    if len(theirs) < len(question.routes):
        raise ValueError(f"expert ids of {len(theirs)} tokens, the trainer fed {len(question.routes)}")
    return [(question.routes, theirs[: len(question.routes)])]


def _aggregates(terms: Mapping[str, tuple[Tensor, list[ProbedToken]]]) -> dict[str, Any]:
    """Every aggregate field of `Diagnostics` that the columns give."""
    tails: dict[str, Tail] = {term: mismatch.tail(column_N) for term, (column_N, _) in terms.items()}
    by_position, by_lag, tails_by_lag, firsts = {}, {}, {}, {}
    for term in ("total", "mismatch", "staleness", "kv_cache"):
        if term not in terms:
            continue
        column_N, rows = terms[term]
        places = sorted(range(len(rows)), key=lambda i: rows[i].token)
        by_position[term] = mismatch.mean_abs_by(
            column_N[places], [mismatch.position_bucket(rows[i].token) for i in places]
        )
        aged = sorted(range(len(rows)), key=lambda i: rows[i].lag)
        tails_by_lag[term] = mismatch.tail_by(column_N[aged], [rows[i].lag for i in aged])
        by_lag[term] = {lag: tail.mean for lag, tail in tails_by_lag[term].items()}
        first = torch.tensor([row.first_of_span for row in rows])
        firsts[term] = mismatch.tail(column_N[first]).mean
    fields: dict[str, Any] = {
        "terms": tails,
        "by_position": by_position,
        "by_lag": by_lag,
        "tails_by_lag": tails_by_lag,
        "first_of_span": firsts,
    }
    if "mismatch" in terms:
        column_N = terms["mismatch"][0]
        fields["kl"] = mismatch.kl_estimates(column_N)
        fields["exact"] = float((column_N == 0).double().mean())
    return fields
