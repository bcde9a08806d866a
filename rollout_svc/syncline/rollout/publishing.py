"""From closed sessions to published trajectories: records, hops, and the errand that scores them."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence

from syncline.contract.token_path import PUBLISHED, SAMPLED, SamplingConvention, Trajectory
from syncline.contract.version_path import VersionId
from syncline.reference.model import TextCodec
from syncline.rollout.intake import Held, Intake
from syncline.rollout.session import Closed
from syncline.rollout.spans import Sampled, trajectory
from syncline.runtime.errands import BATCH, QUICK_BATCH, ScoreErrand, send_scores
from syncline.runtime.ledger import Ledger
from syncline.runtime.tracing import record

_LOG = logging.getLogger("syncline.rollout")
_TOGETHER = 64  # sessions that are published at once, however soon they follow one another
_WAIT = 0.05  # seconds that the first of them waits for others while tokens are sampled


class Gathering:
    """When what has ended is published: what ends within a moment shares its round trips and its errand, which cost
    more than sampling a short response does. Nothing waits once nothing is sampled.
    """

    def __init__(self) -> None:
        self._since: float | None = None  # monotonic: when the first of those that wait had ended

    def over(self, ended: int, sampling: bool) -> bool:
        """Whether the `ended` sessions are to be published now. `sampling`: others may end soon."""
        now = time.monotonic()
        if self._since is None and ended:
            self._since = now
        if self._since is None or (sampling and ended < _TOGETHER and now < self._since + _WAIT):
            return False
        self._since = None
        return ended > 0


class Publisher:
    """Publishes sessions that have ended.

    contexts   version -> traceparent of its activation here: spans link to it
    quick      scoring takes microseconds: there is nothing to gain from many messages
    """

    def __init__(
        self,
        ledger: Ledger,
        intake: Intake,
        codec: TextCodec,
        contexts: Mapping[VersionId, str],
        *,
        job: str,
        name: str,
        convention: SamplingConvention,
        contract: str,
        quick: bool,
    ) -> None:
        self._batch = QUICK_BATCH if quick else BATCH
        self._ledger, self._intake, self._codec, self._contexts = ledger, intake, codec, contexts
        self._job, self._name = job, name
        self._convention, self._contract = convention, contract
        self.fenced = 0

    def publish(self, closed: Sequence[Closed]) -> list[Trajectory]:
        """Publish what has ended, and return its records."""
        if not closed:
            return []
        recorded = [self._record(session) for session in closed]
        ended = [
            (held, told) for held, told in recorded if self._intake.sampled(told.trajectory, told.oldest)
        ]
        began = time.time()
        answers = self._ledger.publish_many([(told, held.work_id) for held, told in ended])
        errands = []
        for (held, told), answer in zip(ended, answers, strict=True):
            self._intake.drop(told.trajectory)
            if answer == "published":
                errands.append(
                    ScoreErrand(told.trajectory, held.attempt, 0, self._trace_published(told, began))
                )
            else:
                self.fenced += 1
                _LOG.warning("trajectory %s attempt %d is fenced: dropped", told.trajectory, held.attempt)
        if errands:
            send_scores(self._job, errands, self._batch)
        return [told for _, told in ended]

    def _record(self, closed: Closed) -> tuple[Held, Trajectory]:
        held, sampled = self._intake.held[closed.trajectory], closed.sampled
        return held, trajectory(
            held.item,
            held.attempt,
            closed.tokens[: closed.segments[0].end],
            sampled,
            convention=self._convention,
            contract=self._contract,
            text=self._codec.decode(sampled.tokens),
            traceparent=self._trace_spans(held, sampled),
            queued=(held.begun or held.taken) - held.taken,
            tokens=closed.tokens,
            segments=closed.segments,
            turns=closed.turns,
        )

    def _trace_published(self, told: Trajectory, began: float) -> str:
        return record(
            PUBLISHED,
            told.traceparent,
            began,
            time.time(),
            job=self._job,
            trajectory=told.trajectory,
            attempt=told.attempt,
            worker=self._name,
            tokens=told.sampled,
            spans=len(told.spans),
        )

    def _trace_spans(self, held: Held, sampled: Sampled) -> str:
        """One hop per version span, each after the one before it. Returns the last one's context."""
        context = held.item.traceparent
        for span, (began, ended) in zip(sampled.spans, sampled.times, strict=True):
            activation = self._contexts.get(span.version)
            context = record(
                SAMPLED,
                context or None,
                began,
                ended,
                links=[activation] if activation else [],
                job=self._job,
                trajectory=held.item.trajectory,
                attempt=held.attempt,
                worker=self._name,
                version=span.version,
                digest=span.digest,
                context=span.context,
                start=span.start,
                end=span.end,
            )
        return context
