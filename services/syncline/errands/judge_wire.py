"""What goes over the wire to an HTTP judge and back: see docs/judges.md. Pure.

An answer is matched by trajectory id, never by place. What cannot be matched, or is no finite number, is `unscored`
with its reason; it is nobody else's score and never 0.
"""

from __future__ import annotations

import email.utils
import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

_VERSION = 200  # characters of a version
_ONE, _MANY = {"reward"}, {"rewards"}
_ENTRY = {"trajectory", "reward"}


class BadAnswer(ValueError):
    """An answer of which nothing can be used. The message says why."""


class Asked(msgspec.Struct, frozen=True):
    """One response as the judge gets it. `meta` is the prompt's, with the turns of a task that has several."""

    trajectory: str
    prompt: object
    response: str
    meta: Mapping[str, Any]


class Judged(msgspec.Struct, frozen=True):
    """What the judge said of one response: a finite `value`, or None and why."""

    value: float | None
    reason: str = ""


class Answer(msgspec.Struct, frozen=True):
    """A whole answer. `version`: the judge's own word for itself, "" if it gave none."""

    judged: dict[str, Judged]
    version: str
    foreign: int = 0  # entries for trajectories that were not asked


def question(asked: Sequence[Asked], *, single: bool) -> bytes:
    """The body of a request. `single`: the form for judges that take one response at a time."""
    body: object = asked[0] if single else {"responses": asked}
    return msgspec.json.encode(body, enc_hook=str)  # meta may hold what JSON has no form for


def read_answer(body: bytes, asked: Sequence[str], *, single: bool) -> Answer:
    """What an answer says of the trajectories `asked`, each exactly once. Raises `BadAnswer`."""
    try:
        told = json.loads(body)  # reads NaN, which then costs one response and not all of them
    except (ValueError, RecursionError) as error:
        raise BadAnswer(f"the answer is no JSON: {error}"[:200]) from None
    needed = _ONE if single else _MANY
    if not isinstance(told, dict):
        raise BadAnswer(f"the answer is {_shown(told)}, and should be an object")
    if not needed <= told.keys() <= needed | {"judge"}:
        wanted = "'reward'" if single else "'rewards'"
        raise BadAnswer(
            f"the answer has keys {_keys(told)}, and should have {wanted}, and 'judge' if it likes"
        )
    version = told.get("judge", "")
    if not isinstance(version, str) or len(version) > _VERSION or not version.isprintable():
        raise BadAnswer(f"the judge's version is {_shown(version)}, and should be a short text")
    if single:
        return Answer({asked[0]: _judged(told["reward"])}, version)
    if not isinstance(told["rewards"], list):
        raise BadAnswer(f"'rewards' is {_shown(told['rewards'])}, and should be a list")
    return _aligned(told["rewards"], asked, version)


def _aligned(entries: list[Any], asked: Sequence[str], version: str) -> Answer:
    names = [entry.get("trajectory") if isinstance(entry, dict) else None for entry in entries]
    times = Counter(name for name in names if isinstance(name, str))
    judged = dict.fromkeys(asked, Judged(None, "the answer leaves it out"))
    foreign = 0
    for name, entry in zip(names, entries, strict=True):
        if not isinstance(name, str) or name not in judged:
            foreign += 1
        elif times[name] > 1:
            judged[name] = Judged(None, f"the answer has it {times[name]} times")
        elif entry.keys() != _ENTRY:
            judged[name] = Judged(None, f"its entry has keys {_keys(entry)}, and should have {_keys(_ENTRY)}")
        else:
            judged[name] = _judged(entry["reward"])
    return Answer(judged, version, foreign)


def _judged(value: object) -> Judged:
    number = finite(value)
    if number is None:
        return Judged(None, f"the judge answered {_shown(value)}, which is no finite number")
    return Judged(number)


def finite(value: object) -> float | None:
    """A finite number as float, or None for anything else: no bool, no text, no whole number beyond all floats."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


def retry_after(header: str | None, now: float) -> float:
    """Seconds that a `Retry-After` header asks for, as number or as date; 0.0 without one that can be read.

    now   wall-clock unix seconds
    """
    if header is None:
        return 0.0
    if header.strip().isdecimal():
        return float(min(int(header[:12]), 86_400))
    try:
        date = email.utils.parsedate_to_datetime(header)
    except ValueError:
        return 0.0
    return min(max(0.0, date.timestamp() - now), 86_400.0)


def _keys(told: Any) -> str:
    return _shown(sorted(map(str, told)))


def _shown(value: object) -> str:
    text = repr(value) if not isinstance(value, dict | list) or len(value) < 20 else type(value).__name__
    return text if len(text) <= 80 else text[:77] + "..."
