"""What the report shows of prompts: a table by data set. Pure."""

from __future__ import annotations

from syncline.contract.drawn import PromptAccount
from syncline.gateway import report_charts as charts

HEADINGS = (
    "data set",
    "epoch",
    "drawn",
    "trained",
    "filtered",
    "failed, expired",
    "drawn again, given up",
    "rested",
    "left over",
    "reward, newest",
)


def rows(account: PromptAccount) -> list[list[str]]:
    """One row per data set, under `HEADINGS`."""
    return [
        [
            one.name,
            str(one.epoch),
            str(one.drawn),
            str(one.trained),
            "; ".join(f"{reason}: {groups}" for reason, groups in sorted(one.filtered.items())) or "none",
            f"{one.failed}, {one.expired}",
            f"{one.again}, {one.given_up}",
            str(one.rested),
            str(one.unused + one.open),
            f"{_shown(one.reward)}, {_shown(one.recent_reward)}",
        ]
        for one in account.sources
    ]


def _shown(value: float | None) -> str:
    return "–" if value is None else charts.number(value)
