"""The command, as a process: what it prints, writes and returns."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from climbs import MODELS
from defects import DEFECTS

from syncline.contract.job import JobSpec


def validate(*arguments: str, spec: JobSpec | None = None) -> subprocess.CompletedProcess[str]:
    command = [str(Path(sys.executable).parent / "syncline"), "validate", *arguments]
    if spec is not None:
        command = [sys.executable, "-m", "syncline.lab.validate", "--models", str(MODELS), *arguments]
    given = None if spec is None else spec.canonical()
    return subprocess.run(command, input=given, capture_output=True, text=True, timeout=300, check=False)


def test_levels_are_told_and_every_figure_is_kept(tmp_path: Path) -> None:
    done = validate("int4_qat_w4a16", "--levels", "1-3", "--json", "--out", str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert [line[0] for line in done.stderr.splitlines()] == ["1", "2", "3"]
    report = json.loads(done.stdout)
    assert report == json.loads((tmp_path / "validation.json").read_text())
    assert all(check["source"] for result in report["results"] for check in result["checks"])
    assert "Every level that was climbed holds" in (tmp_path / "validation.html").read_text()


def test_a_failure_says_which_level_what_and_where_to_look(tmp_path: Path) -> None:
    from climbs import spec_of

    defect = next(d for d in DEFECTS if d.name == "no baseline stated")
    spec = defect.asked(spec_of(defect.recipe, defect.model))
    done = validate("--out", str(tmp_path), spec=spec)
    assert done.returncode == 1, done.stderr
    for words in ("level 1 fails", "expected.high", "symptom", "cause", "look at"):
        assert words in done.stdout
    assert "Level 1 fails" in (tmp_path / "validation.html").read_text()


def test_what_is_no_recipe_spec_or_level_is_named() -> None:
    assert "'mxfp5' is no recipe, file or job; recipes: bf16" in validate("mxfp5").stderr.replace("\n", " ")
    assert "there is no level" in validate("bf16", "--levels", "10").stderr
    assert "is no level" in validate("bf16", "--levels", "x").stderr
