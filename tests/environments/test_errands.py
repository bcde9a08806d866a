"""Errands under a real Celery worker: every way a reward can end, and every way a worker can."""

from __future__ import annotations

import http.server
import json
import secrets
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import psutil
import pytest
from errands_service import ErrandsService, ScoredJob
from waiting import lives, wait_until

from syncline.contract.job import TaskSpec
from syncline.contract.streams import CELERY, DEAD, DELIVERIES, TRAJECTORIES
from syncline.contract.token_path import REWARDED
from syncline.environments.environment import Environment, load
from syncline.runtime.bus import Bus
from syncline.runtime.errands import DELIVERIES as MOST_DELIVERIES
from syncline.runtime.errands import QUEUE, Errands, ScoreErrand
from syncline.runtime.tracing import spans_of

PYTHON = {"source": "python", "timeout": 1.0, "memory_mb": 256, "retries": 0}


@pytest.fixture(scope="module")
def service(redis_url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ErrandsService]:
    running = ErrandsService(redis_url, tmp_path_factory.mktemp("errands"))
    yield running
    assert running.stop() == 0, running.log()


@pytest.fixture
def errands(redis_url: str) -> Errands:
    return Errands(redis_url)


def ask(errands: Errands, scored: ScoredJob) -> None:
    errands.send_scores(scored.job, [ScoreErrand(name, 1) for name in scored.names])


def test_environment_scores_and_is_recorded(service: ErrandsService, errands: Errands, job: str) -> None:
    answer = load_default().prompt(0).meta["answer"]
    scored = ScoredJob(service.bus, job, {}, [answer, answer[0] + "zz", ""])
    ask(errands, scored)
    rewards = scored.all_rewards()
    assert [reward.value for reward in rewards] == [1.0, pytest.approx(1 / 3), 0.0]
    assert {reward.judge for reward in rewards} == {"characters/1"}
    hops = wait_until(
        lambda: [s for s in spans_of(service.runs / "traces.sqlite", job=job) if s.name == REWARDED.name],
        5,
        "the rewarded hop in the store",
    )
    hop = next(hop for hop in hops if hop.attributes["trajectory"] == scored.names[0])
    assert hop.trace_id == "1" * 32
    assert hop.attributes["reward"] == 1.0
    assert not service.bus.hgetall(DELIVERIES.at(job))


def load_default() -> Environment:
    return load(TaskSpec(), 0)


def test_what_cannot_be_told_is_unscored_and_never_zero(
    service: ErrandsService, errands: Errands, job: str
) -> None:
    reward = PYTHON | {"function": "reward_functions:tells_by_text"}
    reasons = {
        "none": "returned None",
        "nan": "returned 'nan'",
        "inf": "returned 'inf'",
        "text": "returned 'good'",
        "bool": "returned True",
        "raise": "KeyError: 'no such answer'",
        "hang": "killed after 1 s",
        "die": "killed by SIGKILL",
        "exit": "exit code 3",
        "memory": "MemoryError",
    }
    scored = ScoredJob(service.bus, job, reward, [*reasons, "secret", "fine"])
    ask(errands, scored)
    *bad, secret, fine = scored.all_rewards()
    assert [(r.state, r.value) for r in bad] == [("unscored", None)] * len(reasons)
    for told, reason in zip(bad, reasons.values(), strict=True):
        assert reason in told.reason
    assert (secret.value, fine.value) == (0.25, 0.5)
    assert fine.judge.startswith("reward_functions:tells_by_text ")


def test_function_gets_prompt_response_and_meta(service: ErrandsService, errands: Errands, job: str) -> None:
    scored = ScoredJob(service.bus, job, PYTHON | {"function": "reward_functions:length"}, ["abc", "abcde"])
    ask(errands, scored)
    assert [reward.value for reward in scored.all_rewards()] == [0.3, 0.5]


class _SecondTime(http.server.BaseHTTPRequestHandler):
    """Answers /once when it is asked again, and /never not at all."""

    asked: ClassVar[set[str]] = set()

    def do_GET(self) -> None:
        known = self.path in self.asked and self.path == "/once"
        self.asked.add(self.path)
        self.send_response(200 if known else 503)
        self.end_headers()
        self.wfile.write(b"1.0")

    def log_message(self, format: str, *values: object) -> None:
        pass


def test_passing_trouble_is_tried_again(service: ErrandsService, errands: Errands, job: str) -> None:
    """The code's own network: what was given to it, and what was not."""
    reward = PYTHON | {"function": "reward_functions:second_time", "retries": 1, "network": True}
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), _SecondTime) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}"
        scored = ScoredJob(service.bus, job, reward, [f"{url}/once", f"{url}/never"])
        ask(errands, scored)
        first, second = scored.all_rewards()
        server.shutdown()
    assert (first.state, first.value) == ("scored", 1.0)
    assert second.state == "unscored"
    assert "HTTPError" in second.reason


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        ("reward_functions:missing", "no function missing"),
        ("no_such_module:score", "No module named"),
        ("dies_on_import:score", "exit code 5"),
    ],
)
def test_scorer_that_cannot_be_imported_is_failed_and_buried(
    service: ErrandsService, errands: Errands, job: str, function: str, reason: str
) -> None:
    scored = ScoredJob(service.bus, job, PYTHON | {"function": function}, ["abc"])
    ask(errands, scored)
    [reward] = scored.all_rewards()
    assert reward.state == "failed"
    assert reason in reward.reason
    letters = wait_until(lambda: service.bus.range(DEAD.at(job)), 5, "dead letter")
    assert letters[0].fields[b"trajectory"].decode() == scored.names[0]


def test_edited_function_is_imported_again(
    service: ErrandsService, errands: Errands, job: str, request: pytest.FixtureRequest
) -> None:
    file = Path(__file__).parent / "edited_reward.py"
    request.addfinalizer(lambda: file.unlink(missing_ok=True))
    found = []
    for number in (1, 2):
        file.write_text(f"def score(prompt, response, meta):\n    return {number}\n# {'x' * number}\n")
        scored = ScoredJob(
            service.bus, f"{job[:-1]}{number}", PYTHON | {"function": "edited_reward:score"}, ["abc"]
        )
        ask(errands, scored)
        found.append(scored.all_rewards()[0])
    assert [reward.value for reward in found] == [1.0, 2.0]
    assert found[0].judge != found[1].judge


def test_second_delivery_changes_nothing(service: ErrandsService, errands: Errands, job: str) -> None:
    scored = ScoredJob(service.bus, job, {}, ["abc", "abd"])
    errands.send_scores(
        job, [ScoreErrand(scored.names[0], 2), ScoreErrand(f"{job}-7-0", 1)]
    )  # fenced; unknown
    errands.send_scores("j0000000000", [ScoreErrand("j0000000000-0-0", 1)])  # a job that is gone
    ask(errands, scored)
    first = scored.all_rewards()
    ask(errands, scored)
    wait_until(lambda: not service.bus.many([("LLEN", CELERY.at(QUEUE))])[0], 10, "an empty queue")
    assert scored.all_rewards() == first


def test_errand_that_kills_its_worker_ends_as_failed(
    service: ErrandsService, errands: Errands, job: str
) -> None:
    scored = ScoredJob(service.bus, job, {}, ["abc", "abd"])
    # as if it had done so already: the count outlives the worker, whatever killed it
    service.bus.hset(DELIVERIES.at(job), f"{scored.names[0]}/1", MOST_DELIVERIES)
    ask(errands, scored)
    poison, healthy = scored.all_rewards()
    assert poison.state == "failed"
    assert f"killed its worker {MOST_DELIVERIES} times" in poison.reason
    assert healthy.state == "scored"


def test_killed_worker_process_gives_its_message_back(
    service: ErrandsService, errands: Errands, job: str
) -> None:
    reward = PYTHON | {"function": "reward_functions:tells_by_text", "timeout": 3.0}
    scored = ScoredJob(service.bus, job, reward, ["hang", "fine"])
    ask(errands, scored)
    key = f"{scored.names[0]}/1"
    wait_until(lambda: service.bus.hget(DELIVERIES.at(job), key), 10, "the first errand running")
    below = psutil.Process(service.process.pid).children(recursive=True)
    for child in psutil.Process(service.process.pid).children():
        child.kill()
    wait_until(lambda: not any(map(lives, below)), 10, "the end of all below it")
    wait_until(lambda: service.bus.hget(DELIVERIES.at(job), key) == b"2", 20, "the second delivery")
    hung, fine = scored.all_rewards()
    assert (hung.state, fine.value) == ("unscored", 0.5)


def test_many_share_a_question_and_one_without_a_score_is_told_by_itself(
    service: ErrandsService, errands: Errands, job: str
) -> None:
    """Whoever is asked about, alone or with others, is told once, and the same."""
    calculator = {"environment": "calculator"}  # without turns it cannot tell, for anybody
    blind = ScoredJob(service.bus, "j" + secrets.token_hex(5), {}, ["12", "34"], task=calculator)
    ask(errands, blind)
    assert [(r.state, r.value) for r in blind.all_rewards()] == [("unscored", None)] * 2
    assert all("returned None" in r.reason for r in blind.all_rewards())
    scored = ScoredJob(service.bus, job, {}, ["abc"] * 40)
    gone = scored.ledger.entry(scored.names[7])
    assert gone is not None
    assert gone.stream_id is not None
    service.bus.delete_entries(TRAJECTORIES.at(job), [gone.stream_id])
    errands.send_scores(job, [ScoreErrand(name, 1) for name in scored.names], batch=64)
    rewards = scored.all_rewards()
    assert "gone from the stream" in rewards[7].reason
    assert {r.state for r in rewards[:7] + rewards[8:]} == {"scored"}
    store = service.runs / "traces.sqlite"
    wait_until(lambda: len(spans_of(store, job=job)) >= len(scored.names), 5, "all hops")
    told = [str(hop.attributes["trajectory"]) for hop in spans_of(store, job=job)]
    assert sorted(told) == sorted(scored.names)
    wait_until(lambda: not service.bus.hgetall(DELIVERIES.at(job)), 5, "no errand under way")


def test_those_that_died_together_are_asked_about_one_by_one(
    service: ErrandsService, errands: Errands, job: str
) -> None:
    """One of them may have killed the worker: the others must not be counted with it again and again."""
    scored = ScoredJob(service.bus, job, {}, ["abc", "abd", "abe"])
    marks = {f"{name}/1": "1" for name in scored.names}
    marks[f"{scored.names[1]}/1"] = str(MOST_DELIVERIES)
    service.bus.hset(DELIVERIES.at(job), marks)
    ask(errands, scored)
    assert [r.state for r in scored.all_rewards()] == ["scored", "failed", "scored"]
    wait_until(lambda: not service.bus.hgetall(DELIVERIES.at(job)), 5, "no errand under way")


class Judge(http.server.BaseHTTPRequestHandler):
    """Answers what the response asks for."""

    asked: ClassVar[list[dict[str, Any]]]

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.asked.append(body)
        answers: dict[str, Callable[[], tuple[int, str]]] = {
            "good": lambda: (200, '{"reward": 0.75}'),
            "null": lambda: (200, '{"reward": null}'),
            "other": lambda: (200, '{"score": 1}'),
            "busy": lambda: (503, "") if len(self.asked) < 7 else (200, '{"reward": 1}'),
            "refused": lambda: (404, ""),
            "garbage": lambda: (200, "<html>"),
        }
        status, text = answers[body["response"]]()
        self.send_response(status)
        self.send_header("content-length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, format: str, *args: object) -> None:
        """Quiet."""


def test_http_scorer(service: ErrandsService, errands: Errands, job: str) -> None:
    class One(Judge):
        asked: ClassVar[list[dict[str, Any]]] = []

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), One) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_address[1]}/judge"
        reward = {"source": "http", "url": url, "timeout": 5.0, "retries": 1}
        texts = ["good", "null", "other", "refused", "garbage", "busy"]
        scored = ScoredJob(service.bus, job, reward, texts)
        ask(errands, scored)
        good, null, other, refused, garbage, busy = scored.all_rewards()
        server.shutdown()
    assert (good.value, good.judge) == (0.75, f"http {url}")
    assert One.asked[0].keys() == {"trajectory", "prompt", "response", "meta"}
    assert One.asked[0]["meta"]["answer"]
    assert {r.state for r in (null, other, refused, garbage)} == {"unscored"}
    assert "score" in other.reason
    assert "HTTP 404" in refused.reason
    assert busy.value == 1.0  # the second time


def test_messages_outlive_the_service(
    redis_url: str, errands: Errands, job: str, tmp_path: Path, service: ErrandsService
) -> None:
    del service  # its queue is the same one, so this test's messages may go to either; the job's end is one
    scored = ScoredJob(Bus(redis_url), job, {}, ["abc"] * 40)
    ask(errands, scored)
    second = ErrandsService(redis_url, tmp_path, "--concurrency", "2")
    assert {reward.state for reward in scored.all_rewards()} == {"scored"}
    second.process.kill()
    second.process.wait()
    second.bus.close()


def test_no_errand_key_outside_the_declared_prefix(redis_url: str, service: ErrandsService) -> None:
    found = [key.decode() for key in service.bus.many([("KEYS", "*")])[0]]
    assert not [key for key in found if not key.startswith("syncline:")]
