"""`syncline precision`: of a recipe without anything running, of a job through the gateway."""

from __future__ import annotations

import json

import msgspec
import pytest
from command_line import Here
from typer.testing import CliRunner

from syncline.contract.job import JobSpec
from syncline.contract.plan import resolve
from syncline.contract.recipes import RECIPES
from syncline.scheduler.cli import app

JOB = "j00000000aa"


@pytest.mark.parametrize("name", sorted(RECIPES))
def test_a_recipe_is_told_with_what_it_compiles_to(name: str) -> None:
    said = CliRunner().invoke(app, ["precision", name, "--json"])
    assert said.exit_code == 0, said.output
    told = json.loads(said.stdout)
    assert told["digest"] == RECIPES[name].digest()
    assert list(told["components"]) == ["rollout", "fprop", "dgrad", "wgrad", "optimizer", "convert"]
    assert told["reference"]["kind"] == ("emulation" if RECIPES[name].families else "native")
    assert all("flags" in told[part] or told[part]["refused"] for part in ("sglang", "megatron"))


def test_a_recipe_on_hardware_that_cannot_run_it_says_why(here: Here) -> None:
    said = here.cli("precision", "mxfp8", "--hardware", "hopper").stdout
    assert "refused" in said
    assert "before Blackwell" in said
    assert "--fp8-recipe mxfp8" in said
    assert "hoper" in here.fails(2, "precision", "mxfp8", "--hardware", "hoper")


def test_a_name_that_is_no_recipe_lists_them(here: Here) -> None:
    said = " ".join(here.fails(2, "precision", "unifed_fp8").split())
    assert "there is no recipe 'unifed_fp8', and no job is called so" in said
    assert all(name in said for name in RECIPES)


def test_a_setting_that_does_not_exist_is_told_with_its_key() -> None:
    said = CliRunner().invoke(app, ["precision", "nvfp4_w4a4"]).stdout
    assert "refused: rollout.kernel" in said
    assert "refused: trainer.fprop" in said


def test_a_job_is_told_with_its_plan(here: Here) -> None:
    spec = JobSpec.model_validate(
        {"name": "told", "model": {"name": "tiny-dense"}, "precision": {"recipe": "int4_qat_w4a16"}}
    )
    folder = here.runs / JOB
    folder.mkdir(parents=True)
    (folder / "spec.json").write_text(spec.canonical())
    shapes = {f"model.layers.{i}.mlp.up_proj.weight": (32, 64) for i in range(2)} | {
        "model.norm.weight": (64,)
    }
    plan = resolve(RECIPES["int4_qat_w4a16"], shapes)
    (folder / "precision_plan.json").write_bytes(msgspec.json.encode(plan))
    said = here.cli("precision", JOB)
    assert said.returncode == 0, said.stderr
    assert f"plan resolved, digest {plan.digest()[:12]}" in said.stdout
    row = next(line for line in said.stdout.splitlines() if line.startswith("model.layers.*.mlp.up_proj"))
    assert row.split()[1:4] == ["2", "32x64", "int4"]
    assert "no update has told yet" in said.stdout
    told = json.loads(here.cli("precision", JOB, "--json").stdout)
    assert told["plan_digest"] == plan.digest()
