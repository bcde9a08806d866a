"""What a climb leaves on disk: a file of figures for each level, the report as JSON and as one HTML page.

Beside each figure stands what the newest earlier climb found that held with the same contract and model: a baseline
that is stable and not zero is no failure, and whoever sees a bound broken sees what is normal.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator, Mapping
from pathlib import Path

import msgspec
import torch
import transformers

from syncline.contract.job import JobSpec
from syncline.contract.validation import EVIDENCE, PAGE, REPORT, Level, Report, Result
from syncline.lab.ladder.page import page
from syncline.runtime.durable import write_whole

Baselines = Mapping[tuple[Level, str], float]
"""(level, name of a check) -> what it found when it held."""


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """`evidence/level-N.json`: what was measured, on what, with what."""

    result: Result
    recipe: str
    model: str
    contract: str
    spec: str  # hash of the resolved spec
    seeds: dict[str, int]
    environment: dict[str, str | int]


def baselines_of(report: Report) -> Baselines:
    """What each check of a climb that held has found."""
    return {(result.level, check.name): check.found for result in report.results for check in result.checks}


def earlier(reports: Iterator[Report], spec: JobSpec) -> Baselines:
    """Baselines of the first of `reports` (newest first) that held with the contract and model of `spec`."""
    contract = spec.contract_digest()
    for report in reports:
        alike = (report.contract, report.model) == (contract, spec.model.name)
        if alike and report.failed_at is None:
            return baselines_of(report)
    return {}


class Evidence:
    """Writes into `folder`, which is there."""

    def __init__(self, folder: Path, spec: JobSpec, baselines: Baselines) -> None:
        self._folder, self._spec, self._baselines = folder, spec, baselines
        self._noted: dict[Level, Result] = {}
        (folder / EVIDENCE).mkdir(exist_ok=True)

    def note(self, result: Result) -> Result:
        """A level that has ended, with its baselines and its file."""
        name = f"{EVIDENCE}/level-{result.level}.json"
        checks = tuple(
            msgspec.structs.replace(check, baseline=self._baselines.get((result.level, check.name)))
            for check in result.checks
        )
        noted = msgspec.structs.replace(result, checks=checks, evidence=name)
        spec = self._spec
        figures = Figures(
            result=noted,
            recipe=spec.precision.recipe or "custom",
            model=spec.model.name,
            contract=spec.contract_digest(),
            spec=spec.hash(),
            seeds=spec.seeds.model_dump(),
            environment=_environment(),
        )
        write_whole(self._folder / name, msgspec.json.format(msgspec.json.encode(figures), indent=1))
        self._noted[result.level] = noted
        return noted

    def finish(self, report: Report) -> tuple[Report, bytes]:
        """The report with what `note` added to its levels, and as it lies on disk. The page is written before it."""
        results = tuple(self._noted.get(result.level, result) for result in report.results)
        whole = msgspec.structs.replace(report, results=results)
        encoded = msgspec.json.format(msgspec.json.encode(whole), indent=2)
        write_whole(self._folder / PAGE, page(whole).encode())
        write_whole(self._folder / REPORT, encoded)
        return whole, encoded


def _environment() -> dict[str, str | int]:
    return {
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "transformers": transformers.__version__,
        "machine": platform.machine(),
        "threads": torch.get_num_threads(),
        "cores": os.cpu_count() or 0,
    }
