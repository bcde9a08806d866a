"""HTTP judges under the errands service, over real HTTP: batches, failures, budgets, versions, deaths."""

from __future__ import annotations

import asyncio
import gzip
import http.server
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
from errands_service import TRACE, ErrandsService, ScoredJob
from judge_server import JudgeServer, Play, Reply, rewards
from waiting import lives, wait_until

from syncline.contract.events import Alarm, Event
from syncline.contract.judging import JudgeStatus
from syncline.contract.streams import DEAD, EVENTS, JOB, JUDGED, JUDGING
from syncline.errands.judge_client import BadUrl, JudgeClient, Mute, Said
from syncline.runtime.bus import unpack
from syncline.runtime.errands import Errands, ScoreErrand

Serve = Callable[[Play], JudgeServer]


@pytest.fixture(scope="module")
def service(redis_url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ErrandsService]:
    running = ErrandsService(redis_url, tmp_path_factory.mktemp("errands"), "--concurrency", "2")
    yield running
    assert running.stop() == 0, running.log()


@pytest.fixture(autouse=True)
def job_ends(service: ErrandsService, job: str) -> Iterator[None]:
    """So that no test's judge process is there in the next test."""
    yield
    if service.bus.exists(JOB.at(job)):
        end(service, job)


@pytest.fixture
def serve() -> Iterator[Serve]:
    started: list[JudgeServer] = []

    def start(play: Play) -> JudgeServer:
        started.append(JudgeServer(play))
        return started[-1]

    yield start
    for server in started:
        server.close()


def scored_by(service: ErrandsService, job: str, url: str, texts: list[str], **reward: Any) -> ScoredJob:
    """A job whose responses wait for the judge at `url`, in batches of 4. In the way lies what is no errand."""
    service.bus.append(JUDGING.at(job), {b"m": b"?"})
    told = {"source": "http", "url": url, "batch": 4, "parallel": 2, "timeout": 5.0, "budget": 60.0, **reward}
    scored = ScoredJob(service.bus, job, told, texts)
    Errands(service.bus.url).send_scores(job, [ScoreErrand(name, 1) for name in scored.names])
    return scored


def status_of(service: ErrandsService, job: str) -> JudgeStatus | None:
    raw = service.bus.hget(JOB.at(job), "judge")
    return None if raw is None else msgspec.json.decode(raw, type=JudgeStatus)


def end(service: ErrandsService, job: str) -> None:
    """The job is over: its judge's process ends."""
    service.bus.hset(JOB.at(job), "state", "succeeded")
    wait_until(
        lambda: job.encode() not in service.bus.zrange(JUDGED.at()), 20, "the end of its judge's process"
    )


def test_batches_in_parallel_each_answer_to_its_own(service: ErrandsService, serve: Serve, job: str) -> None:
    both = threading.Barrier(2)  # two requests at a time, or it breaks

    def play(asked: list[dict[str, Any]]) -> Reply:
        both.wait(20)
        status, body, *_ = rewards(asked[::-1], judge="length/3")
        return status, body

    judge = serve(play)
    texts = ["abcdefghijklmnop"[:n] for n in range(16)]
    scored = scored_by(service, job, judge.url, texts)
    found = scored.all_rewards()
    assert [reward.value for reward in found] == [n / 10 for n in range(16)]
    assert {reward.judge for reward in found} == {f"http {judge.url} length/3"}
    assert judge.most == 2
    assert set(judge.traceparents) == {None}, "a header holds one context, and of several responses none"
    assert [len(names) for names in judge.asked[2:]] == [4] * (len(judge.asked) - 2)
    assert sorted(name for names in judge.asked for name in names) == sorted(scored.names)
    assert not service.bus.length(JUDGING.at(job))


def test_a_request_about_one_response_carries_its_trace(
    service: ErrandsService, serve: Serve, job: str
) -> None:
    judge = serve(rewards)
    scored_by(service, job, judge.url, ["one"]).all_rewards()
    assert judge.traceparents == [TRACE]


def test_what_the_answer_does_not_say_is_unscored(service: ErrandsService, serve: Serve, job: str) -> None:
    def play(asked: list[dict[str, Any]]) -> Reply:
        told: list[dict[str, Any]] = []
        for one in asked:
            worth: dict[str, Any] = {"good": 0.5, "nan": float("nan"), "null": None, "text": "0.5"}
            entry = {"trajectory": one["trajectory"], "reward": worth.get(one["response"])}
            told += {"left out": [], "twice": [entry | {"reward": 1.0}] * 2}.get(one["response"], [entry])
        return 200, {"rewards": [*told, {"trajectory": "j0-0-0", "reward": 1.0}]}

    texts = ["good", "nan", "null", "text", "left out", "twice", "good"]
    scored = scored_by(service, job, serve(play).url, texts, batch=16)
    good, *bad, last = scored.all_rewards()
    assert (good.value, last.value) == (0.5, 0.5)
    assert {(reward.state, reward.value) for reward in bad} == {("unscored", None)}
    reasons = ["nan", "None", "'0.5'", "leaves it out", "2 times"]
    assert all(reason in reward.reason for reason, reward in zip(reasons, bad, strict=True))


def test_one_response_that_spoils_requests_costs_no_other_its_score(
    service: ErrandsService, serve: Serve, job: str
) -> None:
    def play(asked: list[dict[str, Any]]) -> Reply:
        texts = [one["response"] for one in asked]
        if "crash" in texts:
            return 500, b""
        return rewards(asked) if "bad" not in texts else (422, b"what is this?")

    judge = serve(play)
    scored = scored_by(service, job, judge.url, ["abc", "crash", "abcde", "bad"], parallel=1, breaker=100)
    first, crash, second, bad = scored.all_rewards()
    assert (first.value, second.value) == (0.3, 0.5)
    assert (crash.state, crash.reason) == ("unscored", "HTTP 500, at the last of 3 tries")
    assert (bad.state, bad.reason) == ("unscored", "HTTP 422")


def test_slow_judge_of_one_job_holds_no_other_job(service: ErrandsService, serve: Serve, job: str) -> None:
    free = threading.Event()

    def play(asked: list[dict[str, Any]]) -> Reply:
        free.wait(30)
        return rewards(asked)

    slow = scored_by(service, job, serve(play).url, ["abc"] * 64, timeout=30.0)
    wait_until(
        lambda: (s := status_of(service, job)) is not None and s.asked == 8, 20, "the slow judge asked"
    )
    other = ScoredJob(service.bus, f"{job}b", {}, ["abc"] * 64)
    errands = Errands(service.bus.url)
    errands.send_scores(slow.job, [ScoreErrand(name, 1) for name in slow.names])  # as the scheduler does
    errands.send_scores(other.job, [ScoreErrand(name, 1) for name in other.names])
    assert {reward.state for reward in other.all_rewards()} == {"scored"}
    assert not slow.rewards()
    free.set()
    assert {reward.value for reward in slow.all_rewards()} == {0.3}


def test_judge_that_is_away_is_seen_and_found_again(service: ErrandsService, job: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = int(listener.getsockname()[1])
    scored = scored_by(
        service, job, f"http://127.0.0.1:{port}/judge", ["abc"] * 20, batch=1 + 1, retries=0, breaker=2
    )
    told = wait_until(
        lambda: (
            s if (s := status_of(service, job)) is not None and s.state != "answers" and s.waiting else None
        ),
        20,
        "a judge that does not answer",
    )
    assert told.reason.startswith("ConnectError")
    assert told.waiting + told.asked == 20
    judge = JudgeServer(rewards, port)
    assert {reward.value for reward in scored.all_rewards(40)} == {0.3}  # no try was lost
    wait_until(
        lambda: (s := status_of(service, job)) and s.state == "answers" and s.scored == 20, 10, "its return"
    )
    judge.close()


def test_retry_after_is_kept_by_all(service: ErrandsService, serve: Serve, job: str) -> None:
    judge = serve(lambda asked: (429, b"", {"retry-after": "2"}) if len(judge.asked) == 1 else rewards(asked))
    scored = scored_by(service, job, judge.url, ["abc"] * 8, parallel=1, retries=0)
    assert {reward.value for reward in scored.all_rewards()} == {0.3}
    assert judge.times[1] - judge.times[0] >= 2.0


def test_at_the_end_of_its_budget_a_response_is_unscored(
    service: ErrandsService, serve: Serve, job: str
) -> None:
    asked_of = threading.Event()

    def play(asked: list[dict[str, Any]]) -> Reply:
        asked_of.wait(8)
        return rewards(asked)

    judge = serve(play)
    texts = ["abc"] * 12
    scored = scored_by(service, job, judge.url, texts, batch=2, parallel=1, timeout=3.0, budget=4.0)
    found = scored.all_rewards(15)
    assert {(reward.state, reward.value) for reward in found} == {("unscored", None)}
    assert all("reward.budget of 4 s" in reward.reason for reward in found)
    assert found[-1].reason.endswith("its turn did not come")
    asked_of.set()
    end(service, job)  # whose last answers came
    assert scored.all_rewards() == found


def test_a_change_of_version_is_recorded_and_told(service: ErrandsService, serve: Serve, job: str) -> None:
    def play(asked: list[dict[str, Any]]) -> Reply:
        return rewards(asked, judge="v1" if len(judge.asked) == 1 else "v2")

    judge = serve(play)
    scored = scored_by(service, job, judge.url, ["abc"] * 6, batch=2, parallel=1)
    judges = {reward.judge.removeprefix(f"http {judge.url} ") for reward in scored.all_rewards()}
    assert judges == {"v1", "v2"}
    entries = wait_until(lambda: service.bus.range(EVENTS.at(job)), 5, "an alarm")
    events = [unpack(entry, Event) for entry in entries]
    assert [type(event) for event in events] == [Alarm]
    assert "was 'v1' and is 'v2'" in events[0].what
    wait_until(
        lambda: (s := status_of(service, job)) and s.versions == ("v1", "v2"), 5, "both versions shown"
    )


def judge_process(service: ErrandsService, job: str) -> psutil.Process | None:
    for child in psutil.Process(service.process.pid).children():
        try:
            if child.status() != psutil.STATUS_ZOMBIE and child.environ().get("SYNCLINE_JOB") == job:
                return child
        except psutil.NoSuchProcess:
            continue
    return None


@pytest.mark.parametrize("victim", ["judge", "service"])
def test_killed_processes_are_replaced_and_nothing_is_lost(
    service: ErrandsService, serve: Serve, job: str, victim: str
) -> None:
    free = threading.Event()

    def play(asked: list[dict[str, Any]]) -> Reply:
        free.wait(30)
        return rewards(asked)

    judge = serve(play)
    scored = scored_by(service, job, judge.url, ["abc"] * 10, timeout=30.0)
    wait_until(lambda: judge.asked, 20, "a request")
    first = wait_until(lambda: judge_process(service, job), 5, "its process")
    if victim == "judge":
        first.kill()
    else:
        service.process.kill()
        service.process.wait()
        wait_until(lambda: not lives(first), 5, "its end with the service")
        service.start()
    wait_until(lambda: (p := judge_process(service, job)) and p.pid != first.pid, 10, "another one")
    free.set()
    assert {reward.value for reward in scored.all_rewards()} == {0.3}
    end(service, job)
    wait_until(lambda: judge_process(service, job) is None, 10, "its end")


def test_the_example_is_a_judge(service: ErrandsService, job: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = int(listener.getsockname()[1])
    example = Path(__file__).parents[2] / "examples" / "judge" / "judge.py"
    command = [sys.executable, str(example), "--port", str(port), "--slots", "1"]
    judge = subprocess.Popen(command)  # meanwhile it is away
    try:
        scored = scored_by(service, job, f"http://127.0.0.1:{port}/judge", ["abec", "xyz", "", "a"] * 4)
        found = scored.all_rewards(40)
    finally:
        judge.kill()
        judge.wait()
    assert [reward.value for reward in found] == [0.5, 0.0, None, 1.0] * 4
    assert [reward.state for reward in found[:4]] == ["scored", "scored", "unscored", "scored"]
    assert found[0].judge.endswith("/judge vowels/1")


def test_judge_that_cannot_be_asked_is_failed_and_buried(service: ErrandsService, job: str) -> None:
    scored = scored_by(service, job, "http://nowhere:many/judge", ["abc", "abd"])
    found = scored.all_rewards()
    assert {reward.state for reward in found} == {"failed"}
    assert "reward.url" in found[0].reason
    assert len(wait_until(lambda: service.bus.range(DEAD.at(job)), 5, "dead letters")) >= 1


# ---- one request ----------------------------------------------------------------------------------------------
class Rude(http.server.BaseHTTPRequestHandler):
    """What an answer must not be."""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        self.send_response(200)
        if self.path == "/packed":
            self.send_header("content-encoding", "gzip")
        self.end_headers()
        data = gzip.compress(b"0" * 1000) if self.path == "/packed" else b"0" * 100
        try:
            while True:
                self.wfile.write(data)
                self.wfile.flush()
                if self.path == "/drip":
                    self.server.pause.wait(0.1)  # type: ignore[attr-defined]
        except OSError:
            return

    def log_message(self, format: str, *args: object) -> None:
        """Quiet."""


@pytest.mark.parametrize(
    ("path", "kind", "reason"),
    [
        ("packed", "broken", "compressed"),
        ("endless", "broken", "more than 5000"),
        ("drip", "late", "within 1 s"),
    ],
)
def test_an_answer_is_bounded_in_size_and_time(path: str, kind: str, reason: str) -> None:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Rude) as server:
        server.pause = threading.Event()  # type: ignore[attr-defined]
        threading.Thread(target=server.serve_forever, daemon=True).start()
        said = asyncio.run(ask(f"http://127.0.0.1:{server.server_address[1]}/{path}"))
        server.shutdown()
    assert isinstance(said, Mute)
    assert said.kind == kind
    assert reason in said.reason


async def ask(url: str) -> Said | Mute:
    client = JudgeClient(url, 1, 1.0, 5000)
    said = await client.post(b"{}")
    await client.close()
    return said


def test_what_is_recorded_of_a_url_holds_no_secret() -> None:
    assert JudgeClient("https://me:secret@h:9/j?key=secret", 1, 1.0, 1).name == "https://h:9/j"
    with pytest.raises(BadUrl, match=r"reward\.url"):
        JudgeClient("http://:80/x", 1, 1.0, 1)
