"""Whether a response is right by an answer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from syncline.environments.options import PATH

Judge = Callable[[str, str], bool]  # (answer, response)


def exact(answer: str, text: str) -> bool:
    """Whether the two are the same, white space at both ends apart."""
    return answer.strip() == text.strip()


def judge_of(name: Literal["exact", "math_verify"]) -> Judge:
    """What judges responses. Raises `ValueError` if its library is not there."""
    if name == "exact":
        return exact
    try:
        import math_verify
    except ImportError:
        raise ValueError(f"{PATH}.judge: math_verify needs the extra: pip install syncline[math]") from None

    def worth_the_same(answer: str, text: str) -> bool:
        # no deadline of the library's own: it would set an alarm, and whoever runs this has one
        found = [math_verify.parse(one, parsing_timeout=None) for one in (answer, text)]
        return bool(math_verify.verify(*found, timeout_seconds=None))

    return worth_the_same
