"""The parts of an HTTP judge that know nothing of clocks and wires: answers, verdicts, the breaker, the backlog."""

from __future__ import annotations

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from syncline.errands.backlog import Backlog, Response
from syncline.errands.breaker import AWAY, FIRST, LAST, Breaker
from syncline.errands.judge_client import Mute, Said
from syncline.errands.judge_verdicts import Verdicts, verdicts
from syncline.errands.judge_wire import Asked, BadAnswer, Judged, question, read_answer, retry_after


def many(*entries: object, **rest: object) -> bytes:
    return json.dumps({"rewards": entries, **rest}).encode()


def entry(trajectory: object, reward: object) -> dict[str, object]:
    return {"trajectory": trajectory, "reward": reward}


# ---- answers --------------------------------------------------------------------------------------------------
@given(st.permutations(["a", "b", "c", "d"]))
def test_answers_are_matched_by_id_and_not_by_place(order: list[str]) -> None:
    worth = {"a": 0.1, "b": 0.2, "c": 0.3, "d": 0.4}
    answer = read_answer(many(*(entry(n, worth[n]) for n in order)), ["d", "a", "b", "c"], single=False)
    assert {name: judged.value for name, judged in answer.judged.items()} == worth


@pytest.mark.parametrize(
    ("told", "reason"),
    [
        (None, "None"),
        (True, "True"),
        ("0.5", "'0.5'"),
        (math.nan, "nan"),
        (-math.inf, "-inf"),
        (10**400, "1000"),
        ([1], "[1]"),
    ],
)
def test_what_is_no_number_is_unscored_and_costs_no_other_its_score(told: object, reason: str) -> None:
    answer = read_answer(many(entry("a", told), entry("b", 1)), ["a", "b"], single=False)
    assert answer.judged["a"].value is None
    assert reason in answer.judged["a"].reason
    assert answer.judged["b"] == Judged(1.0)


def test_missing_double_foreign_and_crippled_entries() -> None:
    body = many(
        entry("a", 1), entry("a", 1), entry("x", 1), entry(7, 1), 5, {"trajectory": "c"}, entry("d", 0)
    )
    answer = read_answer(body, ["a", "b", "c", "d"], single=False)
    assert [answer.judged[name].value for name in "abcd"] == [None, None, None, 0.0]
    assert "2 times" in answer.judged["a"].reason
    assert "leaves it out" in answer.judged["b"].reason
    assert "'reward'" in answer.judged["c"].reason
    assert answer.foreign == 3


@pytest.mark.parametrize(
    ("body", "single", "reason"),
    [
        (b"<html>", True, "no JSON"),
        (b"[" * 100_000, True, "no JSON"),
        (b"\xff", False, "no JSON"),
        (b"3", True, "should be an object"),
        (b'{"score": 1}', True, "'score'"),
        (b'{"reward": 1, "more": 2}', True, "'more'"),
        (b'{"reward": 1, "judge": 5}', True, "version is 5"),
        (b'{"reward": 1, "judge": "a\\nb"}', True, "short text"),
        (b'{"reward": 1}', False, "should have 'rewards'"),
        (b'{"rewards": {"a": 1}}', False, "should be a list"),
    ],
)
def test_answers_of_which_nothing_can_be_used(body: bytes, single: bool, reason: str) -> None:
    with pytest.raises(BadAnswer, match=reason):
        read_answer(body, ["a"], single=single)


def test_both_forms_of_a_question() -> None:
    asked = Asked("t", "2+2", "4", {"answer": "4", "odd": {1j}})
    single = json.loads(question([asked], single=True))
    assert single == {
        "trajectory": "t",
        "prompt": "2+2",
        "response": "4",
        "meta": {"answer": "4", "odd": ["1j"]},
    }
    assert json.loads(question([asked, asked], single=False)) == {"responses": [single, single]}
    assert read_answer(b'{"reward": 0.5, "judge": "v2"}', ["t"], single=True).version == "v2"


@pytest.mark.parametrize(
    ("header", "seconds"),
    [(None, 0), ("7", 7), ("soon", 0), ("-3", 0), ("9" * 50, 86_400), ("Thu, 01 Jan 1970 00:02:00 GMT", 20)],
)
def test_retry_after(header: str | None, seconds: float) -> None:
    assert retry_after(header, now=100.0) == seconds


# ---- verdicts -------------------------------------------------------------------------------------------------
def responses(count: int) -> list[Response]:
    return [Response(f"t{n}", 1, "0-0", "", published=float(n), budget=100.0) for n in range(count)]


def said(status: int, body: bytes = b"", retry_after: str | None = None) -> Said:
    return Said(status, body, retry_after)


def judge(batch: list[Response], answer: Said | Mute, retries: int = 2) -> Verdicts:
    return verdicts(batch, answer, retries=retries, single=False, now=0.0)


def test_a_failed_try_is_tried_again_later_each_time_and_then_unscored() -> None:
    batch = responses(1)
    pauses = []
    for answer in (said(500), Mute("late", "no answer within 3 s")):
        told = judge(batch, answer)
        assert not told.done
        pauses.append(told.again[0][1])
    assert 0.125 <= pauses[0] <= 0.25 <= pauses[1] <= 0.5
    last = judge(batch, Mute("broken", "ReadError"))
    assert not last.again
    assert last.done[0][1] == Judged(None, "ReadError, at the last of 3 tries")


@pytest.mark.parametrize("answer", [said(429), said(503), Mute("away", "ConnectError")])
def test_what_the_judge_did_not_take_costs_no_try(answer: Said | Mute) -> None:
    batch = responses(3)
    for _ in range(20):
        told = judge(batch, answer, retries=0)
        assert len(told.again) == 3
        assert not told.done
        assert all(pause <= 0.5 for _, pause in told.again)


def test_retry_after_quiets_the_judge_or_delays_the_response() -> None:
    busy = judge(responses(1), said(429, retry_after="7"))
    assert busy.quiet == 7
    assert busy.again[0][1] >= 7
    failed = judge(responses(1), said(500, retry_after="7"))
    assert failed.quiet == 0
    assert failed.again[0][1] == 7


@pytest.mark.parametrize("answer", [said(413), said(302), said(200, b"<html>")])
def test_a_refused_batch_is_taken_apart_and_a_refused_response_is_unscored(answer: Said) -> None:
    batch = responses(2)
    told = judge(batch, answer)
    assert not told.done
    assert all(response.alone for response, _ in told.again)
    assert judge(batch[:1], answer).done[0][1].value is None


# ---- the breaker ----------------------------------------------------------------------------------------------
def fail(breaker: Breaker, now: float, *, trial: bool = False, away: bool = False) -> None:
    breaker.failed(now, "why", away=away, trial=trial)


def opened(limit: int = 3) -> Breaker:
    breaker = Breaker(limit, 0.0)
    for _ in range(limit):
        assert breaker.admits(1.0)
        assert not breaker.begin()
        fail(breaker, 1.0)
    return breaker


def test_failures_in_a_row_open_it_and_one_request_tries() -> None:
    breaker = opened()
    assert (breaker.state, breaker.since) == ("open", 1.0)
    assert not breaker.admits(1.0)
    assert breaker.admits(1.0 + FIRST)
    assert breaker.begin()
    assert not breaker.admits(9.0)  # one at a time
    fail(breaker, 2.0)  # of a request from before
    assert breaker.state == "trial"
    breaker.answered(3.0)
    assert (breaker.state, breaker.since) == ("closed", 3.0)


def test_an_answer_between_failures_keeps_it_closed() -> None:
    breaker = Breaker(3, 0.0)
    for _ in range(10):
        fail(breaker, 1.0)
        fail(breaker, 1.0)
        breaker.answered(1.0)
    assert breaker.state == "closed"


@pytest.mark.parametrize(("away", "longest"), [(False, LAST), (True, AWAY)])
def test_pauses_double_up_to_a_bound(away: bool, longest: float) -> None:
    breaker, now, pauses = opened(), 1.0, []
    for _ in range(10):
        due = breaker.due()
        assert due is not None
        pauses.append(due - now)
        now = due
        assert breaker.begin()
        fail(breaker, now, trial=True, away=away)
    for n, pause in enumerate(pauses):
        assert min(FIRST * 2**n, longest) / 2 <= pause <= min(FIRST * 2**n, longest)


@pytest.mark.parametrize(("away", "state"), [(True, "closed"), (False, "trial")])
def test_only_a_judge_that_was_away_is_back_when_it_takes_a_request(away: bool, state: str) -> None:
    breaker = Breaker(1, 0.0)
    fail(breaker, 1.0, away=away)
    assert breaker.admits(2.0)
    assert breaker.begin()
    breaker.held()
    assert breaker.state == state


def test_a_trial_that_was_not_sent_leaves_the_next_one_free() -> None:
    breaker = opened()
    assert breaker.begin()
    breaker.unused(5.0, trial=True)
    assert breaker.admits(5.0)


# ---- the backlog ----------------------------------------------------------------------------------------------
def test_oldest_first_and_each_once() -> None:
    backlog, all_ = Backlog(), responses(5)
    for response in (*reversed(all_), *all_):
        backlog.add(response)
    assert len(backlog) == 5
    assert backlog.take(3) == all_[:3]
    assert backlog.take(3) == all_[3:]
    assert not backlog.take(3)


def test_one_that_goes_alone_goes_alone_and_spoils_no_others_turn() -> None:
    backlog, (a, b, c) = Backlog(), responses(3)
    b.alone = True
    for response in (a, b, c):
        backlog.add(response)
    assert backlog.take(3) == [a, c]
    assert backlog.take(3) == [b]


def test_what_failed_waits_and_keeps_its_place() -> None:
    backlog, (a, b) = Backlog(), responses(2)
    backlog.add(a)
    backlog.add(b)
    assert backlog.take(1) == [a]
    backlog.again(a, at=10.0)
    assert backlog.due() == 10.0
    assert not backlog.tick(9.0)
    assert backlog.take(2) == [b]
    backlog.again(b, at=10.0)
    backlog.tick(10.0)
    assert backlog.take(2) == [a, b]


def test_who_is_out_of_time_is_out_once_asked_or_not() -> None:
    backlog, (a, b, c) = Backlog(), responses(3)
    for response in (a, b, c):
        backlog.add(response)
    assert backlog.take(1) == [a]
    backlog.end([b])
    assert backlog.due() == 100.0
    assert backlog.tick(100.0) == [a]
    assert not backlog.tick(100.5)
    backlog.again(a, at=101.0)  # its answer came too late
    assert backlog.tick(200.0) == [c]
    assert not backlog.take(3)
    assert (len(backlog), backlog.due(), backlog.oldest()) == (0, None, None)
