"""Several data sets as one environment, what is counted of each, and what a spec may ask of their prompts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from syncline.contract.job import JobSpec, RewardSpec, TaskSpec
from syncline.contract.job_rules import problems
from syncline.environments import items
from syncline.environments.environment import load, reaches_network, runs_foreign_code, validate
from syncline.environments.turns import Turn
from syncline.scheduler.sources import sources

CHARACTERS = {"environment": "characters", "options": {"game": "copy", "length": 2}}
CALCULATOR = {"environment": "calculator", "name": "sums", "weight": 3}
LINES = '{"prompt": "1+1=", "answer": "2", "level": 2}\n{"prompt": "0+1=", "answer": "1", "level": 1}\n'


def spec(prompts: dict[str, Any] | None = None, task: dict[str, Any] | None = None, **more: Any) -> JobSpec:
    raw = {"name": "n", "model": {"name": "m"}, "task": task or {}, "prompts": prompts or {}, **more}
    return JobSpec.model_validate(raw, strict=False)


def mix(*parts: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"environment": "mix", "parts": list(parts), **more}


def task(*parts: dict[str, Any]) -> TaskSpec:
    return TaskSpec.model_validate(mix(*parts), strict=False)


def test_indices_take_turns_over_the_parts() -> None:
    both = load(task(CHARACTERS, CALCULATOR), seed=5)
    alone = [
        load(TaskSpec.model_validate(dict(environment=name, options=options)), seed=5)
        for name, options in (("characters", CHARACTERS["options"]), ("calculator", {}))
    ]
    for index in range(8):
        part, own = alone[index % 2], index // 2
        assert both.prompt(index).text == part.prompt(own).text == both.reset(index).text
        assert both.prompt(index).index == index
        assert both.prompt(index).meta["dataset"] == ("characters", "sums")[index % 2]
    assert (both.size, both.multi_turn) == (None, True)
    answer = both.prompt(4).meta["answer"]
    assert both.score(4, answer) == 1.0
    assert both.step(4, [Turn(text=answer)]).done
    call = "!" + both.prompt(1).meta["operands"]
    step = both.step(1, [Turn(text=call)])
    assert (step.done, len(step.observed)) == (False, 1)
    turns = [Turn(text=call, observed=step.observed), Turn(text=both.prompt(1).meta["answer"])]
    assert both.score_turns(1, turns) == pytest.approx(1.0)
    with pytest.raises(ValueError, match="negative"):
        both.prompt(-1)


def test_a_mix_is_as_foreign_as_its_strangest_part() -> None:
    own = {"environment": "python", "options": {"function": "a.b:c"}}
    gym = {"environment": "reasoning_gym", "options": {"dataset": "chain_sum"}}
    assert (reaches_network(task(CHARACTERS)), runs_foreign_code(task(CHARACTERS, CALCULATOR))) == (
        False,
        False,
    )
    mixed = task(CHARACTERS, own)
    given = mixed.model_copy(update={"network": True})
    assert (reaches_network(mixed), reaches_network(given)) == (False, True)
    assert (runs_foreign_code(mixed), runs_foreign_code(task(CHARACTERS, gym))) == (True, True)
    asks = {"environment": "http", "options": {"url": "http://h:1"}}
    assert reaches_network(task(CHARACTERS, asks))
    assert not reaches_network(task(CHARACTERS, CALCULATOR).model_copy(update={"network": True}))
    (found,) = validate(task(CHARACTERS, gym), RewardSpec(memory_mb=64))
    assert found.path == "reward.memory_mb"
    (wrong,) = validate(
        task(CALCULATOR, {"environment": "characters", "options": {"gme": "copy"}}), RewardSpec()
    )
    assert wrong.path == "task.parts.1.options.gme"


def test_items_are_counted_where_they_can_be(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(LINES)
    assert items.count("jsonl", {"file": "a.jsonl"}, tmp_path) == 2
    assert items.count("reasoning_gym", {"dataset": "chain_sum", "size": 7}) == 7
    assert items.count("characters", {}) is None
    assert items.difficulties({"file": "a.jsonl"}, "level", tmp_path) == [2.0, 1.0]
    with pytest.raises(ValueError, match=r"line 1 of a.jsonl has no number under 'hard'"):
        items.difficulties({"file": "a.jsonl"}, "hard", tmp_path)


def test_data_sets_are_checked_against_their_ranges(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(LINES)
    file = {"environment": "jsonl", "options": {"file": "a.jsonl"}}
    asked = {"order": "easiest_first", "difficulty": "level"}
    (one,) = sources(spec(asked, file), tmp_path)
    assert (one.items, one.whole, one.difficulties) == (2, 2, (2.0, 1.0))
    (held,) = sources(spec({"first": 1}, file), tmp_path)
    assert (held.first, held.items, held.whole) == (1, 1, 2)
    (plain,) = sources(spec({}, {"environment": "jsonl", "options": {"file": "not there.jsonl"}}), tmp_path)
    assert (plain.items, plain.whole) == (None, None)  # nobody needs to know
    for keys, where in (({"last": 2}, "prompts.last"), ({"first": 2}, "prompts.first")):
        with pytest.raises(ValueError, match=rf"{where}: 'jsonl' has items 0 to 1"):
            sources(spec(keys, file), tmp_path)
    two = sources(
        spec({"order": "shuffled"}, mix({**CHARACTERS, "last": 4}, {**file, "weight": 2})), tmp_path
    )
    assert [(s.name, s.weight, s.items, s.whole) for s in two] == [
        ("characters", 1, 5, None),
        ("jsonl", 2, 2, 2),
    ]


@pytest.mark.parametrize(
    ("prompts", "task", "path"),
    [
        ({"first": 5, "last": 4}, None, "prompts.last"),
        ({"order": "shuffled"}, None, "prompts.last"),
        ({"easiest": 0.9}, {"environment": "calculator"}, "prompts.last"),
        ({"easiest": 0.2, "hardest": 0.4, "last": 9}, None, "prompts.easiest"),
        (
            {"difficulty": "level", "last": 9},
            {"environment": "jsonl", "options": {"file": "a.jsonl"}},
            "prompts.difficulty",
        ),
        ({"difficulty": "level", "order": "easiest_first", "last": 9}, None, "prompts.difficulty"),
        ({"oversample": 3.0}, None, "prompts.oversample"),
        ({"first": 3}, mix(CHARACTERS), "prompts.first"),
        ({"order": "shuffled"}, mix(CHARACTERS), "task.parts.0.last"),
        ({}, mix(), "task.parts"),
        ({}, mix(CHARACTERS, CHARACTERS), "task.parts.1.name"),
        ({}, mix({**CHARACTERS, "first": 3, "last": 1}), "task.parts.0.last"),
        ({}, mix(CHARACTERS, options={"a": 1}), "task.options"),
        ({}, {"environment": "characters", "parts": [CHARACTERS]}, "task.parts"),
    ],
)
def test_what_cannot_be_drawn_is_refused_with_its_key(
    prompts: dict[str, Any], task: dict[str, Any] | None, path: str
) -> None:
    (found,) = problems(spec(prompts, task))
    assert found.path == path
    assert found.hint


@pytest.mark.parametrize(
    ("prompts", "more"),
    [
        ({}, {}),
        ({"first": 100}, {}),
        ({"order": "shuffled", "last": 9, "easiest": 0.9, "hardest": 0.1}, {}),
        ({"oversample": 2.0}, {}),
        ({"oversample": 3.0}, {"schedule": {"lag_policy": "expire"}}),
        (
            {"order": "shuffled"},
            {"task": {"environment": "reasoning_gym", "options": {"dataset": "chain_sum"}}},
        ),
        ({"zero_variance": "filter", "retries": 3}, {"task": mix(CHARACTERS, CALCULATOR)}),
    ],
)
def test_what_can_be_drawn_is_taken(prompts: dict[str, Any], more: dict[str, Any]) -> None:
    assert problems(spec(prompts, **more)) == []
