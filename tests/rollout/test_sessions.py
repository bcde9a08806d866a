"""Sessions under the real engine: whatever happens between and during turns, the record says what was sampled."""

from __future__ import annotations

import itertools
import tempfile
from dataclasses import dataclass
from pathlib import Path

import pytest
from conformance.forge import cold_logprobs, gap, plain
from episodes import DONE, LOST, Played, Scripted, says
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from syncline.contract.job import JobSpec
from syncline.contract.token_path import Trajectory
from syncline.contract.turns import Turn, TurnsSpec
from syncline.contract.version_path import VersionId
from syncline.rollout.session import Closed
from syncline.runtime.sandbox import Outcome
from syncline.trainer.batch import sample_of

NOISE = 5e-5  # FP32: one full pass against prefill and decode


def consistent(played: Played, closed: Closed) -> Trajectory:
    """The record adds up, holds the ids that the engine sampled, and scores as the trainer would score it."""
    record = played.record(closed)
    chunks = played.chunks[record.trajectory]
    sampled = [id for chunk in chunks for id in chunk.tokens]
    assert list(record.sampled_ids()) == sampled
    assert record.logprobs.tolist() == pytest.approx([p for chunk in chunks for p in chunk.logprobs], abs=0)
    said = [v for chunk in chunks for v in [chunk.version] * len(chunk.tokens)]
    assert [record.span_of(i).version for i in range(record.sampled)] == said
    kinds = [segment.kind for segment in record.segments]
    assert kinds[0] == "prompt"
    assert kinds[-1] == "sampled"
    assert [t.sampled for t in record.turns] == [
        s.end - s.start for s in record.segments if s.kind == "sampled"
    ]
    observed = iter(segment for segment in record.segments if segment.kind == "observed")
    for turn in record.turns:
        text = "".join(message.content for message in turn.observed)
        if text:
            segment = next(observed)
            ids = list(record.tokens[segment.start : segment.end])
            assert ids == played.codec.encode_piece(text)
            assert len(ids) <= played.spec.observed_tokens
    assert next(observed, None) is None
    assert len(record.tokens) <= (played.spec.context or 1024)
    assert record.expert_shape is not None
    assert record.expert_shape[0] == len(record.tokens) - 1
    sample = sample_of(record, record.loss_mask, 1.0)
    for i, position in enumerate(sample.positions):
        assert sample.tokens[position] == sampled[i]
    for span in record.spans:
        if span.context == "carried":
            continue
        model = plain(played.forge.folder, span.version.number)
        places = list(sample.positions[span.start : span.end])
        cold = cold_logprobs(model, list(record.tokens[: places[-1] + 1]), 1)
        assert gap(list(record.logprobs[span.start : span.end]), [cold[p - 1] for p in places]) < NOISE
    return record


def finish(played: Played) -> list[Closed]:
    for _ in range(2000):
        if not played.engine.running and not played.sessions.between:
            return played.sessions.closed()
        played.step()
    raise AssertionError("sessions do not end")


@dataclass
class Plan:
    """What happens in one history."""

    turns: TurnsSpec
    answers: list[str]
    slow: list[int]
    events: list[str]
    prompts: list[tuple[int, ...]]


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    return Plan(
        turns=TurnsSpec(
            most=draw(st.integers(1, 4)),
            max_tokens=tuple(draw(st.lists(st.integers(1, 6), max_size=3))),
            context=draw(st.sampled_from([None, 12, 20, 40])),
            on_length=draw(st.sampled_from(["go_on", "go_on", "end"])),
            observed_tokens=draw(st.integers(1, 8)),
            on_long=draw(st.sampled_from(["cut", "end"])),
            tool_retries=1,
        ),
        answers=draw(st.lists(st.sampled_from(["", "7=", "a longer answer", "done", "lost"]), min_size=1)),
        slow=draw(st.lists(st.integers(0, 3), min_size=1)),
        events=draw(
            st.lists(
                st.sampled_from(
                    ["step", "step", "step", "drain", "continue_old", "in_place", "carry", "lose"]
                ),
                min_size=4,
                max_size=24,
            )
        ),
        prompts=draw(
            st.lists(
                st.lists(st.integers(4, 99), min_size=1, max_size=8).map(lambda p: (1, *p)),
                min_size=1,
                max_size=4,
            )
        ),
    )


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True)
@given(plan=plans())
def test_random_histories_stay_consistent(plan: Plan) -> None:
    with tempfile.TemporaryDirectory() as root:
        _one_history(plan, Path(root))


def _one_history(plan: Plan, root: Path) -> None:
    answers, slow = itertools.cycle(plan.answers), itertools.cycle(plan.slow)

    def script(key: str, turns: tuple[Turn, ...]) -> Outcome:
        answer = next(answers)
        return {"done": DONE, "lost": LOST}.get(answer) or says(answer)

    played = Played(root, Scripted(script, slow=lambda: next(slow)), plan.turns)
    played.version()
    alive: list[tuple[str, int]] = []
    for index, prompt in enumerate(plan.prompts):
        alive.append((played.begin(index, prompt), index))
    prompts = plan.prompts
    ended: dict[str, Closed] = {}
    failed: dict[str, str] = {}

    def gather() -> None:
        for closed in played.sessions.closed():
            assert closed.trajectory not in ended | failed
            consistent(played, closed)
            ended[closed.trajectory] = closed
        failed.update(played.sessions.failed())

    for event in plan.events:
        if event == "step":
            played.step()
        elif event == "lose":
            open_ones = [(n, i) for n, i in alive if n not in ended and n not in failed]
            if open_ones and played.engine.room:
                name, index = open_ones[0]
                played.lose(name)
                played.begin(index, prompts[index])
        elif played.number < 5:
            kind, kv = ("in_place", "carried") if event == "carry" else (event, "recomputed")
            if kind == "in_place" and played.lanes > 1:
                kind = "drain"
            played.version(kind, kv)
        gather()
    for closed in finish(played):
        consistent(played, closed)
        ended[closed.trajectory] = closed
    gather()
    assert set(ended) | set(failed) == {name for name, _ in alive}
    for why in failed.values():
        assert "lost" in why


# ---- single stories ---------------------------------------------------------------------------------------
def limits(**given: object) -> TurnsSpec:
    return TurnsSpec.model_validate({"on_length": "go_on", "max_tokens": (3, 2), **given})


def play(
    root: Path, turns: TurnsSpec, *outcomes: Outcome, prompt: tuple[int, ...] = (1, 20, 21)
) -> tuple[Played, Trajectory]:
    left = iter(outcomes)
    played = Played(root, Scripted(lambda key, turns: next(left)), turns)
    played.version()
    played.begin(0, prompt)
    [closed] = finish(played)
    return played, consistent(played, closed)


def test_a_version_between_two_turns_is_a_span_boundary(tmp_path: Path) -> None:
    played = Played(tmp_path, Scripted(lambda key, turns: says("7="), slow=lambda: 2), limits(most=2))
    played.version()
    played.begin(0, (1, 20, 21))
    for _ in range(3):
        played.step()
    assert played.sessions.between == 1
    played.version("continue_old")
    [closed] = finish(played)
    record = consistent(played, closed)
    first = record.turns[0].sampled
    assert [(s.start, s.end, s.version, s.context) for s in record.spans] == [
        (0, first, VersionId(0, 0), "recomputed"),
        (first, record.sampled, VersionId(0, 1), "recomputed"),
    ]
    assert record.turns[-1].ended == "turns"


def test_each_turn_has_its_own_limit_and_the_seed_of_its_number(tmp_path: Path) -> None:
    _, record = play(tmp_path, limits(most=3, max_tokens=(3, 2)), says("7="), says("8="))
    assert all(turn.sampled <= most for turn, most in zip(record.turns, (3, 2, 2), strict=True))
    assert [turn.seconds for turn in record.turns] == [0.5, 0.5, 0.0]


def test_a_full_context_ends_before_the_observation_that_does_not_fit(tmp_path: Path) -> None:
    _, record = play(tmp_path, limits(most=3, context=8), says("0123456789"))
    assert len(record.turns) == 1
    assert record.turns[0].ended == "context"
    assert record.turns[0].observed == ()


def test_a_long_observation_is_cut_and_marked_or_ends_the_trajectory(tmp_path: Path) -> None:
    wide = limits(most=2, observed_tokens=4, on_long="cut")
    _, record = play(tmp_path / "cut", wide, says("0123456789"))
    assert record.turns[0].observed[0].content == "0123"
    assert record.turns[0].cut == 6
    _, record = play(tmp_path / "end", limits(most=2, observed_tokens=4), says("0123456789"))
    assert record.turns[0].ended == "observation"


def test_a_tool_that_was_killed_is_told_to_the_policy(tmp_path: Path) -> None:
    late = Outcome(kind="timeout", reason="killed after 5 s")
    _, record = play(tmp_path, limits(most=2), late)
    assert record.turns[0].observed[0].content == "error: timeout: killed after 5 s"
    assert record.turns[0].trouble == "killed after 5 s"


def test_a_lost_step_is_tried_again_and_is_no_answer(tmp_path: Path) -> None:
    _, record = play(tmp_path, limits(most=2, tool_retries=2), LOST, LOST, says("7="))
    assert record.turns[0].observed[0].content == "7="
    played = Played(tmp_path / "b", Scripted(lambda key, turns: LOST), limits(most=2, tool_retries=1))
    played.version()
    name = played.begin(0, (1, 20))
    assert finish(played) == []
    assert played.sessions.failed() == [(name, "its environment: lost: killed by SIGKILL")]


def test_a_session_that_was_taken_over_after_its_end_is_not_published(tmp_path: Path) -> None:
    played = Played(tmp_path, Scripted(lambda key, turns: DONE), TurnsSpec(most=1))
    played.version()
    names = [played.begin(index, (1, 5 + index)) for index in range(2)]
    while played.sessions.ended < 2:
        played.step()
    played.lose(names[0])
    assert [closed.trajectory for closed in played.sessions.closed()] == [names[1]]
    assert played.sessions.ended == 0


def test_limits_of_turns_are_checked_at_submit() -> None:
    with pytest.raises(ValueError, match="most"):
        JobSpec.model_validate({"name": "a", "model": {"name": "m"}, "turns": {"most": 0}})
