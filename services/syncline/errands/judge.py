"""`python -m syncline.errands.judge`: the one process that asks the HTTP judge of a job. See docs/judges.md.

consumes      `judging` (score errands of the job); the ledger, for whatever was lost on the way
produces      rewards in the ledger, `token.rewarded` hops, dead letters; `judge` in the job hash; `Alarm` when the
              judge's version changes
waits for     the lease `judge` of the job; answers, each at most `reward.timeout` seconds; the breaker's pauses
unblocked by  errands that arrive, answers, and the clock: at the end of its budget each response is `unscored`

No user's code judges here, so nothing needs a sandbox: one event loop keeps `reward.parallel` requests in flight, and
everything that blocks (Redis, the environment's prompts) runs in threads beside it.
"""

from __future__ import annotations

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Literal

from syncline.contract.job import JobSpec
from syncline.contract.judging import JudgeStatus
from syncline.contract.streams import JOB, JUDGED, JUDGING
from syncline.environments.environment import Environment, Prompt, load
from syncline.errands.backlog import Backlog, Response
from syncline.errands.breaker import SETTLED, Breaker
from syncline.errands.judge_client import JudgeClient, Mute, Said
from syncline.errands.judge_desk import Desk
from syncline.errands.judge_verdicts import verdicts
from syncline.errands.judge_wire import Asked, question
from syncline.runtime.sandbox import die_with_parent
from syncline.runtime.service import ServiceContext, run

TURN = 1.0  # seconds between looks at the job, and between accounts of the judge
_BYTES = 65536  # of an answer, and so many again for each response in the request


class Judging:
    """The judge of one job. Raises `BadUrl` (a `ValueError`)."""

    def __init__(self, context: ServiceContext, spec: JobSpec, environment: Environment) -> None:
        reward = spec.reward
        self._context, self._reward = context, reward
        most = _BYTES * (1 + reward.batch)
        self._client = JudgeClient(str(reward.url), reward.parallel, reward.timeout, most)
        self._backlog = Backlog()
        self._breaker = Breaker(reward.breaker, time.monotonic())
        self._desk = Desk(context, spec, environment.prompt, self._backlog, f"http {self._client.name}")
        # of their own: prompts are a user's code, and one that hangs must not hold the clock of the others
        self._lookers = ThreadPoolExecutor(max_workers=4, thread_name_prefix="prompts")
        self._asked: dict[asyncio.Task[None], int] = {}  # requests in flight -> responses in each
        self._quiet_until = 0.0  # as the judge asked for
        self._wake = asyncio.Event()
        self._over = False

    async def run(self) -> None:
        """Until the job is over or the process is told to stop."""
        try:
            async with asyncio.TaskGroup() as tasks:
                tending = [tasks.create_task(one()) for one in (self._take_in, self._account)]
                await self._send_out(tasks)
                for task in (*tending, *self._asked):
                    task.cancel()
        except ExceptionGroup as group:
            raise group.exceptions[0] from group  # of those that failed, the first tells the story
        self._lookers.shutdown(wait=False, cancel_futures=True)
        await self._client.close()

    async def _send_out(self, tasks: asyncio.TaskGroup) -> None:
        """Requests go out while there is room; what has run out of time is unscored."""
        while not (self._over or self._context.stop_requested()):
            self._wake.clear()
            now = time.monotonic()
            late = self._backlog.tick(now)
            if late:
                away = "" if self._breaker.state == "closed" else self._breaker.reason
                await asyncio.to_thread(self._desk.out_of_time, late, away)
            while self._room(now) and (batch := self._backlog.take(self._reward.batch)):
                task = tasks.create_task(self._ask(batch, self._breaker.begin()))
                self._asked[task] = len(batch)
                task.add_done_callback(self._back)
            await self._pause(now)

    async def _take_in(self) -> None:
        """Errands become responses that wait."""
        while True:
            for response in await asyncio.to_thread(self._desk.read):
                self._backlog.add(response)
                self._wake.set()

    async def _account(self) -> None:
        """What people see of the judge, and whether the job still wants it."""
        while True:
            await asyncio.to_thread(self._desk.tell, self._status())
            self._over = await asyncio.to_thread(self._desk.job_over)
            await asyncio.sleep(TURN)

    # ---- one request -----------------------------------------------------------------------------------------
    async def _ask(self, batch: list[Response], trial: bool) -> None:
        """Ask about some responses; each of them is rewarded afterwards, or waits to be asked again."""
        loop = asyncio.get_running_loop()
        found = await loop.run_in_executor(self._lookers, self._desk.look_up, batch)
        self._backlog.end(found.gone)
        self._backlog.end(response for response, _ in found.failed)
        await asyncio.to_thread(self._desk.fail, found.failed)
        if not found.asked:
            self._breaker.unused(time.monotonic(), trial)
            return
        began, start = time.time(), time.monotonic()
        trace = found.asked[0][0].traceparent if len(found.asked) == 1 else ""
        said = await self._said([one for _, one in found.asked], trial, trace)
        asked = [response for response, _ in found.asked]
        single = self._reward.batch == 1
        told = verdicts(asked, said, retries=self._reward.retries, single=single, now=time.time())
        now = time.monotonic()
        self._quiet_until = max(self._quiet_until, now + told.quiet)
        for response, pause in told.again:
            self._backlog.again(response, now + pause)
        done = [(response, judged) for response, judged in told.done if not response.over]
        self._backlog.end(response for response, _ in done)
        self._back(asyncio.current_task())  # the judge is free for the next request while this one is stored
        if told.foreign:
            self._context.log.warning("the judge answered for %d that were not asked", told.foreign)
        await asyncio.to_thread(self._desk.settle, done, told.version, began, now - start)

    async def _said(self, asked: list[Asked], trial: bool, traceparent: str) -> Said | Mute:
        """The judge's answer, of which the breaker has heard."""
        held = asyncio.get_running_loop().call_later(SETTLED, self._held) if trial else None
        try:
            said = await self._client.post(question(asked, single=self._reward.batch == 1), traceparent)
        finally:
            if held is not None:
                held.cancel()
        now = time.monotonic()
        if isinstance(said, Mute):
            self._breaker.failed(now, said.reason, away=said.kind != "late", trial=trial)
        elif said.status >= 500:
            self._breaker.failed(now, f"HTTP {said.status}", away=False, trial=trial)
        else:
            self._breaker.answered(now)
        return said

    def _held(self) -> None:
        self._breaker.held()
        self._wake.set()

    def _back(self, task: asyncio.Task[None] | None) -> None:
        if task is not None and self._asked.pop(task, 0):
            self._wake.set()

    # ---- when ------------------------------------------------------------------------------------------------
    def _room(self, now: float) -> bool:
        free = len(self._asked) < self._reward.parallel
        return free and now >= self._quiet_until and self._breaker.admits(now)

    async def _pause(self, now: float) -> None:
        """Until something happens, or the clock says that something may."""
        dues = (self._backlog.due(), self._breaker.due(), self._quiet_until)
        soon = min((due - now for due in dues if due is not None and due > now), default=TURN)
        try:
            await asyncio.wait_for(self._wake.wait(), min(soon, TURN))
        except TimeoutError:
            return

    def _status(self) -> JudgeStatus:
        breaker, now = self._breaker, time.monotonic()
        asked = sum(self._asked.values())
        oldest = self._backlog.oldest()
        states: dict[str, Literal["answers", "silent", "trying"]]
        states = {"closed": "answers", "open": "silent", "trial": "trying"}
        return JudgeStatus(
            state=states[breaker.state],
            since=time.time() - (now - breaker.since),
            reason=breaker.reason,
            waiting=max(0, len(self._backlog) - asked),
            asked=asked,
            oldest=0.0 if oldest is None else now - oldest,
            at=time.time(),
        )


def main(context: ServiceContext) -> None:
    """Judge until the job is over."""
    context.ready(False, "waits for the lease of the judge")
    context.lease("judge")
    raw = context.bus.hget(JOB.at(context.job), "spec")
    if raw is not None:
        context.ready(True)
        serve(context, JobSpec.model_validate_json(raw))
    if not context.stop_requested():
        context.bus.zrem(JUDGED.at(), context.job)
        context.bus.delete(JUDGING.at(context.job))  # errands that came after the job's end


def serve(context: ServiceContext, spec: JobSpec) -> None:
    """The event loop, or failed rewards for a job whose judge cannot be asked at all."""
    try:
        judging = Judging(context, spec, load(spec.task, spec.seeds.data))
    except ValueError as error:
        context.log.error("this judge cannot be asked: %s", error)
        fail_all(context, spec, str(error))
        return
    asyncio.run(judging.run())


def fail_all(context: ServiceContext, spec: JobSpec, reason: str) -> None:
    """Rewards of a job that cannot have any, as its responses come."""

    def no_prompt(index: int) -> Prompt:
        raise AssertionError(f"prompt {index} of a job whose judge cannot be asked")

    desk = Desk(context, spec, no_prompt, Backlog(), "")
    while not (context.stop_requested() or desk.job_over()):
        desk.fail([(response, reason) for response in desk.read()])


if __name__ == "__main__":
    die_with_parent()
    run("errands", main)
