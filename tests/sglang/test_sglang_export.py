"""Exports in a real server: it starts from the folder that `syncline export` wrote, and scores what the version is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from conformance import lowbit
from conformance.forge import JOB, KEY, MODELS, Forge, checkpoint, cold_logprobs, gap, plain
from fleet import PYTHON
from test_sglang_precision import CLOSE, IDS, blocks, weights_alone
from transformers import AutoModelForCausalLM

from syncline.contract.exported import ExportFormat, ExportRequest, Story
from syncline.contract.job import JobSpec, ModelSpec
from syncline.contract.version_path import VersionId
from syncline.exporting.export import export
from syncline.rollout.engines.sglang.client import Server
from syncline.rollout.engines.sglang.launch import ServerProcess
from syncline.rollout.engines.sglang.model import Model

NUMBER = 3


class FromExport(ServerProcess):
    """A server that loads the weights in the folder, as one who was given it would start it."""

    def _command(self, port: int) -> list[str]:
        command = super()._command(port)
        at = command.index("--load-format")
        return command[:at] + command[at + 2 :]


def exported(root: Path, model: Path, recipe: str, format: ExportFormat) -> tuple[Path, JobSpec]:
    """Version 0.3 of a job of `model` as an export."""
    spec = JobSpec.model_validate(
        {"name": "t", "model": {"name": model.name}, "precision": {"recipe": recipe}}
    )
    folder = root / JOB
    folder.mkdir()
    (folder / "key").write_bytes(KEY)
    Forge(folder, model, contract=spec.contract()).version(NUMBER)
    request = ExportRequest(
        job=JOB,
        version=VersionId(0, NUMBER),
        format=format,
        origin="version",
        story=Story(name="t", spec=spec.model_dump(mode="json"), state="succeeded"),
        shard_bytes=100_000,  # several files with an index
    )
    return export(request, folder, model.parent, lambda done, total: None), spec


def score(server: Server) -> list[float]:
    """Log-probs of IDS[2:] by a prefill."""
    body: dict[str, Any] = {"input_ids": IDS, "sampling_params": {"max_new_tokens": 0, "temperature": 1.0}}
    body |= {"return_logprob": True, "logprob_start_len": 0}
    rows = server.generate(body)["meta_info"]["input_token_logprobs"]
    return [float(row[0]) for row in rows[2:]]


def served(root: Path, folder: Path, spec: JobSpec, models: Path) -> list[float]:
    model = Model(models, ModelSpec(name=spec.model.name), spec.contract())
    process = FromExport(PYTHON, model.launch, folder, root / "server.log")
    try:
        process.start()
        return score(process.wait())
    finally:
        process.stop()


@pytest.mark.timeout(900)
def test_a_bf16_export_is_what_the_server_and_transformers_load(tmp_path: Path) -> None:
    model = MODELS / "tiny-dense"
    folder, spec = exported(tmp_path, model, "bf16", "sglang")
    assert (folder / "model.safetensors.index.json").is_file()
    loaded: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    due = cold_logprobs(loaded.eval(), IDS, 2)
    assert due == cold_logprobs(plain(model, NUMBER), IDS, 2)
    assert gap(served(tmp_path, folder, spec, model.parent), due) < CLOSE


@pytest.mark.timeout(900)
def test_an_fp8_export_is_what_the_server_loads(tmp_path: Path) -> None:
    model = blocks(tmp_path, "tiny-moe")
    folder, spec = exported(tmp_path, model, "unified_fp8", "sglang")
    told = json.loads((folder / "config.json").read_text())["quantization_config"]
    assert (told["quant_method"], told["weight_block_size"]) == ("fp8", [128, 128])
    due = cold_logprobs(
        lowbit.cold(plain(model, NUMBER), checkpoint(model, NUMBER), weights_alone(spec.contract())), IDS, 2
    )
    found = served(tmp_path, folder, spec, model.parent)
    assert gap(found, due) < CLOSE
    assert gap(found, cold_logprobs(plain(model, NUMBER), IDS, 2)) > 10 * CLOSE, "nothing was quantised"
