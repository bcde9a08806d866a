"""The API under generated requests, many of them: `make fuzz REQUESTS=50000`. No answer is a server error.

What the OpenAPI document promises is held by `test_gateway_openapi.py`, in every test run; this is its long form. Each
operation gets its share, half of it on a job that is there, with the tokens of an operator and of a tenant in turn. The
result is left in `runs/fuzz.json`.
"""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import requests
import schemathesis
from exports_left import write_export
from hypothesis import HealthCheck, Phase, given, seed, settings
from left_behind import metrics, publish, row, write_update
from schemathesis import GenerationMode
from schemathesis.core.result import Ok
from serving import SPEC, Server

from syncline.contract.streams import METRICS
from syncline.gateway.app import create_app
from syncline.runtime.bus import Bus
from syncline.runtime.settings import Settings
from syncline.runtime.tokens import TokenStore

REQUESTS = int(os.environ.get("REQUESTS", "50000"))
SEED = int(os.environ.get("SEED", "8"))
FIRST = 5  # requests of each operation, which show whether it has anything to generate
RESULT = Path("runs") / "fuzz.json"


@pytest.mark.long
@pytest.mark.timeout(24 * 3600)
def test_no_generated_request_is_a_server_error(own_redis: str, model_root: Path, tmp_path: Path) -> None:
    told = fuzz(own_redis, model_root, tmp_path, REQUESTS, SEED)
    RESULT.parent.mkdir(exist_ok=True)
    RESULT.write_text(json.dumps(told, indent=1) + "\n")
    assert told["requests"] >= REQUESTS
    assert told["server_errors"] == []
    assert told["not_problems"] == []


def test_a_short_run(own_redis: str, model_root: Path, tmp_path: Path) -> None:
    told = fuzz(own_redis, model_root, tmp_path, 400, 1)
    assert told["requests"] >= 400
    assert told["server_errors"] == []
    assert told["not_problems"] == []


def fuzz(redis: str, models: Path, folder: Path, requests: int, start: int) -> dict[str, Any]:
    """Send at least `requests`; what came of them."""
    given_ = {
        "SYNCLINE_REDIS_URL": redis,
        "SYNCLINE_MODELS": str(models),
        "SYNCLINE_RUNS": str(folder / "runs"),
    }
    made = Settings.read(given_ | {"SYNCLINE_TOKEN": "operators-own"})
    store = TokenStore(made.token_store)
    member = store.add("fuzz", "member")[1]
    store.limit("fuzz", rate=1e6, burst=10**6, running=10**6, stored=10**6)
    bus = Bus(made.redis_url, deadline=5)
    server = Server(made, bus)
    try:
        return _fuzz(server, [member, "operators-own"], requests, start)
    finally:
        server.stop()
        bus.close()


class _Fuzzing:
    """Sends what is generated, as the operator and as a tenant in turn, and keeps count."""

    def __init__(self, server: Server, tokens: list[str], ids: dict[str, str]) -> None:
        self._server, self._tokens, self._ids = server, tokens, ids
        self._http = requests.Session()
        self.counts: Counter[int] = Counter()
        self.errors: list[str] = []
        self.odd: list[str] = []
        self.slowest = 0.0

    def send(self, case: Any, turn: int) -> None:
        if turn % 2 == 0:
            for name in case.path_parameters or {}:
                case.path_parameters[name] = self._ids.get(name, case.path_parameters[name])
        case.headers = {**(case.headers or {}), "Authorization": f"Bearer {self._tokens[turn % 4 // 2]}"}
        at = time.monotonic()
        answer = case.call(base_url=self._server.url, timeout=60, session=self._http)
        self.slowest = max(self.slowest, time.monotonic() - at)
        self.counts[answer.status_code] += 1
        if answer.status_code >= 500 and "retry-after" not in answer.headers:
            self.errors.append(f"{answer.status_code} {case.as_curl_command()[:500]}")
        elif answer.status_code >= 400 and answer.headers.get("content-type", [""])[0] != _PROBLEM:
            self.odd.append(f"{answer.status_code} {case.as_curl_command()[:500]}")


def _fuzz(server: Server, tokens: list[str], wanted: int, start: int) -> dict[str, Any]:
    fuzzing = _Fuzzing(server, tokens, _ended(server, tokens[0]))
    schema = schemathesis.openapi.from_dict(create_app(server.settings, server.bus).openapi())
    operations = [found.ok() for found in schema.get_all_operations() if isinstance(found, Ok)]
    assert len(operations) > 20
    began = time.monotonic()
    first = {place: _ask(fuzzing, operation, FIRST, 0, start) for place, operation in enumerate(operations)}
    rich = [
        operations[place] for place, sent in first.items() if sent >= FIRST
    ]  # others have nothing to generate
    share = -(-(wanted - fuzzing.counts.total()) // len(rich))
    for operation in rich:
        sent = 0
        while sent < share:
            sent += _ask(fuzzing, operation, min(share - sent, 500), sent, start + FIRST + sent)
    return {
        "requests": fuzzing.counts.total(),
        "operations": len(operations),
        "server_errors": fuzzing.errors[:20],
        "not_problems": fuzzing.odd[:20],
        "statuses": {str(status): count for status, count in sorted(fuzzing.counts.items())},
        "slowest_seconds": round(fuzzing.slowest, 3),
        "seconds": round(time.monotonic() - began, 1),
        "seed": start,
    }


def _ask(fuzzing: _Fuzzing, operation: Any, most: int, before: int, start: int) -> int:
    """Send up to `most` generated requests of one operation. Returns how many they were."""
    sent, mode = 0, _mode(before)
    generated = operation.as_strategy(generation_mode=mode)
    if (
        mode is GenerationMode.NEGATIVE
        and not operation.body
        and not len(operation.query)
        and not len(operation.headers)
    ):
        generated = operation.as_strategy(generation_mode=GenerationMode.POSITIVE)  # nothing could be wrong

    @seed(start)
    @settings(
        max_examples=most,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=generated)
    def run(case: Any) -> None:
        nonlocal sent
        fuzzing.send(case, sent)
        sent += 1

    run()
    return sent


_PROBLEM = "application/problem+json"


def _mode(sent: int) -> GenerationMode:
    """Well-formed requests and ill-formed ones in turn."""
    return GenerationMode.POSITIVE if sent // 500 % 2 == 0 else GenerationMode.NEGATIVE


def _ended(server: Server, token: str) -> dict[str, str]:
    """Ids of a job of the tenant's with something on every route; it has ended, so that its event stream does too."""
    spec = {**SPEC, "batch": {"groups": 1, "group_size": 2}, "schedule": {"max_lag": 5}}
    answer = server.http.post("/v1/jobs", json=spec, headers={"authorization": f"Bearer {token}"})
    job = str(answer.json()["id"])
    made = publish(server, job, 0)
    folder = server.settings.job_dir(job)
    write_update(folder, job, 9, [row(t) for t in made])
    server.bus.append(METRICS.at(job), metrics(1, loss=float("nan")))
    server.set_state(job, "succeeded")
    named = {"export": write_export(folder), "file": "config.json"}
    return {"job": job, "trajectory": made[0].trajectory, "version": "0.7", "token": "1", **named}
