"""The half of a job's judging that blocks: Redis, and the prompts of the environment. Called in threads."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache

import msgspec

from syncline.contract.events import TERMINAL_JOB_STATES, Alarm
from syncline.contract.job import JobSpec
from syncline.contract.judging import Judgeable, JudgeStatus
from syncline.contract.streams import JOB, JUDGING, TRAJECTORIES
from syncline.contract.token_path import BadTrajectory, Reward, Trajectory
from syncline.contract.trajectory_wire import decode
from syncline.environments.environment import Prompt
from syncline.errands.backlog import Backlog, Response
from syncline.errands.judge_wire import Asked, Judged
from syncline.errands.rewarding import give, wanted
from syncline.errands.scorer import meta_of
from syncline.runtime.bus import BadMessage, Entry, unpack
from syncline.runtime.ledger import Ledger, LedgerEntry
from syncline.runtime.service import ServiceContext

_BLOCK = 1.0  # seconds of waiting for errands
_AGAIN = 10.0  # seconds between looks for responses whose errand was lost
_MOST = 1000  # errands taken at a time
_VERSIONS = 100  # of a judge, that are remembered


class Found(msgspec.Struct):
    """What is behind some responses. `gone`: nobody wants their reward any more; `failed`: with the reason."""

    asked: list[tuple[Response, Asked]] = []
    gone: list[Response] = []
    failed: list[tuple[Response, str]] = []


class Desk:
    """Reads errands and records of one job, and writes its rewards.

    prompt    the environment's
    backlog   what is held already
    name      of the judge, recorded with each reward
    """

    def __init__(
        self,
        context: ServiceContext,
        spec: JobSpec,
        prompt: Callable[[int], Prompt],
        backlog: Backlog,
        name: str,
    ) -> None:
        self._context, self._bus, self._job = context, context.bus, context.job
        self._name, self._backlog = name, backlog
        self._budget = spec.reward.within(spec.limits.batch_wait)
        self._ledger = Ledger.under(context.bus, context.job, spec)
        self._prompt = lru_cache(maxsize=256)(prompt)
        self._prompting, self._telling = threading.Lock(), threading.Lock()
        self._looked = float("-inf")
        raw = self._bus.hget(JOB.at(self._job), "judge")
        self._versions = msgspec.json.decode(raw, type=JudgeStatus).versions if raw else ()
        self.scored = self.unscored = 0

    # ---- in ------------------------------------------------------------------------------------------------
    def read(self) -> list[Response]:
        """New responses to judge: those whose errands arrived, and now and then those whose errand was lost."""
        found = self._lost() if time.monotonic() - self._looked > _AGAIN else []
        key = JUDGING.at(self._job)
        entries = self._bus.read({key: "0"}, block=None if found else _BLOCK, count=_MOST).get(key, [])
        read = [self._errand(entry) for entry in entries]
        errands = [e for e in read if e and not self._backlog.holds(e.trajectory, e.attempt)]
        lines = self._ledger.entries([e.trajectory for e in errands]) if errands else {}
        pairs = [(lines.get(e.trajectory), e) for e in errands]
        found += [(line, e.traceparent) for line, e in pairs if line is not None and wanted(line, e.attempt)]
        now = self._server_ahead()
        responses = [self._response(line, traceparent, now) for line, traceparent in found]
        if entries:  # what is lost from here on is found again in the ledger
            self._bus.delete_entries(key, [entry.id for entry in entries])
        return responses

    def _errand(self, entry: Entry) -> Judgeable | None:
        """The errand in an entry. None: what stands there is none, and whom it meant the ledger will tell."""
        try:
            return unpack(entry, Judgeable)
        except BadMessage as error:
            self._context.log.error("%s", error)
            return None

    def _lost(self) -> list[tuple[LedgerEntry, str]]:
        """Everything that is there at first; later what is old enough for its errand to be overdue."""
        patience = 0.0 if self._looked < 0 else _AGAIN
        self._looked = time.monotonic()
        late = self._ledger.unrewarded(patience)
        return [(line, "") for line in late if not self._backlog.holds(line.trajectory, line.attempt)]

    def _server_ahead(self) -> float:
        """Seconds to take from a server's time to have this process's monotonic one."""
        seconds, micros = self._bus.many([("TIME",)])[0]
        return int(seconds) + int(micros) / 1e6 - time.monotonic()

    def _response(self, line: LedgerEntry, traceparent: str, ahead: float) -> Response:
        record = str(line.stream_id)  # carries the server's milliseconds
        published = int(record.partition("-")[0]) / 1000 - ahead
        return Response(line.trajectory, line.attempt, record, traceparent, published, self._budget)

    def look_up(self, batch: Sequence[Response]) -> Found:
        """Records and prompts of responses that are about to be asked."""
        found = Found()
        lines = self._ledger.entries([response.trajectory for response in batch])
        for response in batch:
            if not wanted(lines.get(response.trajectory), response.attempt):
                found.gone.append(response)
                continue
            record = self._record(response)
            if isinstance(record, str):
                found.failed.append((response, record))
                continue
            response.traceparent = response.traceparent or record.traceparent
            with self._prompting:  # an environment is used by one thread at a time
                prompt = self._prompt(record.prompt)
            asked = Asked(record.trajectory, prompt.plain(), record.text, meta_of(prompt, record.turns))
            found.asked.append((response, asked))
        return found

    def _record(self, response: Response) -> Trajectory | str:
        """The record, or why there is none to judge."""
        entries = self._bus.range(TRAJECTORIES.at(self._job), response.record, response.record)
        if not entries:
            return f"its record {response.record} is gone from the stream"
        try:
            return decode(entries[0].fields)
        except BadTrajectory as error:
            return str(error)

    # ---- out -----------------------------------------------------------------------------------------------
    def settle(
        self, done: Iterable[tuple[Response, Judged]], version: str, began: float, seconds: float
    ) -> None:
        """Store what the judge said. `began`: wall-clock second of the request; `seconds`: that it took."""
        if version:
            self._note(version)
        judge = f"{self._name} {version}" if version else self._name
        for response, judged in done:
            self._give(
                Reward(
                    trajectory=response.trajectory,
                    attempt=response.attempt,
                    state="unscored" if judged.value is None else "scored",
                    value=judged.value,
                    reason=judged.reason,
                    judge=judge,
                    seconds=seconds,
                ),
                response.traceparent,
                began,
            )

    def fail(self, failed: Iterable[tuple[Response, str]]) -> None:
        """What cannot be judged, whoever judges."""
        for response, reason in failed:
            self._give(
                Reward(
                    trajectory=response.trajectory,
                    attempt=response.attempt,
                    state="failed",
                    value=None,
                    reason=reason,
                ),
                response.traceparent,
                time.time(),
            )

    def out_of_time(self, late: Iterable[Response], away: str) -> None:
        """The budget of these is used up. `away`: why the judge does not answer; "" if it does."""
        for response in late:
            asked = f"{response.requests} requests" if response.requests else "its turn did not come"
            why = response.reason or away
            last = f", the last: {why}" if response.reason else f": {why}" if why else ""
            reason = f"not judged within reward.budget of {self._budget:g} s: {asked}{last}"
            self.settle([(response, Judged(None, reason))], "", time.time(), 0.0)

    def _give(self, reward: Reward, traceparent: str, began: float) -> None:
        if not give(self._bus, self._job, self._ledger, reward, traceparent or None, began):
            return
        with self._telling:
            self.scored += reward.state == "scored"
            self.unscored += reward.state == "unscored"

    def _note(self, version: str) -> None:
        """A version that was not seen before, beside others, is something to look at."""
        with self._telling:
            if version in self._versions:
                return
            before, self._versions = self._versions, (*self._versions, version)[-_VERSIONS:]
        if before:
            update = int(self._bus.hget(JOB.at(self._job), "update") or 0)
            what = f"the judge's version was {before[-1]!r} and is {version!r}: rewards may not compare"
            self._context.log.warning("%s", what)
            self._context.emit(Alarm(who="judge", update=update, what=what))

    def tell(self, status: JudgeStatus) -> None:
        """Show how it stands with the judge."""
        shown = msgspec.structs.replace(
            status, scored=self.scored, unscored=self.unscored, versions=self._versions
        )
        self._bus.hset(JOB.at(self._job), "judge", msgspec.json.encode(shown))

    def job_over(self) -> bool:
        """Whether the job has ended, or is no more."""
        state = self._bus.hget(JOB.at(self._job), "state")
        if state is None:
            return not self._bus.exists(JOB.at(self._job))
        return state.decode() in TERMINAL_JOB_STATES
