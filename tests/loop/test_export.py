"""`syncline export` of real jobs: what comes down scores a fixed prefix exactly as the trainer did."""

from __future__ import annotations

import json
from array import array
from pathlib import Path
from typing import Any

import pytest
import torch
from specs import spec
from stack import Stack

from syncline.contract.job import JobSpec
from syncline.trainer.engine import Sample
from syncline.trainer.engines.torch import TorchEngine

IDS = [1, *range(10, 40), 5, 7, 9]
FIRST = 4


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_an_exported_version_scores_as_its_trainer(stack: Stack, tmp_path: Path) -> None:
    small: dict[str, Any] = {
        "rollout": {"workers": 1},
        "checkpoint": {"every": 2},
        "retention": {"versions": 2},
    }
    job = stack.submit(spec(model={"name": "tiny-moe"}, schedule={"updates": 4}, **small))
    assert stack.wait(job, 300)["state"] == "succeeded"

    out = tmp_path / "model"
    done = stack.cli("export", job, "--output", str(out), "--json")
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert (told["version"], told["format"], told["origin"]) == ("0.4", "hf", "version")
    assert plain(out) == by_trainer(stack, job, 4, tmp_path)
    assert not (stack.runs / job / "exports" / "0.4-hf").exists(), "what was fetched is not kept twice"

    card = (out / "README.md").read_text()
    assert "| 0.4 | 0.3 | 4 |" in card, "the lineage"
    assert "w0: verified, canary gap" in card
    assert "| reward |" in card
    assert "No evaluation of this version is recorded." in card
    for canary in json.loads((out / "scores.json").read_text()):
        found = plain(out, canary["tokens"], canary["prompt"])
        # the trainer scored all prefixes in one batch, which may add up in another order
        assert found == pytest.approx(canary["logprobs"], abs=2e-6)

    again = stack.cli("export", job, "--output", str(out))
    assert again.returncode == 2
    assert "is there already" in again.stderr
    gone = stack.cli("export", job, "--version", "1", "--output", str(tmp_path / "gone"))
    assert gone.returncode == 2
    assert "versions in the store: 0.3, 0.4; checkpoints: 0.2, 0.4" in gone.stderr
    assert not (tmp_path / "gone").exists()
    early = tmp_path / "early"
    assert stack.cli("export", job, "--version", "2", "--output", str(early)).returncode == 0
    assert plain(early) == by_trainer(stack, job, 2, tmp_path)
    assert plain(early) != plain(out)


def by_trainer(stack: Stack, job: str, update: int, scratch: Path) -> list[float]:
    """The trainer's own score of `IDS` with the weights of a checkpoint."""
    run = stack.runs / job
    made = JobSpec.model_validate_json((run / "spec.json").read_bytes())
    engine = TorchEngine(made, Path(stack.env["SYNCLINE_MODELS"]), scratch / "scratch")
    engine.wake()
    engine.load(run / "checkpoints" / f"update-{update:06d}")
    count = len(IDS) - FIRST
    sample = Sample(
        trajectory="asked",
        tokens=array("i", IDS),
        positions=array("i", range(FIRST, len(IDS))),
        behaviour=array("f", [0.0] * count),
        loss_mask=bytes(count),
        advantage=0.0,
        temperature=1.0,
    )
    return list(engine.score([sample])[0])


@torch.no_grad()
def plain(folder: Path, ids: list[int] = IDS, first: int = FIRST) -> list[float]:
    """By plain transformers, from the folder alone."""
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    logits_TV = model.eval()(torch.tensor([ids[:-1]])).logits[0]
    scores_TV = torch.log_softmax(logits_TV, dim=-1)
    return [float(scores_TV[p - 1, ids[p]]) for p in range(first, len(ids))]
