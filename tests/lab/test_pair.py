"""The pair is the loop's own path in one process: lock-step, and repeatable to the bit."""

from __future__ import annotations

from pathlib import Path

import pytest

from syncline.contract.token_path import Trajectory
from syncline.contract.version_path import VersionId
from syncline.lab.measure import behaviour, gap
from syncline.lab.pair import Pair, one_thread
from syncline.lab.task import sort_spec, write_models


@pytest.fixture(scope="module", autouse=True)
def _threads() -> None:
    one_thread()


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("models")
    write_models(root)
    return root


def _tokens(records: list[Trajectory]) -> list[list[int]]:
    return [list(r.tokens) for r in records]


@pytest.mark.parametrize("architecture", ["dense", "moe"])
def test_it_repeats_itself_bit_by_bit(architecture: str, models: Path, tmp_path: Path) -> None:
    spec = sort_spec("moe" if architecture == "moe" else "dense", groups=4, group_size=4)
    told = []
    for name in ("a", "b"):
        pair = Pair(spec, models, tmp_path / name)
        digests, sampled = [], []
        for update in range(3):
            digests.append(pair.publish().digest())
            records = pair.sample(range(4 * update, 4 * update + 4), 4)
            sampled.append((_tokens(records), [r.logprobs.tobytes() for r in records]))
            pair.train(records, pair.rewards(records))
        told.append((digests, sampled))
        assert len(set(digests)) == 3, "each update makes other weights"
    assert told[0] == told[1]


def test_a_version_serves_from_its_publishing_on(models: Path, tmp_path: Path) -> None:
    pair = Pair(sort_spec(groups=2, group_size=4), models, tmp_path)
    with pytest.raises(ValueError, match="holds no verified version"):
        pair.sample([0])
    first = pair.publish()
    records = pair.sample([0, 1], 4)
    trained = pair.train(records, pair.rewards(records))
    assert {row.lag for row in trained.rows} == {0}
    assert {span.digest for r in records for span in r.spans} == {first.digest()}
    # the trainer has moved on, rollout has not
    before = gap(pair.score_trainer(records), pair.score_rollout(records))
    assert before.mean > 1e-4
    second = pair.publish()
    assert (second.version, second.parent) == (VersionId(0, 1), VersionId(0, 0))
    after = gap(pair.score_trainer(records), pair.score_rollout(records))
    assert after.max < 1e-5
    assert {span.version for r in pair.sample([2]) for span in r.spans} == {VersionId(0, 1)}


def test_the_recorded_scores_are_those_of_the_served_version(models: Path, tmp_path: Path) -> None:
    pair = Pair(sort_spec("moe", groups=4, group_size=4), models, tmp_path)
    pair.publish()
    records = pair.sample(range(8), 2)
    decoded, prefilled = behaviour(records), pair.score_rollout(records)
    assert gap(prefilled, decoded).max < 1e-5
    assert gap(pair.score_rollout(records), prefilled).max == 0
    scored = pair.score_trainer(records)
    assert gap(pair.score_trainer(records), scored).max == 0
    assert all(r.expert_ids is not None for r in records)


def test_more_requests_than_run_together_are_sampled_alike(models: Path, tmp_path: Path) -> None:
    wide = Pair(sort_spec(groups=4, group_size=8), models, tmp_path / "wide")
    narrow = Pair(sort_spec(groups=1, group_size=3), models, tmp_path / "narrow")
    for pair in (wide, narrow):
        pair.publish()
    assert _tokens(wide.sample(range(4), 8)) == _tokens(narrow.sample(range(4), 8))


def test_rewards_are_the_environments(models: Path, tmp_path: Path) -> None:
    pair = Pair(sort_spec(groups=2, group_size=4), models, tmp_path)
    pair.publish()
    records = pair.sample([5, 6], 4)
    rewards = pair.rewards(records)
    for record in records:
        assert rewards[record.trajectory].value == pair.environment.score(record.prompt, record.text)
        assert rewards[record.trajectory].judge == "characters/1"


def test_measures_need_pairs() -> None:
    with pytest.raises(ValueError, match="no tokens"):
        gap([], [])
    with pytest.raises(ValueError, match="2, 1 and 1 tokens"):
        gap([[-1.0, -2.0]], [[-1.0]])
    found = gap([[-1.0, -2.0]], [[-1.0, -2.5]])
    assert (found.tokens, found.mean, found.max, found.exact) == (2, 0.25, 0.5, 0.5)
