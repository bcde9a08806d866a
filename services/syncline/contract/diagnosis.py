"""What is measured of the two policies during a run: probes, their answers, and one record per update.

For a token of a trajectory that update u consumed at version t and that version tau sampled:

    total = log pi_t - log mu_tau = (log pi_t - log mu_t) + (log mu_t - log mu_tau) = mismatch + staleness

pi is the trainer, mu the rollout engine; log mu_t is what a rollout worker that serves version t scores for the same
tokens (seed section 2, Table 1). Log-probs are natural logs at the trajectory's temperature.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from syncline.contract.version_path import VersionId


class _Part(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    pass


class Probe(_Part, frozen=True, kw_only=True):
    """A question to one rollout worker: score these tokens under `version`. Stamped by the trainer at claim."""

    update: int
    version: VersionId
    trajectory: str
    worker: str
    tokens: tuple[int, ...]  # prompt, sampled and observed ids, in order
    positions: tuple[int, ...]  # where in `tokens` the sampled ids lie
    temperature: float
    experts: bool  # expert ids wanted


class Probed(_Part, frozen=True, kw_only=True):
    """The worker's answer. Stamped by the rollout worker.

    logprobs   one per position; empty with `missed`
    wide_kv    the same with a wide KV cache, where the contract's is not; empty otherwise
    experts    [tokens - 1, layers, topk] little-endian, C order; empty if not wanted or the model does not route
    missed     why there is no score: "serves 0.5 already"
    decode     only where nobody asked: the log-probs as sampled of a trajectory that the worker chose itself, whose
               tokens are all of `version`; `logprobs` against them is the noise of decode against prefill
    """

    update: int
    version: VersionId
    trajectory: str
    worker: str
    logprobs: tuple[float, ...] = ()
    wide_kv: tuple[float, ...] = ()
    experts: bytes = b""
    experts_shape: tuple[int, int, int] | None = None
    experts_dtype: Literal["u1", "u2"] = "u1"
    missed: str = ""
    decode: tuple[float, ...] = ()


class Tail(_Part, frozen=True, kw_only=True):
    """|difference| over tokens. `count` 0 leaves the others 0."""

    count: int
    mean: float
    median: float
    p99: float
    max: float
    signed: float  # mean of the signed difference


TERMS = ("total", "mismatch", "staleness", "kv_cache", "noise_staleness", "noise_decode")
"""`kv_cache`: log mu_t with the contract's KV cache minus with a wide one. `noise_staleness`: the staleness term of
tokens whose version is t itself, where it should be 0: what the engine's arithmetic adds. `noise_decode`: prefill score
at the sampling version minus the recorded decode log-prob."""


class Diagnostics(_Part, frozen=True, kw_only=True):
    """The decomposition of one update. Stamped by the trainer once every answer is in or can no longer come.

    A term that was not measured is absent from `terms` and says why in `unmeasured`.
    by_position   term -> bucket "0-7", "8-15", ... -> mean |difference|; by_lag: term -> lag -> mean |difference|
    first_of_span term -> mean |difference| over the first token of each span
    kl            k1, k2, k3 of trainer against same-version rollout over sampled tokens
    routes        per routing layer, share of tokens with equal expert sets (trainer's free choice against rollout's)
    diverging     first diverging layer -> tokens ("none": no layer diverges)
    baseline      the contract's learned same-version mean |mismatch|, once learned
    alarms        terms that are out of line as they were before (trainer/baseline.py), in words
    """

    update: int
    version: VersionId
    contract: str
    trajectories: int  # probed
    tokens: int
    terms: dict[str, Tail] = {}
    unmeasured: dict[str, str] = {}
    by_position: dict[str, dict[str, float]] = {}
    by_lag: dict[str, dict[str, float]] = {}
    tails_by_lag: dict[str, dict[str, Tail]] = {}  # term -> lag -> the tail of what `by_lag` has the mean of
    first_of_span: dict[str, float] = {}
    kl: dict[str, float] = {}
    reference_kl: dict[str, float] = {}  # k1, k2, k3 against the reference policy; empty: there is none
    clip_fraction: float | None = None
    truncated: float | None = None  # share of loss tokens whose weight the correction cut or masked
    effective_sample_size: float | None = None  # of the importance weights, as a share of the tokens
    exact: float | None = None  # share of tokens with mismatch exactly 0
    routes: tuple[float, ...] = ()
    diverging: dict[str, int] = {}
    baseline: float | None = None
    alarms: tuple[str, ...] = ()
    at: float = 0.0
