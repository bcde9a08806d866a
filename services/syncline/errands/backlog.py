"""The responses that a job's judge still has to judge, oldest first: in memory, for the ledger is what lasts."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterable


class Response:
    """One response on its way through the judge. Times are seconds of a monotonic clock."""

    def __init__(
        self, trajectory: str, attempt: int, record: str, traceparent: str, published: float, budget: float
    ) -> None:
        self.trajectory, self.attempt = trajectory, attempt
        self.record = record  # id of its entry in `trajectories`
        self.traceparent = traceparent
        self.published, self.until = published, published + budget
        self.requests = 0  # that it was in
        self.tries = 0  # of them that the judge took and failed
        self.alone = False  # it goes without others, which it may have spoilt
        self.over = False  # rewarded, or nobody's any more
        self.reason = ""  # why it has no score yet


class Backlog:
    """Each (trajectory, attempt) once, from its errand to its reward."""

    def __init__(self) -> None:
        self._held: dict[tuple[str, int], Response] = {}
        self._order = itertools.count()
        self._ready: list[tuple[float, int, Response]] = []  # by publication
        self._later: list[tuple[float, int, Response]] = []  # by when they may be asked again
        self._ends: list[tuple[float, int, Response]] = []  # by the end of their budget

    def __len__(self) -> int:
        return len(self._held)

    def holds(self, trajectory: str, attempt: int) -> bool:
        """Whether it is here, waiting or asked."""
        return (trajectory, attempt) in self._held

    def add(self, response: Response) -> None:
        """Take it in, unless it is here already."""
        key = (response.trajectory, response.attempt)
        if key not in self._held:
            self._held[key] = response
            self._push(self._ready, response.published, response)
            self._push(self._ends, response.until, response)

    def take(self, most: int) -> list[Response]:
        """The oldest that may be asked, at most `most` of them; one that goes alone is alone."""
        taken: list[Response] = []
        left: list[Response] = []
        while self._ready and len(taken) < most:
            response = heapq.heappop(self._ready)[2]
            if response.over:
                continue
            if response.alone and taken:
                left.append(response)
                continue
            taken.append(response)
            if response.alone:
                break
        for response in left:
            self._push(self._ready, response.published, response)
        return taken

    def again(self, response: Response, at: float) -> None:
        """It was asked in vain: not before `at`."""
        if not response.over:
            self._push(self._later, at, response)

    def end(self, responses: Iterable[Response]) -> None:
        """They are rewarded, or nobody's any more."""
        for response in responses:
            response.over = True
            self._held.pop((response.trajectory, response.attempt), None)

    def tick(self, now: float) -> list[Response]:
        """Time has passed: those whose budget is used up, asked or not, each once. They are over now."""
        while self._later and self._later[0][0] <= now:
            response = heapq.heappop(self._later)[2]
            self._push(self._ready, response.published, response)
        found = []
        while self._ends and (self._ends[0][0] <= now or self._ends[0][2].over):
            response = heapq.heappop(self._ends)[2]
            if not response.over:
                found.append(response)
        self.end(found)
        return found

    def due(self) -> float | None:
        """When, without anybody's doing, one may be asked again or runs out of time; None: never."""
        heads = [heap[0][0] for heap in (self._later, self._ends) if heap]
        return min(heads, default=None)

    def oldest(self) -> float | None:
        """When the oldest of all was published."""
        return min((response.published for response in self._held.values()), default=None)

    def _push(self, heap: list[tuple[float, int, Response]], at: float, response: Response) -> None:
        heapq.heappush(heap, (at, next(self._order), response))
