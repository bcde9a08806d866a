"""What the report shows of evaluations: points beside the reward curve, and a table. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from syncline.contract.evaluation import Evaluation
from syncline.gateway import report_charts as charts

HEADINGS = ("version", "prompts × samples", "counted", "reward", "pass@k, 95 % interval", "not counted", "by")


def newest(evaluations: Sequence[Evaluation]) -> list[Evaluation]:
    """The last evaluation of each version number, of its highest epoch, in order."""
    found: dict[int, Evaluation] = {}
    for one in evaluations:
        known = found.get(one.version)
        if known is None or one.epoch >= known.epoch:
            found[one.version] = one
    return [found[version] for version in sorted(found)]


def lines(evaluations: Sequence[Evaluation]) -> list[charts.Line]:
    """Held-out reward and the smallest k's pass@k by version, each with its interval; empty: nothing was evaluated."""
    shown = newest(evaluations)
    if not shown:
        return []
    k = min((k for one in shown for k in one.pass_at), key=int)
    rates = [(float(one.version), one.pass_at.get(k)) for one in shown]
    rewards = [(float(one.version), one.mean_reward) for one in shown]
    spreads = [(float(one.version), *one.reward_interval) for one in shown if one.reward_interval is not None]
    return [
        charts.Line(label="held out, mean", style="c", points=rewards, ranges=spreads),
        charts.Line(
            label=f"held out, pass@{k}",
            style="b",
            points=[(x, None if rate is None else rate[0]) for x, rate in rates],
            ranges=[(x, rate[1], rate[2]) for x, rate in rates if rate is not None],
        ),
    ]


def rows(evaluations: Sequence[Evaluation]) -> list[list[str]]:
    """One row per evaluation, under `HEADINGS`."""
    return [
        [
            str(one.id),
            f"{one.prompts} × {one.samples}",
            str(one.counted),
            "–" if one.mean_reward is None else charts.number(one.mean_reward),
            "; ".join(_rate(k, one) for k in sorted(one.pass_at, key=int)),
            _not_counted(one),
            one.job,
        ]
        for one in evaluations
    ]


def _rate(k: str, one: Evaluation) -> str:
    rate = one.pass_at[k]
    if rate is None:
        return f"pass@{k} –"
    short = one.pass_prompts.get(k, one.prompts)
    over = "" if short == one.prompts else f" over {short} prompts"
    return f"pass@{k} {rate[0]:.3f} [{rate[1]:.3f}, {rate[2]:.3f}]{over}"


def _not_counted(one: Evaluation) -> str:
    kinds = {"unscored": one.unscored, "lost": one.lost, "of another version": one.foreign}
    return ", ".join(f"{count} {kind}" for kind, count in kinds.items() if count) or "none"
