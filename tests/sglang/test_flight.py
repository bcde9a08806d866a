"""A leg that was aborted at the response's last token: the response has ended, and no other leg is sent."""

from __future__ import annotations

from typing import Literal

import pytest
from conformance.rollout_engine import requests
from msgspec.structs import replace

from syncline.contract.version_path import VersionId
from syncline.rollout.engines.sglang.flight import Flight, Serving

STOP = 2
SERVING = Serving(VersionId(0, 1), "d" * 64, "0.1@dddddddddddd", None)


@pytest.mark.parametrize(
    ("length", "tokens", "finish"),
    [
        ("lognormal", [5, 6, 7], "length"),
        ("stop", [5, 6, 7], "length"),
        ("stop", [5, STOP], "stop"),
        ("lognormal", [5, STOP], None),  # stop tokens mean nothing where the length is drawn
        ("stop", [STOP, 5], None),
    ],
)
def test_an_abort_at_the_last_token_ends_the_response(
    length: Literal["stop", "lognormal"], tokens: list[int], finish: str | None
) -> None:
    (request,) = requests(1, length=length, max_tokens=4, min_tokens=0)
    flight = Flight(replace(request, experts=False), 4, frozenset({STOP}))
    flight.tokens = [9]  # of a leg before
    flight.sent = SERVING
    reply = {
        "output_ids": tokens,
        "meta_info": {
            "finish_reason": {"type": "abort"},
            "output_token_logprobs": [[-1.0, token, None] for token in tokens],
            "weight_versions": [{"version": SERVING.label, "start": 0, "end": len(tokens)}],
        },
    }
    ((_, chunk),) = flight.land(reply, None)
    assert chunk.finish == finish
    assert (chunk.start, list(chunk.tokens)) == (1, tokens)
