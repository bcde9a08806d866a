"""Spans of other processes reach the gateway's own store, by the real exporter, from real processes."""

from __future__ import annotations

import gzip
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
import uvicorn
from google.rpc.status_pb2 import Status
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceResponse
from waiting import wait_until

from syncline.gateway.__main__ import listening
from syncline.gateway.ingest import AT_ONCE, MOST_BYTES, PATH, Ingest
from syncline.gateway.numbers import Numbers
from syncline.runtime.settings import Settings
from syncline.runtime.tokens import TokenStore
from syncline.runtime.trace_store import SpanRecord, TraceStore, spans_of
from syncline.runtime.tracing_wire import records_of, traces_data

KEY = "a-key-of-the-tests-0123456789"
TOKEN = "the-operators-token-of-the-tests"
HEADERS = {"authorization": f"Bearer {KEY}", "content-type": "application/x-protobuf"}
CHILD = """
import os, sys
from syncline.contract.token_path import PROMPTED
from syncline.runtime import tracing
from syncline.runtime.settings import Settings
settings = Settings.read(os.environ)
tracing.setup("scheduler", sys.argv[1], settings.traces_written, settings.otlp, settings.traces_sent)
for index in range(int(sys.argv[2])):
    with tracing.hop(PROMPTED, job="j00000000cc", trajectory=f"j00000000cc-0-{index}", group=0, index=index):
        pass
children = int(sys.argv[3]) if len(sys.argv) > 3 else 0
if children:
    tracing.flush()  # so that there is a connection which the children must not use
for number in range(children):
    if os.fork() == 0:
        for index in range(50):
            name = f"j00000000cc-{number + 1}-{index}"
            with tracing.hop(PROMPTED, job="j00000000cc", trajectory=name, group=number + 1, index=index):
                pass
            if index % 10 == 0:
                tracing.flush()
        tracing.flush()
        os._exit(0)
for number in range(children):
    assert os.wait()[1] == 0
tracing.shutdown()
print(tracing.losses())
"""


def child(runs: Path, who: str, count: int, environ: dict[str, str], forks: int = 0) -> str:
    """What a process that passes hops says of its losses."""
    given = {**os.environ, "SYNCLINE_RUNS": str(runs), "SYNCLINE_TRACES": "none"} | environ
    done = subprocess.run(
        [sys.executable, "-c", CHILD, who, str(count), str(forks)],
        env=given,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert KEY not in done.stdout + done.stderr
    return done.stdout.strip()


class NoJobs:
    """No numbers but those of the gateway."""

    def collect(self) -> Iterator[Any]:
        return iter(())


class Door:
    """The ASGI application alone, served by uvicorn in a thread."""

    def __init__(self, store: Path) -> None:
        self.store, self.numbers = store, Numbers(NoJobs())
        self.app = Ingest(store, KEY, self.numbers)
        config = uvicorn.Config(
            self.app, log_config=None, access_log=False, lifespan="off", timeout_graceful_shutdown=2
        )
        self._server, self._socket = uvicorn.Server(config), listening("127.0.0.1", 0)
        self.port = self._socket.getsockname()[1]
        self._thread = threading.Thread(target=self._server.run, kwargs={"sockets": [self._socket]})
        self._thread.start()
        self.http = httpx.Client(base_url=f"http://127.0.0.1:{self.port}", headers=HEADERS, timeout=30)

    def post(self, body: bytes, **headers: str) -> httpx.Response:
        return self.http.post(PATH, content=body, headers=headers)

    def stop(self) -> None:
        self.http.close()
        self._server.should_exit = True
        self._thread.join(20)
        self._socket.close()
        self.app.close()


@pytest.fixture
def door(tmp_path: Path) -> Iterator[Door]:
    made = Door(tmp_path / "own" / "traces.sqlite")
    yield made
    made.stop()


def spans(count: int, size: int = 0) -> bytes:
    return traces_data(
        [
            SpanRecord(
                trace_id="1" * 32,
                span_id=f"{index + 1:016x}",
                parent_id=None,
                name="token.prompted",
                service="scheduler",
                instance="scheduler",
                start_ns=index,
                end_ns=index,
                attributes={"job": "j00000000cc", "text": "x" * size},
            )
            for index in range(count)
        ]
    )


def refusal(answer: httpx.Response, status: int) -> str:
    """Why, from the answer that OTLP/HTTP wants."""
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/x-protobuf"
    why: str = Status.FromString(answer.content).message
    assert why
    return why


# ---- a real gateway ----------------------------------------------------------------------------------------------
@pytest.fixture
def gateway(settings: Settings, tmp_path: Path) -> Iterator[Callable[..., dict[str, str]]]:
    """Starts a gateway that takes spans; its URLs for readers (`url`) and for spans (`spans`)."""
    started: list[subprocess.Popen[bytes]] = []

    def run(**environ: str) -> dict[str, str]:
        log = tmp_path / f"gateway-{len(started)}.log"
        given = {
            **os.environ,
            **settings.environ(),
            "SYNCLINE_RUNS": str(tmp_path / "runs"),
            "SYNCLINE_PORT": "0",
        }
        given |= {
            "SYNCLINE_TRACES": str(tmp_path / "own.sqlite"),
            "SYNCLINE_TRACES_PORT": "0",
            "SYNCLINE_TRACES_KEY": KEY,
            "SYNCLINE_TOKEN": TOKEN,
        }
        with log.open("wb") as out:
            words = [sys.executable, "-m", "syncline.gateway"]
            started.append(subprocess.Popen(words, env={**given, **environ}, stdout=out, stderr=out))

        def told() -> dict[str, str] | None:
            text = log.read_text()
            assert started[-1].poll() is None, text
            port, url = re.search(r"taking spans on port (\d+)", text), re.search(r"serving (\S+)", text)
            return {"url": url[1], "spans": f"http://127.0.0.1:{port[1]}"} if port and url else None

        found = wait_until(told, 60, "a gateway that takes spans")
        return {**found, "log": str(log)}

    yield run
    for process in started:
        process.terminate()
        assert process.wait(20) == 0


def test_spans_of_processes_without_a_store_are_read_at_the_gateway(
    gateway: Callable[..., dict[str, str]], tmp_path: Path
) -> None:
    member = TokenStore(tmp_path / "runs" / "tokens.json").add("acme", "member")[1]
    there = gateway()
    sent = {"SYNCLINE_TRACES_TO": there["spans"], "SYNCLINE_TRACES_KEY": KEY}
    with ThreadPoolExecutor(2) as both:
        said = list(both.map(lambda who: child(tmp_path / who, who, 300, sent), ("s0", "s1")))
    assert said == ["{'gateway': 0, 'incomplete': 0, 'skewed': 0, 'links': 0}"] * 2
    assert not list(tmp_path.glob("s?/*.sqlite"))
    stored = spans_of(tmp_path / "own.sqlite", job="j00000000cc")
    assert len(stored) == 600
    assert {(span.service, span.instance) for span in stored} == {("scheduler", "s0"), ("scheduler", "s1")}
    with httpx.Client(base_url=there["url"], timeout=30) as http:
        asked = {
            token: http.get(
                "/tempo/api/search",
                params={"q": '{ name = "token.prompted" }', "limit": 500},
                headers={"authorization": f"Bearer {token}"},
            )
            for token in (TOKEN, member, KEY)
        }
        assert len(asked[TOKEN].json()["traces"]) == 500
        assert asked[member].json()["traces"] == []  # another tenant's, by whichever way its spans came
        assert asked[KEY].status_code == 401  # who writes does not read
        body = spans(3)
        for token in (TOKEN, member):  # who reads does not write, at either port
            headers = {**HEADERS, "authorization": f"Bearer {token}"}
            assert http.post(PATH, content=body, headers=headers).status_code == 404
            refusal(http.post(f"{there['spans']}{PATH}", content=body, headers=headers), 401)
        assert http.post(PATH, content=body, headers=HEADERS).status_code == 401
        admin = {"authorization": f"Bearer {TOKEN}"}
        assert PATH not in http.get("/openapi.json", headers=admin).json()["paths"]
        counted = f'syncline_gateway_requests_total{{method="POST",route="{PATH}",status="200"}}'
        assert counted in http.get("/metrics", headers=admin).text
    assert len(spans_of(tmp_path / "own.sqlite", job="j00000000cc")) == 600
    assert KEY not in Path(there["log"]).read_text()


def test_what_is_too_old_leaves_the_gateways_store(
    gateway: Callable[..., dict[str, str]], tmp_path: Path
) -> None:
    store = TraceStore(tmp_path / "own.sqlite")
    store.write(records_of(spans(700)))  # of 1970
    now = time.time_ns()
    store.write([msgspec.structs.replace(records_of(spans(1))[0], trace_id="2" * 32, span_id="a" * 16,
                                         start_ns=now, end_ns=now)])  # fmt: skip
    gateway(SYNCLINE_TRACES_DAYS="1")
    wait_until(lambda: len(spans_of(tmp_path / "own.sqlite", job="j00000000cc")) == 1, 30, "one span is left")
    store.close()


def test_a_wrong_key_loses_spans_of_that_target_alone(door: Door, tmp_path: Path) -> None:
    """The gateway and a collector besides: each is counted by its own name."""
    url = f"http://127.0.0.1:{door.port}"
    wrong = {"SYNCLINE_TRACES_TO": url, "SYNCLINE_TRACES_KEY": "x" * 20}
    said = child(tmp_path, "s0", 5, {**wrong, "SYNCLINE_TRACES": str(tmp_path / "t.sqlite")})
    assert said == "{'store': 0, 'gateway': 5, 'incomplete': 0, 'skewed': 0, 'links': 0}"
    right = {"SYNCLINE_TRACES_TO": url, "SYNCLINE_TRACES_KEY": KEY}
    other = {"OTEL_EXPORTER_OTLP_ENDPOINT": url, "OTEL_EXPORTER_OTLP_HEADERS": "authorization=Basic%20x"}
    said = child(tmp_path, "s1", 5, right | other)
    assert said == "{'otlp': 5, 'gateway': 0, 'incomplete': 0, 'skewed': 0, 'links': 0}"
    assert {span.instance for span in spans_of(door.store, job="j00000000cc")} == {"s1"}


def test_forked_children_speak_on_connections_of_their_own(door: Door, tmp_path: Path) -> None:
    """As errands do, whose Celery worker forks."""
    sent = {"SYNCLINE_TRACES_TO": f"http://127.0.0.1:{door.port}", "SYNCLINE_TRACES_KEY": KEY}
    said = child(tmp_path, "errands", 5, sent, forks=4)
    assert said == "{'gateway': 0, 'incomplete': 0, 'skewed': 0, 'links': 0}"
    assert len(spans_of(door.store, job="j00000000cc")) == 5 + 4 * 50


@pytest.mark.parametrize(
    ("environ", "said"),
    [
        ({"SYNCLINE_TRACES_KEY": ""}, "SYNCLINE_TRACES_PORT is set, and SYNCLINE_TRACES_KEY is not"),
        ({"SYNCLINE_TRACES_KEY": "short"}, "SYNCLINE_TRACES_KEY must have at least 16"),
        ({"SYNCLINE_TOKEN": KEY}, "SYNCLINE_TRACES_KEY is SYNCLINE_TOKEN"),
        ({"SYNCLINE_METRICS_TOKEN": KEY}, "SYNCLINE_TRACES_KEY is SYNCLINE_METRICS_TOKEN"),
        ({"SYNCLINE_TRACES": "none"}, "SYNCLINE_TRACES is none"),
        ({"SYNCLINE_TRACES_TO": "gateway:4318"}, "SYNCLINE_TRACES_TO 'gateway:4318' must begin"),
        ({"SYNCLINE_TRACES_DAYS": "some"}, "SYNCLINE_TRACES_DAYS 'some' must be days"),
        ({"SYNCLINE_TRACES_MIB": "1.5"}, "SYNCLINE_TRACES_MIB '1.5' must be a whole number"),
    ],
)
def test_settings_that_cannot_be_are_refused_by_name(environ: dict[str, str], said: str) -> None:
    good = {"SYNCLINE_TRACES_PORT": "0", "SYNCLINE_TRACES_KEY": KEY}
    assert Settings.read(good).traces_key == KEY
    with pytest.raises(ValueError, match=said) as refused:
        Settings.read(good | environ)
    assert KEY not in str(refused.value)


def test_a_child_reads_what_its_parent_had() -> None:
    given = {"SYNCLINE_TRACES_TO": "http://g:4318", "SYNCLINE_TRACES_KEY": KEY, "SYNCLINE_TRACES": "none"}
    given |= {"SYNCLINE_TRACES_DAYS": "0.5", "SYNCLINE_TRACES_MIB": "0"}
    settings = Settings.read(given)
    assert Settings.read(settings.environ()) == settings
    assert (settings.traces_written, settings.traces_sent) == (None, ("http://g:4318", KEY))
    assert (Settings.read({}).traces_written, Settings.read({}).traces_sent) == (
        Settings.read({}).traces,
        None,
    )


# ---- the door alone ----------------------------------------------------------------------------------------------
def test_what_is_taken_and_taken_again(door: Door) -> None:
    for body, headers in ((spans(5), {}), (gzip.compress(spans(5)), {"content-encoding": "gzip"})):
        answer = door.post(body, **headers)
        assert answer.status_code == 200
        assert answer.headers["content-type"] == "application/x-protobuf"
        assert ExportTraceServiceResponse.FromString(answer.content) == ExportTraceServiceResponse()
    assert len(spans_of(door.store, job="j00000000cc")) == 5  # sent again after an answer was lost: once
    assert door.post(b"").status_code == 200  # a request without spans is one


def test_who_has_no_key_is_turned_away_whatever_he_brings(door: Door) -> None:
    for given in (
        "",
        KEY,
        f"Basic {KEY}",
        f"Bearer {KEY}x",
        f"Bearer {KEY[:-1]}",
        "Bearer",
        f"bearer {KEY}",
    ):
        why = refusal(door.post(spans(1), authorization=given), 401)
        assert KEY not in why
    twice = [("authorization", f"Bearer {KEY}"), ("authorization", f"Bearer {KEY}")]
    answer = httpx.post(door.http.base_url.join(PATH), content=spans(1), headers=twice)
    refusal(answer, 401)
    large = door.http.post(PATH, content=b"x" * (4 << 20), headers={"authorization": "Bearer no"})
    refusal(large, 401)
    assert not door.store.exists()


@pytest.mark.parametrize(
    ("status", "body", "headers"),
    [
        (400, b"\xff\xff", {}),
        (400, b"no gzip", {"content-encoding": "gzip"}),
        (400, gzip.compress(spans(1))[:-9], {"content-encoding": "gzip"}),
        (400, gzip.compress(spans(1)) + b"more", {"content-encoding": "gzip"}),
        (400, traces_data([]) + spans(1)[:-1], {}),
        (415, spans(1), {"content-type": "application/json"}),
        (415, spans(1), {"content-encoding": "br"}),
        (413, b"x" * (MOST_BYTES + 1), {}),
        (413, gzip.compress(b"\0" * (MOST_BYTES + 1)), {"content-encoding": "gzip"}),
    ],
    ids=["bytes", "not gzip", "half", "tail", "cut", "json", "br", "large", "bomb"],
)
def test_what_is_no_export_is_refused(door: Door, status: int, body: bytes, headers: dict[str, str]) -> None:
    refusal(door.post(body, **headers), status)
    assert not door.store.exists()
    assert door.post(spans(1)).status_code == 200


def test_a_body_without_length_is_bounded(door: Door) -> None:
    def parts() -> Iterator[bytes]:
        for _ in range(MOST_BYTES // (1 << 20) + 2):
            yield b"x" * (1 << 20)

    refusal(door.http.post(PATH, content=parts()), 413)


def test_one_bad_span_keeps_out_the_request_and_is_named(door: Door) -> None:
    body = spans(2) + spans(1).replace(bytes.fromhex("1" * 32), bytes(16))
    assert "span 0000000000000001 (token.prompted): trace_id" in refusal(door.post(body), 400)
    assert not door.store.exists()


def test_other_paths_and_methods(door: Door) -> None:
    refusal(door.http.post("/v1/metrics", content=b""), 404)
    answer = door.http.get(PATH)
    refusal(answer, 405)
    assert answer.headers["allow"] == "POST"


def test_a_store_that_cannot_be_written_says_come_back(door: Door) -> None:
    door.store.parent.mkdir()
    door.store.mkdir()  # no file can be here
    answer = door.post(spans(1))
    refusal(answer, 503)
    assert int(answer.headers["retry-after"]) > 0
    door.store.rmdir()
    assert door.post(spans(1)).status_code == 200


def test_more_than_it_can_take_at_once_come_back(door: Door, monkeypatch: pytest.MonkeyPatch) -> None:
    held, entered = threading.Event(), threading.Semaphore(0)
    write = TraceStore.write

    def slow(self: TraceStore, records: Any) -> None:
        entered.release()
        assert held.wait(30)
        write(self, records)

    monkeypatch.setattr(TraceStore, "write", slow)
    with ThreadPoolExecutor(AT_ONCE) as many:
        waiting = [many.submit(httpx.post, door.http.base_url.join(PATH), content=spans(n + 1), headers=HEADERS,
                               timeout=60) for n in range(AT_ONCE)]  # fmt: skip
        wait_until(lambda: door.app._inside == AT_ONCE, 30, "all places are taken")
        answer = door.post(spans(1))
        held.set()
        assert [one.result().status_code for one in waiting] == [200] * AT_ONCE
    assert answer.headers["retry-after"] == "1"
    refusal(answer, 503)
    assert len(spans_of(door.store, job="j00000000cc")) == AT_ONCE
