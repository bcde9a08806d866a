"""A spec from text: nothing ignored, nothing coerced, every problem with its path and what would be right."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from syncline.contract.job import JobSpec
from syncline.contract.spec_text import (
    MAX_BYTES,
    MAX_DEPTH,
    SpecError,
    parse_json,
    parse_toml,
    strict_json,
    told,
)

LEAST: dict[str, Any] = {"name": "run", "model": {"name": "tiny", "weights": "random"}}
LEAST_TOML = 'name = "run"\n[model]\nname = "tiny"\nweights = "random"\n'


def refused(text: str | bytes, parse: Any = parse_json) -> dict[str, tuple[str, str]]:
    """Path -> (message, hint) of each problem."""
    with pytest.raises(SpecError) as caught:
        parse(text)
    assert caught.value.problems
    return {problem.path: (problem.message, problem.hint) for problem in caught.value.problems}


def changed(**keys: Any) -> str:
    return json.dumps({**LEAST, **keys})


def test_the_least_spec_resolves_the_same_from_both_forms() -> None:
    spec = parse_json(json.dumps(LEAST))
    assert parse_toml(LEAST_TOML).canonical() == spec.canonical()
    assert parse_json(spec.canonical()).hash() == spec.hash()


def test_lists_become_tuples() -> None:
    spec = parse_json(
        changed(
            optimizer={"betas": [0.8, 0.9]}, schedule={"switches": [{"at_update": 3, "mode": "disjoint"}]}
        )
    )
    assert spec.optimizer.betas == (0.8, 0.9)
    assert spec.schedule.switches[0].mode == "disjoint"


# ---- unknown keys -------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("keys", "path", "hint"),
    [
        ({"bacth": {}}, "bacth", "did you mean batch?"),
        ({"batch": {"group_sise": 2}}, "batch.group_sise", "did you mean batch.group_size?"),
        ({"group_size": 2}, "group_size", "did you mean batch.group_size?"),
        ({"lr": 1}, "lr", "did you mean optimizer.lr?"),
        ({"loss": {"kl": {"coeficient": 1}}}, "loss.kl.coeficient", "did you mean loss.kl.coefficient?"),
        (
            {"schedule": {"switches": [{"at_update": 1, "mode": "disjoint", "moed": 1}]}},
            "schedule.switches.0.moed",
            "did you mean schedule.switches.0.mode?",
        ),
    ],
)
def test_an_unknown_key_is_answered_with_the_right_one(keys: dict[str, Any], path: str, hint: str) -> None:
    assert refused(changed(**keys))[path][1] == hint


def test_a_key_like_no_other_is_answered_with_all() -> None:
    message, hint = refused(changed(batch={"zzz": 1}))["batch.zzz"]
    assert message == "is an unknown key"
    assert hint == "known keys here: groups, group_size, micro_tokens, incomplete"


def test_a_key_with_a_dot_is_one_key() -> None:
    assert "a.b" in refused(changed(**{"a.b": 1}))
    assert "task.options.a.b" in refused(changed(task={"options": {"a.b": None}}))


# ---- repeated keys ------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("text", "paths"),
    [
        ('{"name": "a", "name": "b"}', ["name"]),
        ('{"model": {"name": "a", "weights": "random", "name": "a"}}', ["model.name"]),
        ('{"a": [{"b": 1}, {"b": 1, "b": 2}]}', ["a.1.b"]),
        ('{"a": {"x": 1, "x": 1}, "a": {"y": 1, "y": 1}}', ["a", "a.y"]),
    ],
)
def test_a_repeated_json_key_is_named(text: str, paths: list[str]) -> None:
    assert list(refused(text)) == paths


@pytest.mark.parametrize(
    ("text", "path"),
    [
        ("[batch]\ngroups = 1\ngroups = 2\n", "batch.groups"),
        ("[batch]\ngroups = 1\n[batch]\n", "batch"),
        ("[batch]\ngroups = 1\ngroups = 2", "batch.groups"),
        ("batch.groups = 1\n[batch]\n", "batch"),
    ],
)
def test_a_repeated_toml_key_is_named(text: str, path: str) -> None:
    found = refused(
        LEAST_TOML.replace("[model]\n", "model.").replace("weights", "model.weights") + text, parse_toml
    )
    assert list(found) == [path]
    assert "more than once" in found[path][0]


# ---- ill-typed ----------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("keys", "path", "message"),
    [
        ({"batch": {"groups": "8"}}, "batch.groups", "should be a whole number, not '8'"),
        ({"batch": {"groups": 8.0}}, "batch.groups", "should be a whole number, not 8.0"),
        ({"batch": {"groups": True}}, "batch.groups", "should be a whole number, not True"),
        ({"batch": {"groups": 0}}, "batch.groups", "should be greater than or equal to 1, not 0"),
        ({"batch": 3}, "batch", "should be a table of keys, not 3"),
        ({"batch": None}, "batch", "should be a table of keys, not None"),
        ({"optimizer": {"lr": "1e-3"}}, "optimizer.lr", "should be a number, not '1e-3'"),
        ({"optimizer": {"betas": [0.9]}}, "optimizer.betas.1", "is missing"),
        ({"optimizer": {"betas": [1, 1, 1]}}, "optimizer.betas", "tuple should have at most 2 items"),
        ({"rollout": {"record_experts": 1}}, "rollout.record_experts", "should be true or false, not 1"),
        ({"schedule": {"mode": "both"}}, "schedule.mode", "should be 'colocated' or 'disjoint', not 'both'"),
        (
            {"task": {"options": {"x": {}}}},
            "task.options.x",
            "should be a string or a whole number or a number or true or false or a list, not a table",
        ),
        ({"task": {"options": {"x": [True]}}}, "task.options.x.0", "should be a string or a whole number"),
        ({"name": "Run 1"}, "name", "should be a string of the form ^[a-z0-9]"),
        ({"model": {"weights": "random"}}, "model.name", "is missing"),
        ({"kind": "examine"}, "kind", "should be 'train' or 'evaluate'"),
    ],
)
def test_an_ill_typed_value_is_told_what_is_right(keys: dict[str, Any], path: str, message: str) -> None:
    found = refused(changed(**keys))
    assert list(found) == [path]
    assert found[path][0].startswith(message)


def test_a_near_miss_of_a_choice_is_guessed() -> None:
    assert refused(changed(schedule={"mode": "colocatd"}))["schedule.mode"][1] == "did you mean 'colocated'?"


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999", "-1e999"])
def test_numbers_that_are_none_are_refused(number: str) -> None:
    refused(changed(optimizer={"lr": 1}).replace('"lr": 1', f'"lr": {number}'))


@pytest.mark.parametrize("value", ["nan", "inf", "-inf", "2026-01-01", "12:00:00", "2026-01-01T00:00:00Z"])
def test_toml_values_that_json_does_not_know_are_refused(value: str) -> None:
    found = refused(f"{LEAST_TOML}[task.options]\nx = {value}\n", parse_toml)
    assert list(found) == ["task.options.x"]


def test_a_long_wrong_value_is_not_repeated_whole() -> None:
    message, _ = refused(changed(name="x" * 10_000))["name"]
    assert len(message) < 200


def test_problems_beyond_fifty_are_counted() -> None:
    found = refused(changed(**{f"k{i}": i for i in range(80)}))
    assert len(found) == 51
    assert found[""][0] == "and 30 more problems"


# ---- combinations -------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("keys", "path"),
    [
        ({"batch": {"group_size": 1}}, "batch.group_size"),
        ({"sampling": {"top_p": 0.9}, "loss": {"correction": {"kind": "mask"}}}, "sampling.top_p"),
        ({"sampling": {"top_k": 5}, "loss": {"kind": "gspo"}}, "sampling.top_k"),
        ({"sampling": {"record_mask": True}}, "sampling.record_mask"),
        ({"sampling": {"record_mask": True, "top_k": 1}}, "sampling.top_k"),
        (
            {"sampling": {"record_mask": True, "top_p": 0.9}, "rollout": {"engine": "sglang"}},
            "sampling.top_k",
        ),
        (
            {"sampling": {"record_mask": True, "top_k": 4097}, "rollout": {"engine": "sglang"}},
            "sampling.top_k",
        ),
        ({"schedule": {"mode": "disjoint", "max_lag": 0}}, "schedule.max_lag"),
        ({"precision": {"recipe": "bf61"}}, "precision.recipe"),
        ({"rollout": {"workers": 2, "pace": [1.0]}}, "rollout.pace"),
        ({"reward": {"source": "python"}}, "reward.function"),
    ],
)
def test_impossible_combinations_are_refused(keys: dict[str, Any], path: str) -> None:
    message, hint = refused(changed(**keys))[path]
    assert message
    assert hint


# ---- hostile text -------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "text",
    [
        b"\xff",
        b"",
        b"1",
        b"[]",
        b'"x"',
        b"null",
        b"{",
        b"{'a':1}",
        b'{"a":1,}',
        b"\xef\xbb\xbf{}",
        b'{"name": "\\ud800"}',
        b"[" * 100_000,
        b'{"a":' * 10_000,
        b'"' * 500_000,
        b"\\" * 900_000 + b'"',
        b'{"a":' + b"9" * 100_000 + b"}",
        b"{" + b",".join(b'"%d":0' % (i % 50_000) for i in range(70_000)) + b"}",
        b'{"' + b"nam" * 300_000 + b'":1}',
        b" " * (MAX_BYTES + 1),
    ],
    ids=range(19),
)
def test_hostile_json_is_refused_in_a_moment(text: bytes) -> None:
    began = time.process_time()
    refused(text)
    assert time.process_time() - began < 1


@pytest.mark.parametrize(
    "text",
    [
        b"\xff",
        b"x = ",
        b"a" + b".a" * 200_000 + b" = 1",
        b"[a" + b".a" * 200_000 + b"]",
        b"x = " + b"[" * 10_000,
        b"x = " + b"{a=" * 10_000,
        b"x = '''" * 100_000,
        b'x = """' * 100_000,
        b"[a]\n" * 200_000,
        b"a.b=1\n" * 150_000,
        b"[[a]]\n" * 150_000,
        b"x = " + b"9" * 100_000,
        b"#" * (MAX_BYTES + 1),
    ],
    ids=range(13),
)
def test_hostile_toml_is_refused_in_a_moment(text: bytes) -> None:
    began = time.process_time()
    refused(text, parse_toml)
    assert time.process_time() - began < 1


@pytest.mark.parametrize("parse", [parse_json, parse_toml])
def test_a_byte_order_mark_is_named(parse: Callable[[bytes], JobSpec]) -> None:
    with pytest.raises(SpecError, match="byte order mark"):
        parse(b"\xef\xbb\xbf" + b'name = "a"')


def test_brackets_in_strings_and_comments_nest_nothing() -> None:
    deep = "[" * 200
    assert (
        parse_toml(f'# {deep}\n{LEAST_TOML}[task.options]\nalphabet = "{deep}"\n').task.options["alphabet"]
        == deep
    )
    assert strict_json(json.dumps({"x": deep + '"\\' + deep})) == {"x": deep + '"\\' + deep}


def test_the_deepest_legal_nesting_is_read() -> None:
    assert strict_json("[" * MAX_DEPTH + "]" * MAX_DEPTH)
    refused("[" * (MAX_DEPTH + 1) + "]" * (MAX_DEPTH + 1), strict_json)


# ---- properties ---------------------------------------------------------------------------------------------
JSONISH = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=12,
)


@settings(max_examples=300, deadline=None)
@given(st.dictionaries(st.sampled_from([*JobSpec.model_fields, "odd", "a.b", ""]), JSONISH, max_size=5))
def test_any_table_is_a_spec_or_has_problems_that_can_be_told(keys: dict[str, Any]) -> None:
    try:
        parse_json(json.dumps({**LEAST, **keys}))
    except SpecError as error:
        lines = [told(problem) for problem in error.problems]
    else:
        lines = ["a spec"]
    assert lines
    assert all(lines)


@settings(max_examples=300, deadline=None)
@given(st.text(max_size=60) | st.binary(max_size=60))
def test_any_text_is_a_spec_or_a_problem(text: str | bytes) -> None:
    for parse in (parse_json, parse_toml):
        with pytest.raises(SpecError):
            parse(text)


def test_every_single_typo_of_every_key_is_found() -> None:
    """One letter lost from any key of the resolved spec, at any depth: refused at exactly that path."""
    rng = random.Random(7)
    whole = parse_json(json.dumps(LEAST)).model_dump(mode="json")

    def keys(table: dict[str, Any], above: tuple[str, ...]) -> list[tuple[str, ...]]:
        found = [(*above, name) for name in table]
        for name, inner in table.items():
            if isinstance(inner, dict) and name != "options":
                found += keys(inner, (*above, name))
        return found

    for *parent, name in keys(whole, ()):
        if len(name) < 3 or name in ("top_p", "top_k"):  # too short, or one letter from one another
            continue
        cut = rng.randrange(len(name))
        typo = name[:cut] + name[cut + 1 :]
        broken = json.loads(json.dumps(whole))
        table = broken
        for part in parent:
            table = table[part]
        if typo in table:
            continue
        table[typo] = table.pop(name)
        message, hint = refused(json.dumps(broken))[".".join([*parent, typo])]
        assert message.startswith("is an unknown key")
        assert ".".join([*parent, name]) in hint
