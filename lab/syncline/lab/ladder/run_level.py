"""Level 8: a bounded RL run. A few updates with the job's own loss, in lock-step, every figure inside a stated bound.

Where mismatch, staleness and learning act together; whatever one of them does alone was found on an earlier level.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import mean, median

from syncline.lab.ladder.records import Check, same
from syncline.lab.ladder.state_level import order_of
from syncline.lab.ladder.subject import Subject, bounded
from syncline.lab.measure import behaviour, flat
from syncline.lab.pair import Pair, Trained

UPDATES = 12
LEFT = 0.2
"""Share of the first update's entropy that the last must have left: below it sampling explores nothing."""
SPIKE = 20.0
"""Times the median gradient norm of the run."""
RATIO = 0.1
"""Of the mean probability ratio from 1, above what the contract expects of a token."""
WORSE = 0.25
"""Of the reward's range: how far the last third may lie below the first by chance, with few samples."""
ROUTES = 0.5
"""Share of tokens whose free experts agree in every layer, under the trainer's own numerics."""


def checks(subject: Subject) -> Iterator[Check]:
    """One run from the job's own weights."""
    pair = Pair(bounded(subject.given), subject.models, subject.new_folder("run"))
    spec, updates = pair.spec, []
    ages: list[int] = []
    for update in range(UPDATES):
        pair.publish()
        first = update * spec.batch.groups
        records = pair.sample(range(first, first + spec.batch.groups), spec.batch.group_size)
        ages += [update - span.version.number for record in records for span in record.spans]
        updates.append(pair.train(records, pair.rewards(records)))
    trained = [one for one in updates if not one.result.skipped]
    skipped = [
        f"update {n + 1}: {', '.join(u.result.non_finite)}" for n, u in enumerate(updates) if u.result.skipped
    ]
    yield same("no update was skipped", skipped, "finite losses and gradients")
    yield _most("version age", max(map(abs, ages)), spec.schedule.max_lag, "schedule.max_lag", "updates")
    yield from _learning(trained)
    yield from _mismatch(subject, trained)


def _most(name: str, found: float, bound: float, source: str, unit: str = "") -> Check:
    return Check(name=name, found=found, bound=bound, source=source, unit=unit)


def _learning(trained: Sequence[Trained]) -> Iterator[Check]:
    entropy = [one.result.tally.entropy / max(one.result.tally.tokens, 1) for one in trained]
    norms = [one.result.grad_norm for one in trained if one.result.grad_norm is not None]
    rewards = [
        mean(row.reward.value for row in one.rows if row.reward is not None and row.reward.value is not None)
        for one in trained
    ]
    third = max(len(rewards) // 3, 1)
    spread = max(rewards) - min(rewards)
    fall = mean(rewards[:third]) - mean(rewards[-third:])
    yield _most(
        "entropy lost", 1 - entropy[-1] / entropy[0], 1 - LEFT, f"{LEFT:g} of the first is left", "share"
    )
    yield _most("largest gradient norm", max(norms), SPIKE * median(norms), f"{SPIKE:g} times the median")
    yield _most("reward lost", fall, max(WORSE, spread / 2), "chance, with few samples")


def _mismatch(subject: Subject, trained: Sequence[Trained]) -> Iterator[Check]:
    contract = subject.contract
    high = contract.expected.high if contract.families or contract.rollout.kv_cache != "wide" else None
    gaps, ratios = [], []
    for one in trained:
        own = flat(one.result.logprobs)
        told = flat(behaviour([row.trajectory for row in one.rows]))
        gaps.append(mean(abs(a - b) for a, b in zip(own, told, strict=True)))
        ratios.append(abs(one.result.tally.ratio / max(one.result.tally.tokens, 1) - 1))
    order, source = order_of(subject)
    bound = order if high is None else max(high, order)
    source = source if high is None or order > high else "expected.high of the contract"
    yield _most("same-version gap of the worst update", max(gaps), bound, source, "nats, mean")
    yield _most("mean probability ratio from 1", max(ratios), RATIO + bound, "on-policy, at lag 0")
    counts = [one.result.routes for one in trained if one.result.routes is not None]
    if counts:
        worst = min(min(c.agreement) for c in counts)
        yield _most(
            "experts that differ", 1 - worst, 1 - ROUTES, "free choice beside rollout's", "share of tokens"
        )
