"""Which behaviour log-probs a record may hold: above -1e30, at most 1e-5 (rounding may leave a little above 0)."""

from __future__ import annotations

import sys
from array import array

# What the top byte of a float32 (sign and seven bits of its exponent) decides of it: under these it is in (-1e30, 1e-5]
# whatever the other three say. So thousands of log-probs are checked without one Python number for each.
_TOP = slice(3 if sys.byteorder == "little" else 0, None, 4)
_SURELY = bytes((*range(0x37), *range(0x80, 0xF1)))


def impossible(logprobs: array[float]) -> str:
    """The first log-prob that is none, and where; "" if all are. `logprobs`: array('f') [S]."""
    if not logprobs.tobytes()[_TOP].translate(None, _SURELY):
        return ""
    wrong = ((i, v) for i, v in enumerate(logprobs) if not -1e30 < v <= 1e-5)  # NaN is not
    return next((f"log-prob {v} at sampled token {i}" for i, v in wrong), "")
