"""Hops become spans of the two paths, in a store that many processes share, and losses are counted."""

from __future__ import annotations

import http.server
import multiprocessing
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from syncline.contract.hops import Hop
from syncline.contract.token_path import ADMITTED, PROMPTED, SAMPLED, SCORED
from syncline.contract.version_path import MINTED, VersionId
from syncline.runtime import tracing
from syncline.runtime.trace_store import SpanRecord, TraceStore, read_trace, spans_of


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "runs" / "traces.sqlite"
    tracing.setup("rollout", "w0", path, None)
    yield path
    tracing.setup("unnamed", "unnamed", None, None)


def prompted(job: str, index: int = 0, parent: str | None = None) -> str:
    with tracing.hop(PROMPTED, parent, job=job, trajectory=f"{job}-0-{index}", group=0) as hop:
        hop.set(index=index)
    return hop.traceparent


def test_a_trajectory_is_one_trace_in_the_store(store: Path) -> None:
    root = prompted("j1")
    child = tracing.record(
        SAMPLED,
        root,
        100.0,
        101.5,
        job="j1",
        trajectory="j1-0-0",
        attempt=1,
        worker="w0",
        version=VersionId(0, 3),
        digest="d",
        context="recomputed",
        start=0,
        end=7,
    )
    tracing.flush()
    [sampled, first] = spans_of(store, trajectory="j1-0-0")
    assert (first.name, first.parent_id, first.service, first.instance) == (
        "token.prompted",
        None,
        "rollout",
        "w0",
    )
    assert first.attributes == {"job": "j1", "trajectory": "j1-0-0", "group": 0, "index": 0}
    assert (sampled.name, sampled.parent_id) == ("token.sampled", first.span_id)
    assert (sampled.start, sampled.seconds) == (100.0, 1.5)
    assert sampled.attributes["version"] == "0.3"
    assert child.startswith(f"00-{sampled.trace_id}-{sampled.span_id}-0")
    assert read_trace(store, first.trace_id) == [sampled, first]
    assert spans_of(store, version="0.3", job="j1") == [sampled]
    assert spans_of(store, version="0.3", job="j2") == []
    assert spans_of(store, job="j1", names=["token.prompted"]) == [first]
    assert tracing.losses() == {"store": 0, "incomplete": 0, "skewed": 0, "links": 0}
    with pytest.raises(ValueError, match="needs a trajectory, a version or a job"):
        spans_of(store)


def test_a_batch_links_more_trajectories_than_the_sdk_s_default(store: Path) -> None:
    links = [tracing.new_traceparent() for _ in range(512)]
    with tracing.hop(MINTED, links=links, job="j1", version=VersionId(1, 9), optimizer_step=9) as hop:
        hop.set(parent=None, trajectories=[f"j1-{n}-0" for n in range(512)])
    tracing.flush()
    [span] = spans_of(store, job="j1")
    assert span.links == tuple(links)
    assert span.attributes["parent"] == "none"
    assert span.attributes["trajectories"] == [f"j1-{n}-0" for n in range(512)]


def test_links_beyond_what_one_span_may_have_are_counted(store: Path) -> None:
    links = [tracing.new_traceparent()] * (65536 + 5)
    with tracing.hop(MINTED, links=links, job="j1", version=VersionId(1, 9), optimizer_step=9) as hop:
        hop.set(parent=None, trajectories=1)
    tracing.flush()
    [span] = spans_of(store, job="j1")
    assert len(span.links) == 65536
    assert tracing.losses() == {"store": 0, "incomplete": 0, "skewed": 0, "links": 5}
    assert tracing.ended() == 1


def test_only_hops_of_the_two_paths_have_spans(store: Path) -> None:
    stranger = Hop(name="token.imagined", done_by="rollout")
    with (
        pytest.raises(ValueError, match=r"'token.imagined' is on no path"),
        tracing.hop(stranger, job="j1"),
    ):
        pass
    impostor = Hop(name="token.scored", done_by="rollout")
    with pytest.raises(ValueError, match="is on no path"):
        tracing.record(impostor, None, 0.0, 1.0, job="j1")


def test_a_hop_sets_exactly_its_attributes(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    story = r"token.admitted closed without attributes \['job', 'lag'\] and with undeclared \['lags'\]"
    with (
        pytest.raises(tracing.HopIncomplete, match=story),
        tracing.hop(ADMITTED, trajectory="t", update=1, lags=0),
    ):
        pass
    with pytest.raises(tracing.HopIncomplete, match=r"undeclared \['why'\]"):
        tracing.record(ADMITTED, None, 0.0, 1.0, job="j1", trajectory="t", update=1, lag=0, why="x")
    monkeypatch.setenv("SYNCLINE_STRICT", "0")
    with tracing.hop(ADMITTED, job="j1", trajectory="t"):
        pass
    assert tracing.losses()["incomplete"] == 1


def test_a_failed_hop_says_so_and_lets_the_error_through(store: Path) -> None:
    with pytest.raises(KeyError), tracing.hop(SCORED, job="j1", trajectory="t"):
        raise KeyError("weights")
    tracing.flush()
    [span] = spans_of(store, job="j1")
    assert span.attributes["error"] == "KeyError: 'weights'"


def test_a_wall_clock_set_back_is_counted_and_not_fatal(store: Path) -> None:
    tracing.record(ADMITTED, None, 10.0, 8.0, job="j1", trajectory="t", update=1, lag=0)
    tracing.flush()
    [span] = spans_of(store, job="j1")
    assert (span.start, span.seconds) == (10.0, 0.0)
    assert tracing.losses()["skewed"] == 1


@pytest.mark.parametrize(
    "text", ["x", "00-0-0-01", f"00-{'0' * 32}-{'1' * 16}-01", f"00-{'1' * 32}-{'0' * 16}-01"]
)
def test_a_bad_traceparent_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not of the form 00-"):
        prompted("j1", parent=text)


def _write_spans(path: Path, name: str) -> None:
    tracing.setup("rollout", name, path, None)
    for n in range(300):
        prompted("j1", n)
    tracing.shutdown()


def test_many_processes_write_one_store(tmp_path: Path) -> None:
    path = tmp_path / "traces.sqlite"
    spawn = multiprocessing.get_context("spawn")
    processes = [spawn.Process(target=_write_spans, args=(path, f"w{n}")) for n in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(120)
        assert process.exitcode == 0
    spans = spans_of(path, job="j1")
    assert len(spans) == 900
    assert {span.instance for span in spans} == {"w0", "w1", "w2"}


def test_a_forked_child_writes_its_own_spans(store: Path) -> None:
    prompted("j1", 0)
    tracing.flush()
    code = f"""
import os
from pathlib import Path
from syncline.contract.token_path import ADMITTED
from syncline.runtime import tracing
tracing.setup("errands", "parent", Path({str(store)!r}), None)
tracing.record(ADMITTED, None, 0.0, 1.0, job="j1", trajectory="parent", update=1, lag=0)
tracing.flush()
child = os.fork()
if child == 0:
    tracing.record(ADMITTED, None, 0.0, 1.0, job="j1", trajectory="child", update=1, lag=0)
    tracing.flush()
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
tracing.shutdown()
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
    spans = spans_of(store, job="j1", names=["token.admitted"])
    assert {span.attributes["trajectory"] for span in spans} == {"child", "parent"}
    assert len(spans) == 2


def test_a_parent_counts_what_its_children_told_and_lost(tmp_path: Path) -> None:
    """Also of a child that was killed: what it had not written stays missing."""
    code = f"""
import os, signal
from pathlib import Path
from syncline.contract.token_path import ADMITTED
from syncline.runtime import tracing
tracing.setup("errands", "errands", Path({str(tmp_path / "t.sqlite")!r}), None)
told = dict(job="j1", trajectory="t", update=1, lag=0)
for killed in (False, True):
    child = os.fork()
    if child == 0:
        tracing.record(ADMITTED, None, 2.0, 1.0, **told)
        tracing.flush()
        tracing.record(ADMITTED, None, 0.0, 1.0, **told)
        if killed:
            os.kill(os.getpid(), signal.SIGKILL)
        tracing.shutdown()
        os._exit(0)
    os.waitpid(child, 0)
tracing.record(ADMITTED, None, 0.0, 1.0, **told)
tracing.flush()
print(tracing.ended(), tracing.losses())
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout == "5 {'store': 1, 'incomplete': 0, 'skewed': 2, 'links': 0}\n", done.stderr
    assert len(spans_of(tmp_path / "t.sqlite", job="j1")) == 4


def test_spans_that_the_store_cannot_take_are_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "traces.sqlite"
    path.write_bytes(b"this is no database, and long enough for SQLite to see that it is none at all" * 20)
    tracing.setup("rollout", "w0", path, None)
    prompted("j1")
    tracing.shutdown()
    assert tracing.losses()["store"] == 1
    assert "tracing ends with losses: {'store': 1}" in caplog.text
    tracing.setup("unnamed", "unnamed", None, None)


def test_a_store_that_is_not_there_yet_is_empty(tmp_path: Path) -> None:
    assert spans_of(tmp_path / "none.sqlite", job="j1") == []
    (tmp_path / "empty.sqlite").touch()
    assert read_trace(tmp_path / "empty.sqlite", "0" * 32) == []


def test_a_write_is_whole_or_not_at_all(tmp_path: Path) -> None:
    store = TraceStore(tmp_path / "t.sqlite")
    good = SpanRecord(
        trace_id="1" * 32,
        span_id="2" * 16,
        parent_id=None,
        name="token.prompted",
        service="s",
        instance="i",
        start_ns=1,
        end_ns=2,
        attributes={"job": "j1"},
    )
    bad = SpanRecord(
        trace_id="1" * 32,
        span_id="3" * 16,
        parent_id=None,
        name="token.prompted",
        service="s",
        instance="i",
        start_ns=2**70,
        end_ns=2,
        attributes={"job": "j1"},
    )
    with pytest.raises((sqlite3.Error, OverflowError)):
        store.write([good, bad])
    assert spans_of(tmp_path / "t.sqlite", job="j1") == []
    store.write([good])
    store.write([good])
    assert spans_of(tmp_path / "t.sqlite", job="j1") == [good]
    store.close()


@contextmanager
def collector(status: int) -> Iterator[tuple[str, list[tuple[str, bytes]]]]:
    """Its URL, and what it has been sent (path, body), all of which it answers with `status`."""
    received: list[tuple[str, bytes]] = []

    class Collector(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            received.append((self.path, body))
            self.send_response(status)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            """No news."""

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Collector)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}", received
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
        tracing.setup("unnamed", "unnamed", None, None)


def test_spans_go_to_an_otlp_endpoint_too(tmp_path: Path) -> None:
    links = [tracing.new_traceparent() for _ in range(512)]
    with collector(200) as (url, received):
        tracing.setup("rollout", "w0", tmp_path / "t.sqlite", url)
        with tracing.hop(MINTED, links=links, job="j1", version=VersionId(1, 9), optimizer_step=9) as hop:
            hop.set(parent=None, trajectories=512)
        tracing.shutdown()
        assert tracing.losses() == {"store": 0, "otlp": 0, "incomplete": 0, "skewed": 0, "links": 0}
    [(path, body)] = received
    assert path == "/v1/traces"
    [resource] = ExportTraceServiceRequest.FromString(body).resource_spans
    names = {a.key: a.value.string_value for a in resource.resource.attributes}
    assert (names["service.name"], names["service.instance.id"]) == ("rollout", "w0")
    [span] = resource.scope_spans[0].spans
    assert span.name == "version.minted"
    assert [f"00-{link.trace_id.hex()}-{link.span_id.hex()}-01" for link in span.links] == links
    assert len(spans_of(tmp_path / "t.sqlite", job="j1")) == 1


def test_spans_that_an_endpoint_refuses_are_counted_and_stay_in_the_store(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with collector(400) as (url, received):
        tracing.setup("rollout", "w0", tmp_path / "t.sqlite", url)
        prompted("j1")
        tracing.shutdown()
        assert tracing.losses() == {"store": 0, "otlp": 1, "incomplete": 0, "skewed": 0, "links": 0}
    assert len(received) == 1
    assert "tracing ends with losses: {'otlp': 1}" in caplog.text
    assert len(spans_of(tmp_path / "t.sqlite", job="j1")) == 1
