"""Level 6 of a version's own bytes: a clean one holds; a defect of live updates and a foreign version are found."""

from __future__ import annotations

from pathlib import Path

import pytest
from climbs import MODELS, RECIPES, spec_of
from defects import DEFECTS, Defect
from msgspec.structs import replace

from syncline.contract.job import JobSpec
from syncline.contract.validation import Result
from syncline.contract.version_path import Canary
from syncline.lab.ladder.climb import result_of
from syncline.lab.ladder.subject import learn, small
from syncline.lab.ladder.version_level import Home, Version, checks
from syncline.lab.pair import JOB, KEY, Pair, one_thread
from syncline.rollout.engines.reference import ReferenceEngine

QUICK = {"bf16 tiny-dense"}
CAUGHT = ("one fused tensor of the version before",)


class Course:
    """A job of the ladder's whose versions are proved one after another, as the validator does."""

    def __init__(self, spec: JobSpec, folder: Path) -> None:
        one_thread()
        self.pair = Pair(small(spec), MODELS, folder / "pair")
        self.home = Home(JOB, KEY, self.pair.spec, MODELS)
        self.warm: ReferenceEngine = self.home.engine()
        self._folder = folder

    def next(self) -> Version:
        """The next version with the trainer's own scores of fixed prefixes."""
        pair = self.pair
        if pair.version is not None:
            learn(pair, pair.sample(range(4), 2))
        manifest = pair.publish()
        records = pair.sample(range(8, 10))
        scores = pair.score_trainer(records, as_rollout=True)
        canaries = [
            Canary(tokens=tuple(r.tokens), prompt=r.segments[0].end, logprobs=tuple(s))
            for r, s in zip(records, scores, strict=True)
        ]
        signed = pair.store.read_manifest(manifest.version)
        return Version(signed, manifest.digest(), canaries, pair.contract.convert.tolerance, pair.store)

    def prove(self, version: Version) -> Result:
        scratch = self._folder / f"level-{self.pair.updates}"
        scratch.mkdir()
        return result_of(6, lambda: checks(version, self.home, self.warm, scratch))


def story(result: Result) -> str:
    return result.broke or "; ".join(
        f"{c.name}: {c.found:g} over {c.bound:g} {c.where}" for c in result.failed
    )


@pytest.mark.parametrize(
    ("recipe", "model"),
    [pytest.param(*pair, marks=[] if " ".join(pair) in QUICK else pytest.mark.long) for pair in RECIPES],
)
def test_versions_of_a_clean_system_hold_in_turn(recipe: str, model: str, tmp_path: Path) -> None:
    course = Course(spec_of(recipe, model), tmp_path)
    for _ in range(3):
        result = course.prove(course.next())
        assert result.holds, story(result)


@pytest.mark.parametrize(
    "defect",
    [
        pytest.param(d, marks=[] if d.name in CAUGHT else pytest.mark.long, id=d.name)
        for d in DEFECTS
        if d.level == 6
    ],
)
def test_a_defect_of_live_updates_is_found_in_a_version(defect: Defect, tmp_path: Path) -> None:
    course = Course(defect.asked(spec_of(defect.recipe, defect.model)), tmp_path)
    with defect.broken():
        results = [course.prove(course.next()) for _ in range(3)]
    assert not all(result.holds for result in results)


def test_a_version_that_is_another_or_has_no_scores_does_not_hold(tmp_path: Path) -> None:
    course = Course(spec_of("bf16", "tiny-dense"), tmp_path)
    first, second = course.next(), course.next()
    mixed = second._replace(digest=first.digest, canaries=())
    result = course.prove(mixed)
    assert {check.name for check in result.failed} == {
        "the manifest is the version's",
        "scores are those that the trainer minted",
    }, story(result)
    third = course.next()
    moved = [replace(c, logprobs=tuple(p - 0.5 for p in c.logprobs)) for c in third.canaries]
    result = course.prove(third._replace(canaries=moved))
    assert [check.name for check in result.failed] == ["scores are those that the trainer minted"], story(
        result
    )
