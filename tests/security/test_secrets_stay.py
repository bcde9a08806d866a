"""A job runs in an environment full of canaries; none is in a log, a span, a record, Redis or a report afterwards.

And a spec that holds a secret is refused, since it would be stored and shown.
"""

from __future__ import annotations

import json
import shutil
import sqlite3
import tempfile
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from security_world import Installation
from serving import SPEC, problem
from specs import spec as spec_of
from stack import Stack

from syncline.runtime.bus import Bus
from syncline.runtime.tokens import TokenStore

CANARIES = {
    "SYNCLINE_TOKEN": "canary-operators-token",
    "SYNCLINE_METRICS_TOKEN": "canary-scrapers-token",
    "SYNCLINE_TRACES_KEY": "canary-of-who-writes-spans",
    "WANDB_API_KEY": "canary-wandb-key",
    "AWS_SECRET_ACCESS_KEY": "canary-aws-key",
    "HF_TOKEN": "canary-hf-token",
    "OTHER_SERVICE_PASSWORD": "canary-of-somebody-else",
}


@pytest.fixture
def stack() -> Iterator[Stack]:
    runs = Path(tempfile.mkdtemp(prefix="sl-"))
    started = Stack(runs, CANARIES | {"PYTHONPATH": str(Path(__file__).parent)})
    try:
        started.up()
        yield started
    finally:
        started.down()
        shutil.rmtree(runs, ignore_errors=True)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_no_canary_is_anywhere(stack: Stack) -> None:
    member = TokenStore(stack.runs / "tokens.json").add("acme", "member")[1]
    stack.http.headers["authorization"] = f"Bearer {member}"
    reward = {"source": "python", "function": "canaries:looks"}
    job = stack.submit(spec_of(reward=reward, schedule={"updates": 2}))
    status = stack.wait(job, 400)
    assert status["state"] == "succeeded"
    stack.summary(job)
    assert (
        stack.http.get(f"{stack.url}/v1/jobs", headers={"authorization": "Bearer canary-guess"}).status_code
        == 401
    )
    secrets = [*CANARIES.values(), member, member.rpartition("_")[2], "canary-guess"]
    assert found_in_files(stack.runs, secrets) == []
    assert found_in_redis(stack.redis_url, secrets) == []
    for path in ("", "/report", "/summary", "/events", "/metrics", "/versions", "/tracking"):
        answer = stack.http.get(f"{stack.url}/v1/jobs/{job}{path}")
        assert not [secret for secret in secrets if secret in answer.text], path
    assert status["sandbox"]


def found_in_files(runs: Path, secrets: list[str]) -> list[str]:
    """Files of the run root with a secret in them. Spans are read as a store, too: rows may lie in its journal."""
    spans = sqlite3.connect(f"file:{runs / 'traces.sqlite'}?mode=ro", uri=True)
    told = "\n".join(spans.iterdump())
    spans.close()
    assert told.count("INSERT") > 10, "the store of spans is empty: nothing was looked through"
    found = [f"traces.sqlite {secret}" for secret in secrets if secret in told]
    looked = 0
    for path in runs.rglob("*"):
        if path.is_file() and not path.is_symlink():
            looked += 1
            content = path.read_bytes()
            found += [
                f"{path.relative_to(runs)} {secret}" for secret in secrets if secret.encode() in content
            ]
    assert looked > 20
    return found


def found_in_redis(url: str, secrets: list[str]) -> list[str]:
    """Keys whose serialised value holds a secret."""
    bus = Bus(url)
    keys = bus.call("KEYS", "*")
    assert len(keys) > 10
    kinds = bus.many([("TYPE", key) for key in keys])
    reads = {
        b"string": ("GET",),
        b"hash": ("HGETALL",),
        b"stream": ("XRANGE", "-", "+"),
        b"set": ("SMEMBERS",),
    }
    found = []
    for key, kind in zip(keys, kinds, strict=True):
        verb, *rest = reads.get(kind, ("ZRANGE", 0, -1) if kind == b"zset" else ("LRANGE", 0, -1))
        value = repr(bus.call(verb, key, *rest))
        found += [f"{key.decode()} {secret}" for secret in secrets if secret in value]
    bus.close()
    return found


@pytest.mark.parametrize(
    ("reward", "task", "path"),
    [
        ({"source": "http", "url": "https://user:canary@judge.example.org/"}, {}, "reward.url"),
        ({"source": "http", "url": "https://canary@judge.example.org/"}, {}, "reward.url"),
        ({"source": "http", "url": "https://judge.example.org/?api_key=canary"}, {}, "reward.url"),
        ({"source": "http", "url": "https://judge.example.org/?x=1&access-token=canary"}, {}, "reward.url"),
        (
            {},
            {"environment": "http", "options": {"url": "http://u:canary@h:1", "version": "1"}},
            "task.options.url",
        ),
    ],
)
def test_a_spec_with_a_secret_is_refused_and_not_repeated(
    house: Installation, reward: dict[str, object], task: dict[str, object], path: str
) -> None:
    spec = {**SPEC, "reward": reward, **({"task": task} if task else {})}
    answer: httpx.Response = house.ask("operator", "POST", "/v1/jobs", json=spec)
    found = problem(answer, 422)
    assert path in [fault["path"] for fault in found["errors"]]
    assert "canary" not in json.dumps(found)


def test_ordinary_addresses_are_no_secrets(house: Installation) -> None:
    for url in ("http://judge:8000/score", "https://judge.example.org/a?tokens=5&max_tokens=9&version=2"):
        house.submit("operator", reward={"source": "http", "url": url})
