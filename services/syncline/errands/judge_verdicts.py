"""What follows from an answer, or from none, for the responses that were in the request. Pure.

scored, unscored   a finite number, or why there will be none
again              a failure that may pass, and tries are left; or the judge did not take the request at all, which
                   costs no try: how long that may go on is for the budget to say
alone              a request with others was refused or could not be read: one of them may have spoilt it
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from syncline.errands.backlog import Response
from syncline.errands.breaker import spread
from syncline.errands.judge_client import Mute, Said
from syncline.errands.judge_wire import BadAnswer, Judged, read_answer, retry_after

_FIRST, _LAST = 0.25, 30.0  # seconds before a second try, and before a late one
_SOON = 0.5  # seconds before a judge is asked again that took nothing: its breaker does the waiting
_PASSING = (408, 425)  # statuses, beside 5xx, of a try that failed and may not the next time
_LATER = (429, 503)  # of a request that was not taken


class Verdicts(msgspec.Struct):
    """What follows. `again`: with the seconds to wait; `quiet`: seconds in which the judge wants no request."""

    done: list[tuple[Response, Judged]] = []
    again: list[tuple[Response, float]] = []
    quiet: float = 0.0
    version: str = ""
    foreign: int = 0


def verdicts(
    batch: Sequence[Response], said: Said | Mute, *, retries: int, single: bool, now: float
) -> Verdicts:
    """What `said` means for `batch`. `now`: wall-clock unix seconds, for a `Retry-After` that is a date."""
    for response in batch:
        response.requests += 1
    if isinstance(said, Mute):
        if said.kind == "away":
            return Verdicts(again=_told(batch, said.reason, lambda _: spread(_SOON)))
        return _failed(batch, said.reason, 0.0, retries)
    asks = retry_after(said.retry_after, now)
    if said.status in _LATER:
        return Verdicts(again=_told(batch, f"HTTP {said.status}", lambda _: asks + spread(_SOON)), quiet=asks)
    if said.status >= 500 or said.status in _PASSING:
        return _failed(batch, f"HTTP {said.status}", asks, retries)
    if said.status != 200:
        return _spoilt(batch, f"HTTP {said.status}")
    try:
        answer = read_answer(said.body, [response.trajectory for response in batch], single=single)
    except BadAnswer as error:
        return _spoilt(batch, str(error))
    done = [(response, answer.judged[response.trajectory]) for response in batch]
    return Verdicts(done=done, version=answer.version, foreign=answer.foreign)


def _told(
    batch: Sequence[Response], reason: str, pause: Callable[[Response], float]
) -> list[tuple[Response, float]]:
    for response in batch:
        response.reason = reason
    return [(response, pause(response)) for response in batch]


def _failed(batch: Sequence[Response], reason: str, asks: float, retries: int) -> Verdicts:
    """A try that failed: the next one later than the last, and the last of a response that fails with others alone."""
    out = Verdicts()
    for response in batch:
        response.tries += 1
        response.reason = reason
        if response.tries > retries:
            out.done.append((response, Judged(None, f"{reason}, at the last of {response.tries} tries")))
            continue
        response.alone = response.tries == retries and retries > 1
        pause = min(_FIRST * 2 ** (response.tries - 1), _LAST)
        out.again.append((response, max(asks, spread(pause))))
    return out


def _spoilt(batch: Sequence[Response], reason: str) -> Verdicts:
    """Nothing in the request can be judged: each goes alone, or went so."""
    if len(batch) == 1:
        return Verdicts(done=[(batch[0], Judged(None, reason))])
    for response in batch:
        response.alone = True
    return Verdicts(again=_told(batch, reason, lambda _: 0.0))
