"""Several continuations of one prefix: members of a group share their first turns and differ in the later ones."""

from __future__ import annotations

from pathlib import Path

import pytest
from episodes import Played, Scripted, says
from test_sessions import consistent, finish

from syncline.contract.job import JobSpec
from syncline.contract.job_rules import problems
from syncline.contract.token_path import Trajectory
from syncline.contract.turns import TurnsSpec
from syncline.rollout.sessions import Sessions

PROMPT = (1, 20, 21, 22)


def turns_of(record: Trajectory) -> list[tuple[int, ...]]:
    return [tuple(record.tokens[s.start : s.end]) for s in record.segments if s.kind == "sampled"]


def played(
    root: Path, branches: int, at: int, *, members: int, lost: tuple[int, ...] = ()
) -> list[Trajectory]:
    spec = TurnsSpec(most=3, max_tokens=(5,), on_length="go_on", branches=branches, branch_at=at)
    world = Played(root, Scripted(lambda key, turns: says("7=")), spec)
    world.version()
    names = [world.begin(index, PROMPT) for index in range(members)]
    for _ in range(3):
        world.step()
    for index in lost:
        world.lose(names[index])
        world.begin(index, PROMPT)
    found = {closed.trajectory: consistent(world, closed) for closed in finish(world)}
    return [found[name] for name in names]


@pytest.mark.parametrize("at", [1, 2])
def test_branches_share_their_first_turns_and_no_other(tmp_path: Path, at: int) -> None:
    records = played(tmp_path, 2, at, members=6, lost=(1, 4))
    turns = [turns_of(record) for record in records]
    for first, second in zip(turns[::2], turns[1::2], strict=True):
        assert first[:at] == second[:at]
        assert first[at:] != second[at:]
    families = {tuple(map(tuple, one[:at])) for one in turns}
    assert len(families) == 3, "each family has a prefix of its own"
    assert [record.attempt for record in records] == [1, 2, 1, 1, 2, 1]
    assert {record.group for record in records} == {0}


def test_without_branches_nothing_is_shared(tmp_path: Path) -> None:
    turns = [turns_of(record) for record in played(tmp_path, 1, 1, members=4)]
    assert len({one[0] for one in turns}) == 4


@pytest.mark.parametrize(
    ("turns", "more", "path"),
    [
        ({"branches": 3}, {}, "turns.branches"),
        ({"branches": 4, "most": 2, "branch_at": 2}, {}, "turns.branch_at"),
        ({"branches": 2}, {"rollout": {"engine": "sglang"}}, "turns.branches"),
    ],
)
def test_branches_that_cannot_be_are_refused_at_submit(
    turns: dict[str, int], more: dict[str, dict[str, str]], path: str
) -> None:
    spec = {"name": "a", "model": {"name": "tiny-moe"}, "batch": {"group_size": 8}, "turns": turns, **more}
    assert path in [problem.path for problem in problems(JobSpec.model_validate(spec))]
    spec = {**spec, "turns": {**turns, "branches": 1}}
    assert path not in [problem.path for problem in problems(JobSpec.model_validate(spec))]


def test_a_task_of_one_turn_has_no_branches(tmp_path: Path) -> None:
    world = Played(tmp_path, Scripted(lambda key, turns: says("7=")), TurnsSpec())
    with pytest.raises(ValueError, match=r"turns\.branches: the environment has one turn"):
        Sessions(
            TurnsSpec(branches=2),
            world.codec,
            world.steps,
            "w0",
            multi_turn=False,
            tokens=6,
            context=1024,
            stops=(2,),
        )
