"""Nothing from outside is ever unpickled: wherever a checkpoint, an export or a model is read, a pickle is refused.

The pickles here would create a file. It is never created; and no code of ours names an unpickler.
"""

from __future__ import annotations

import ast
import os
import pickle
from pathlib import Path

import msgspec
import pytest
from security_world import Installation
from serving import SPEC, problem

from syncline.contract.job import ModelSpec
from syncline.contract.version_path import BadManifest, VersionId
from syncline.exporting.held import CannotExport, read_checkpoint
from syncline.gateway import precision_plan
from syncline.reference.model import load_model
from syncline.runtime import segments
from syncline.runtime.messages import BadMessage, unpack
from syncline.runtime.segments import BadSegment
from syncline.runtime.store import BlobStore
from syncline.trainer.checkpoint import Checkpoints

ROOT = Path(__file__).resolve().parents[2]
PORTIONS = ("services", "rollout_svc", "trainer_svc", "sync_svc", "scheduler", "lab")
UNPICKLERS = {"pickle", "dill", "joblib", "shelve", "marshal", "cloudpickle"}
WRITES_ONE = {
    "rollout_svc/syncline/rollout/engines/sglang/buckets.py"
}  # the wire form of SGLang's own server


class _Trap:
    """Whoever unpickles it makes a file."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (str(self.mark),)


@pytest.fixture
def mark(tmp_path: Path) -> Path:
    return tmp_path / "it-was-unpickled"


@pytest.fixture
def trap(mark: Path) -> bytes:
    made = pickle.dumps(_Trap(mark))
    pickle.loads(made)  # noqa: S301 - it works
    mark.rmdir()
    return made


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "model.safetensors"])
def test_a_models_pickle_is_not_loaded(tmp_path: Path, trap: bytes, mark: Path, name: str) -> None:
    """Not as what it is, nor under the name of what it is not."""
    folder = tmp_path / "models" / "tiny"
    folder.mkdir(parents=True)
    for config in ("config.json", "tokenizer.json"):
        source = ROOT / "examples" / "models" / "tiny-dense" / config
        if source.exists():
            (folder / config).write_bytes(source.read_bytes())
    (folder / name).write_bytes(trap)
    with pytest.raises((OSError, ValueError)):
        load_model(tmp_path / "models", ModelSpec(name="tiny", weights="pretrained"), 0)
    assert not mark.exists()


def test_a_job_on_a_pickled_model_is_refused(apart: Installation, trap: bytes, mark: Path) -> None:
    model = {"name": "pickled", "weights": "pretrained"}
    folder = apart.settings.models / "pickled"
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text("{}")
    (folder / "pytorch_model.bin").write_bytes(trap)
    refused = apart.ask("operator", "POST", "/v1/jobs", json={**SPEC, "model": model})
    assert problem(refused, 422)["errors"][0]["path"] == "model.weights"
    (folder / "model.safetensors").write_bytes(trap)
    refused = apart.ask("operator", "POST", "/v1/jobs", json={**SPEC, "model": model})
    assert problem(refused, 422)["errors"][0]["path"] == "model.name"
    with pytest.raises(precision_plan.BadHeader):
        precision_plan.header_shapes(folder)
    assert not mark.exists()


def test_a_pickle_as_a_body_is_no_spec(house: Installation, trap: bytes, mark: Path) -> None:
    for kind in ("application/json", "application/toml"):
        problem(house.ask("operator", "POST", "/v1/jobs", content=trap, headers={"content-type": kind}), 422)
    for kind in ("application/octet-stream", "application/x-pickle", "application/python-pickle"):
        problem(house.ask("operator", "POST", "/v1/jobs", content=trap, headers={"content-type": kind}), 415)
    assert not mark.exists()


def test_a_pickled_checkpoint_is_none(tmp_path: Path, trap: bytes, mark: Path) -> None:
    folder = tmp_path / "checkpoints" / "update-000001"
    folder.mkdir(parents=True)
    for name in ("model.safetensors", "optimizer.safetensors", "MANIFEST.json"):
        (folder / name).write_bytes(trap)
    with pytest.raises(CannotExport):
        read_checkpoint(folder)
    found = Checkpoints(tmp_path / "checkpoints", "j0123456789", "s", "c", keep=2).newest()
    assert found.path is None
    assert not mark.exists()


def test_pickled_manifests_segments_and_messages_are_refused(tmp_path: Path, trap: bytes, mark: Path) -> None:
    store = BlobStore(tmp_path / "store")
    (tmp_path / "store" / "manifests").mkdir(parents=True, exist_ok=True)
    (tmp_path / "store" / "manifests" / "0.1.json").write_bytes(trap)
    with pytest.raises(BadManifest):
        store.read_manifest(VersionId(0, 1))
    path = segments.segment_path(tmp_path / "segments", 1)
    path.parent.mkdir()
    path.write_bytes(trap)
    with pytest.raises(BadSegment):
        segments.read(path)
    with pytest.raises(BadMessage):
        unpack(trap, msgspec.Struct)
    assert not mark.exists()


def test_no_source_names_an_unpickler() -> None:
    """`torch.load`, `pickle.load`, `dill`, `joblib`, `numpy.load(allow_pickle=True)`, `shelve`, `marshal`."""
    found = []
    for portion in PORTIONS:
        for file in (ROOT / portion).rglob("*.py"):
            name = file.relative_to(ROOT).as_posix()
            for node in ast.walk(ast.parse(file.read_text())):
                found += [
                    f"{name}: {told}"
                    for told in _unpickles(node, {"pickle"} if name in WRITES_ONE else set())
                ]
    assert found == []


def _unpickles(node: ast.AST, allowed: set[str]) -> list[str]:
    if isinstance(node, ast.Import):
        return sorted({alias.name.split(".")[0] for alias in node.names} & UNPICKLERS - allowed)
    if isinstance(node, ast.ImportFrom):
        return sorted({(node.module or "").split(".")[0]} & UNPICKLERS - allowed)
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
        return []
    owner = node.func.value.id if isinstance(node.func.value, ast.Name) else ""
    loads = {("torch", "load"), ("pickle", "load"), ("pickle", "loads")}
    found = [f"{owner}.{node.func.attr}"] if (owner, node.func.attr) in loads else []
    return found + ["allow_pickle" for keyword in node.keywords if keyword.arg == "allow_pickle"]
