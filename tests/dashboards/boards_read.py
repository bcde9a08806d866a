"""The chart's dashboards as the tests read them: panels, queries, and what `$...` stands for."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "helm" / "syncline" / "dashboards"
MAKE = ROOT / "helm" / "dashboards" / "make.py"


@dataclass(frozen=True)
class Asked:
    """One query of one panel. `kind`: prometheus or tempo."""

    board: str
    panel: str
    kind: str
    text: str

    def __str__(self) -> str:
        return f"{self.board}: {self.panel}"

    def filled(self, job: str, interval: str, span: str, trajectory: str = "") -> str:
        """The text with Grafana's variables replaced as Grafana does it."""
        stands = {"job_id": job, "trajectory": trajectory, "__rate_interval": interval, "__range": span}
        return re.sub(r"\$(\w+)", lambda found: stands[found[1]], self.text)


@cache
def boards() -> dict[str, dict[str, Any]]:
    """File name -> dashboard."""
    return {path.stem: json.loads(path.read_text()) for path in sorted(FOLDER.glob("*.json"))}


def queries(kind: str) -> Iterator[Asked]:
    """Every query of this kind of data source."""
    for name, board in boards().items():
        for panel in board["panels"]:
            for target in panel["targets"]:
                found = target["datasource"]["type"]
                if found == kind:
                    yield Asked(
                        name, panel["title"], kind, target["expr" if kind == "prometheus" else "query"]
                    )
