"""`RolloutEngine`: what the worker's loop needs of an engine, and the records that pass between them.

The engine alone stamps versions. It hands tokens out in chunks: a chunk is a run of tokens of one request
that one version sampled over one context, so that folding chunks gives spans without anybody guessing.

An engine is driven from one thread. `stage` and `score(buffer="staged")` may run in a second thread
meanwhile; they touch nothing that serves.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Protocol

import msgspec

from syncline.contract.precision_trace import ComponentTrace
from syncline.contract.recorded import SamplingMask
from syncline.contract.schemes import KvFormat
from syncline.contract.version_path import SignedManifest, VersionId
from syncline.runtime.store import BlobStore


class Sampling(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How tokens are drawn. Log-probs are recorded as `SamplingConvention(logprob="scaled")` says; with `record_mask`
    as "processed", beside the ids that the cut left.

    With `length="lognormal"` the response has a length drawn from the request's seed, capped at `max_tokens`,
    and stop tokens are suppressed: in sampling alone, the recorded log-probs do not see it.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0: no cut
    max_tokens: int = 16
    min_tokens: int = 0
    length: Literal["stop", "lognormal"] = "stop"
    length_sigma: float = 1.0
    length_median: int = 8
    record_mask: bool = False


class Request(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One trajectory to sample. What is drawn depends on `seed` and the weights, not on batch mates."""

    trajectory: str
    prompt: tuple[int, ...]
    seed: tuple[int, ...]  # (job's sampling seed, group, index, attempt)
    sampling: Sampling
    experts: bool = False  # record expert ids, if the model routes
    traceparent: str = ""  # for an engine that runs elsewhere


class Experts(msgspec.Struct, frozen=True):
    """Expert ids of the tokens that were fed: `data` is [tokens, layers, topk] of `dtype`, little-endian, C
    order.
    """

    data: bytes
    shape: tuple[int, int, int]
    dtype: Literal["u1", "u2"]


class Chunk(msgspec.Struct, frozen=True, kw_only=True):
    """A run of sampled tokens of one request. Stamped by the engine when a span closes or the request ends.

    `start` counts sampled tokens. `began` and `ended` are wall-clock unix seconds of the run; `prefill` and
    `decode` are monotonic seconds of the whole request, given with `finish`.
    """

    trajectory: str
    start: int
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    version: VersionId
    digest: str
    adapter: str | None = None  # as in `token_path.VersionSpan`
    context: Literal["recomputed", "carried"] = "recomputed"
    carried_age: int = 0
    began: float
    ended: float
    finish: Literal["stop", "length"] | None = None  # None: the request goes on in another chunk
    experts: Experts | None = None  # with `finish`, if asked for and the model routes
    mask: SamplingMask | None = None  # of these tokens, if asked for
    prefill: float = 0.0
    decode: float = 0.0


class Staged(msgspec.Struct, frozen=True, kw_only=True):
    """A version lies in the second buffer, read back and equal to its manifest."""

    version: VersionId
    digest: str
    loaded_digest: str  # `version_path.loaded_digest` of what the engine will really read
    nbytes: int
    seconds: float
    verdict: str  # "verified", or "verified, unchanged": same bytes as the version that serves


class Committed(msgspec.Struct, frozen=True, kw_only=True):
    """A version serves from the next decode step on."""

    version: VersionId
    digest: str
    pause: float  # seconds for which no token was sampled because of the swap
    in_flight: int  # requests that ran at the swap
    recomputed: int  # of them, those whose context was computed anew
    refilled: float = 0.0  # seconds of `pause` that this took


class CommitPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """What happens to requests that run when a version is committed; see docs/decisions/0001."""

    kind: Literal["drain", "continue_old", "in_place"]
    kv: Literal["recomputed", "carried"] = "recomputed"
    carried_age: int = 1


class Description(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine is and can do.

    double_buffer   a version is staged while another serves; else staging takes the engine out of rotation, under
                    the policy that it was made for
    seeded          a request's tokens depend on its seed and the weights alone
    carries         a context may be kept under the next version
    suppresses      stop tokens are not drawn below the least length, unseen by the log-probs
    frees_memory    `sleep` gives all memory back
    """

    engine: str
    family: str  # model class
    double_buffer: bool
    policies: tuple[str, ...]
    vocab: int
    stop_ids: tuple[int, ...]
    max_running: int
    experts: tuple[int, int] | None  # (routing layers, top-k); None: the model does not route
    kv: KvFormat = "wide"  # how the attention context is stored
    representation: str = "bf16"  # `PrecisionContract.representation` of the versions that it takes
    seeded: bool = True
    carries: bool = True
    suppresses: bool = True
    frees_memory: bool = True


class Score(msgspec.Struct, frozen=True, kw_only=True):
    """Log-probs of the scored tokens, and expert ids of `ids[:-1]` if asked for."""

    logprobs: tuple[float, ...]
    experts: Experts | None = None


class OldVersion(ValueError):
    """A version below one that this engine has served: (epoch, number) never falls."""


class StageFailed(ValueError):
    """A version could not be staged; the message names the tensor. What serves is untouched."""


class RolloutEngine(Protocol):
    """See the module. Every method raises `ValueError` (naming the culprit) before it changes anything."""

    @property
    def serving(self) -> tuple[VersionId, str] | None:
        """(version, digest) that new requests get; None: no verified version, or asleep."""
        ...

    @property
    def staged(self) -> VersionId | None:
        """The verified, uncommitted version."""
        ...

    @property
    def running(self) -> int:
        """Requests begun and not ended, those submitted and not yet prefilled included."""
        ...

    @property
    def room(self) -> int:
        """Requests that may be submitted now; 0 while asleep, without a version, or draining."""
        ...

    @property
    def sampled(self) -> int:
        """Tokens sampled since the engine was made."""
        ...

    def describe(self) -> Description: ...

    def submit(self, request: Request) -> None:
        """Add a request; its prefill runs in the next `step` under the version that serves now."""
        ...

    def step(self) -> list[Chunk]:
        """One decode step of every request. Returns the chunks that closed, those of a commit included."""
        ...

    def abort(self, trajectory: str) -> bool:
        """Forget a request. False: it is not here."""
        ...

    def score(
        self,
        ids: Sequence[int],
        prompt: int,
        *,
        buffer: Literal["active", "staged"],
        experts: bool = False,
        kv: KvFormat | None = None,
        temperature: float = 1.0,
        positions: Sequence[int] | None = None,
    ) -> Score:
        """Score `ids[prompt:]` under the version that serves new requests, or under the staged one.

        kv            storage of the context that the tokens attend to; None: the engine's own. Another one at the
                      same weights measures what the storage alone does.
        temperature   that the logits are divided by
        positions     places in `ids`, rising, of the tokens to score instead of all behind the prompt
        """
        ...

    def trace(self, buffer: Literal["active", "staged"]) -> ComponentTrace:
        """What the weights of that version are, read from the modules that hold them, with the bytes of a token's
        context. A kernel that has not run since the weights were made is "none": score something before.
        """
        ...

    def stage(self, signed: SignedManifest, store: BlobStore) -> Staged:
        """Load a version into the second buffer and read it back. Replaces a staged, uncommitted one.

        Raises `StageFailed` naming the tensor, `BadManifest`, `OldVersion`.
        """
        ...

    def commit(self, policy: CommitPolicy) -> Committed | None:
        """Let the staged version serve. None: not possible yet; call again after the next `step`."""
        ...

    def abort_stage(self) -> None:
        """Forget the staged version, if there is one."""
        ...

    def sleep(self) -> None:
        """Give all memory of weights and requests back. Raises `ValueError` while requests run."""
        ...

    def wake(self, store: BlobStore) -> VersionId | None:
        """Serve again the version served before `sleep`, verified anew; None: there was none."""
        ...
