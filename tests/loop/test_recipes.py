"""The shipped recipes as jobs: each trains, says what it really used, and takes its log-prob gap apart.

Short form: three updates of each in this process (`Pair`), and two recipes for a few updates through the services.
Long form: the files of `examples/recipes` as they are.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest
from guarantees import check, lags
from recipe_checks import SHOWN, SUM, band, bits_per_weight, judge_terms, judge_trace, moved_alone
from stack import ROOT, Stack

from syncline.contract.job import JobSpec
from syncline.contract.job_rules import problems
from syncline.contract.precision_trace import COMPONENTS, ComponentTrace
from syncline.contract.recipes import RECIPES
from syncline.contract.token_path import Trajectory
from syncline.lab.measure import behaviour, flat, gap
from syncline.lab.pair import Pair, one_thread
from syncline.numerics.mismatch import split, tail
from syncline.runtime.segment_probes import ProbedToken, probes_path, read_probes

FILES = {path.stem: path for path in sorted((ROOT / "examples" / "recipes").glob("*.toml"))}
MODELS = ROOT / "examples" / "models"
UPDATES, PROBED = 3, 4


def read(recipe: str) -> dict[str, Any]:
    return tomllib.loads(FILES[recipe].read_text())


def test_every_recipe_has_a_job_that_trains_long_enough() -> None:
    without = RECIPES.keys() - FILES.keys()
    assert without <= {"fp32"}, f"no example runs {sorted(without)}"
    for recipe, path in FILES.items():
        spec = JobSpec.model_validate(read(recipe))
        assert problems(spec) == []
        assert (spec.name.replace("-", "_"), spec.precision.recipe) == (recipe, recipe), path.name
        assert spec.schedule.updates >= 30
        assert path.read_text().startswith("# "), f"{path.name} says what the recipe is, and what to look at"


# ---- in this process -------------------------------------------------------------------------------------------
@pytest.mark.parametrize("recipe", FILES)
def test_a_few_updates_in_one_process(recipe: str, tmp_path: Path) -> None:
    one_thread()
    spec = JobSpec.model_validate(read(recipe) | {"batch": {"groups": 2, "group_size": 4}})
    pair = Pair(spec, MODELS, tmp_path)
    low, high = band(spec)
    before: list[Trajectory] = []
    for update in range(UPDATES):
        pair.publish()
        if not update:
            judge_bits(pair, converted(pair))  # later versions of an adapter leave the base out
        records = pair.sample(range(2 * update, 2 * update + 2), 4)
        if before:  # of the version before this one: a mismatch at this version, and staleness
            judge_split(pair, before, low, high, stale=True)
        mismatch = judge_split(pair, records, low, high, stale=False)
        if spec.contract().rollout.kv_cache != "wide":
            judge_context(pair, records, mismatch)
        trained = pair.train(records, pair.rewards(records))
        assert not trained.result.skipped
        before = records
    parts = (pair.rollout.trace("active"), *trained.result.trace, converted(pair))
    trace = {part.component: part for part in parts}
    judge_trace(spec, {name: trace[name] for name in COMPONENTS})


def converted(pair: Pair) -> ComponentTrace:
    """What sync wrote for the version that serves."""
    assert pair.record is not None
    assert pair.record.convert_trace is not None
    return pair.record.convert_trace


def judge_split(pair: Pair, records: list[Trajectory], low: float, high: float, *, stale: bool) -> float:
    """Mean |mismatch| of the records at the version that serves; what is left is staleness, if they are older."""
    trainer, rollout = pair.score_trainer(records), pair.score_rollout(records)
    parts = split(flat(trainer), flat(rollout), flat(behaviour(records)))
    assert float((parts.total_N - parts.mismatch_N - parts.staleness_N).abs().max()) <= SUM
    mismatch, staleness = tail(parts.mismatch_N).mean, tail(parts.staleness_N).mean
    assert low <= mismatch <= high
    assert staleness > 1e-3 if stale else staleness < 1e-3
    return mismatch


def with_wide_context(pair: Pair, records: list[Trajectory]) -> list[tuple[float, ...]]:
    """Rollout's log-probs of the records' tokens with a wide KV cache, whatever the contract's is."""
    scores = (
        pair.rollout.score(record.tokens, record.segments[0].end, buffer="active", kv="wide")
        for record in records
    )
    return [tuple(score.logprobs) for score in scores]


def judge_context(pair: Pair, records: list[Trajectory], mismatch: float) -> None:
    """The quantised context is a part of the mismatch: against the same weights with a wide one it shows alone."""
    quantised, wide = pair.score_rollout(records), with_wide_context(pair, records)
    context, weights = gap(quantised, wide).mean, gap(pair.score_trainer(records), wide).mean
    assert 1e-3 < context < 3 * mismatch
    assert weights > 1e-3, "the weights of rollout are quantised too, and that is another term"
    assert context != pytest.approx(mismatch, rel=1e-3)
    assert context != pytest.approx(weights, rel=1e-3)


def test_the_context_of_glm_has_its_effect_without_low_bit_weights_too(tmp_path: Path) -> None:
    """Weights wide and context E4M3: the whole mismatch is the context's. Where activations are codes, the job's own
    term is larger: a changed context rounds them anew."""
    one_thread()
    given = read("glm52") | {"batch": {"groups": 8, "group_size": 4}}
    both = Pair(JobSpec.model_validate(given), MODELS, tmp_path / "both")
    contract = {"name": "context", "rollout": {"kv_cache": "fp8_e4m3"}, "convert": {"tolerance": 0.25}}
    alone = Pair(
        JobSpec.model_validate(given | {"precision": {"custom": contract}}), MODELS, tmp_path / "alone"
    )
    for pair in (both, alone):
        pair.publish()
    records = both.sample(range(8), 4)
    trainer = alone.score_trainer(records)
    assert gap(trainer, with_wide_context(alone, records)).max < 1e-5
    context = gap(trainer, alone.score_rollout(records)).mean
    assert context > 1e-3
    term = gap(both.score_rollout(records), with_wide_context(both, records)).mean
    assert context < term < 10 * context


def judge_bits(pair: Pair, convert: ComponentTrace) -> None:
    shown = SHOWN[str(pair.spec.precision.recipe)]
    plan = msgspec.json.decode((pair.folder / "precision_plan.json").read_bytes())
    low = [e for e in plan["entries"] if e["family"]]
    weights = sum(e["shape"][0] * e["shape"][1] for e in low)
    if shown is None:
        assert weights == 0
        assert convert.bytes["artefact"] == convert.bytes["wide"]
    else:
        assert 4 < bits_per_weight(pair.spec, convert, weights) <= shown.bits


# ---- through the services --------------------------------------------------------------------------------------
@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("recipe", ["unified_fp8", "glm52"])
def test_a_few_updates_through_the_services(recipe: str, stack: Stack) -> None:
    changes: dict[str, Mapping[str, Any]] = {
        "batch": {"groups": 2, "group_size": 4},
        "diagnostics": {"trajectories": PROBED, "learn": 2},
    }
    given = read(recipe)
    given = given | changes | {"schedule": given["schedule"] | {"updates": 4}}
    job = stack.submit(given)
    assert stack.wait(job, 240)["state"] == "succeeded"
    judge_run(stack, job, JobSpec.model_validate(given))


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("recipe", FILES)
def test_the_whole_job(recipe: str, stack: Stack) -> None:
    spec = JobSpec.model_validate(read(recipe))
    done = stack.cli("run", str(FILES[recipe]), timeout=1100)
    assert done.returncode == 0, done.stdout + done.stderr
    job = json.loads(stack.cli("list", "--json").stdout)[0]["id"]
    judge_run(stack, job, spec)
    judge_learning(stack.summary(job))
    judge_terms(spec, stack.summary(job)["diagnostics"])


def judge_run(stack: Stack, job: str, spec: JobSpec) -> None:
    """Of a run of any length: the guarantees, trace, baseline, and a decomposition that sums."""
    folder, summary = stack.runs / job, stack.summary(job)
    check(folder, summary, spec.schedule.updates, spec.schedule.max_lag)
    told = stack.get(f"/v1/jobs/{job}/precision")
    trace = {part["component"]: msgspec.convert(part, ComponentTrace) for part in told["trace"]}
    judge_trace(spec, trace)
    assert moved_alone(trace) is (spec.contract().adapter is not None)
    assert told["traced_update"] == spec.schedule.updates
    assert (folder / "baseline.json").is_file()
    diagnostics = summary["diagnostics"]
    # a version that another overtakes before anybody serves it cannot be measured; the record says so
    assert diagnostics["updates"] >= spec.schedule.updates // 2
    rows = [row for rows in probed(folder, spec.schedule.updates) for row in rows]
    assert len(rows) == diagnostics["terms"]["mismatch"]["tokens"]
    for row in rows:
        assert row.total == pytest.approx(row.mismatch + row.staleness, abs=SUM)
        assert row.total == pytest.approx(row.trainer - row.behaviour, abs=SUM)
        assert (row.kv_cache is None) is (spec.contract().rollout.kv_cache == "wide")
    if spec.schedule.mode == "disjoint":
        assert max(lags(folder)) == 1
        old = [abs(row.staleness) for row in rows if row.lag == 1]
        assert sum(old) / len(old) > 0.01, "staleness is measured apart"
    text = stack.cli("precision", job).stdout
    assert all(name in text for name in COMPONENTS), text
    report = (folder / "report.html").read_text()
    assert all(use.encoded in report for part in trace.values() for use in part.uses)


def probed(folder: Path, updates: int) -> list[list[ProbedToken]]:
    """The decomposition of each measured update."""
    paths = [probes_path(folder / "segments", update) for update in range(1, updates + 1)]
    return [read_probes(path) for path in paths if path.is_file()]


def judge_learning(summary: Mapping[str, Any]) -> None:
    reward = summary["reward"]
    assert reward["last_fifth"] > reward["first_fifth"] + 0.2, reward
