"""A checkpoint is whole or it is not one, wherever the save was killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from syncline.contract.version_path import VersionId
from syncline.trainer.checkpoint import Checkpoints, WrongCheckpoint, next_epoch


def store(folder: Path, keep: int = 2, spec: str = "spec", contract: str = "contract") -> Checkpoints:
    return Checkpoints(folder, "j1", spec, contract, keep)


def writer(content: bytes) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        (folder / "weights.safetensors").write_bytes(content)
        (folder / "optimizer.safetensors").write_bytes(content * 2)

    return write


def save(checkpoints: Checkpoints, update: int, content: bytes | None = None) -> Path:
    body = str(update).encode() if content is None else content
    return checkpoints.save(writer(body), VersionId(0, update), "torch", update - 1, f"{update}-0")


def test_what_was_saved_is_found_with_everything_it_commits(tmp_path: Path) -> None:
    checkpoints = store(tmp_path)
    assert checkpoints.newest().path is None
    path = save(checkpoints, 3)
    found = store(tmp_path).newest()
    assert found.path == path
    assert found.skipped == {}
    manifest = found.manifest
    assert manifest is not None
    assert (manifest.version, manifest.next_update, manifest.since, manifest.cursor) == (
        VersionId(0, 3),
        4,
        2,
        "3-0",
    )
    assert (manifest.spec_hash, manifest.contract, manifest.engine) == ("spec", "contract", "torch")
    assert set(manifest.files) == {"weights.safetensors", "optimizer.safetensors"}


KILLED = """
import os, signal, sys
from pathlib import Path
sys.path[:0] = [sys.argv[3]]
import syncline.runtime.durable as durable
import syncline.trainer.checkpoint as checkpoint
from test_checkpoint import save, store
folder, point = Path(sys.argv[1]), int(sys.argv[2])
left = point
def counted(real):
    def call(*args, **kwargs):
        global left
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        left -= 1
        return real(*args, **kwargs)
    return call
# every step that reaches the disk is a place to die before
for module, names in ((checkpoint, ("sync_file", "sync_folder", "write_whole")), (durable, ("sync_folder",))):
    for name in names:
        setattr(module, name, counted(getattr(module, name)))
Path.rename = counted(Path.rename)
Path.replace = counted(Path.replace)
Path.write_bytes = counted(Path.write_bytes)
save(store(folder), 2)
print("whole")
"""


def test_a_kill_at_any_point_of_the_save_leaves_the_last_one_standing(tmp_path: Path) -> None:
    here = str(Path(__file__).parent)
    ended = []
    for point in range(30):
        folder = tmp_path / str(point)
        first = save(store(folder), 1)
        done = subprocess.run(
            [sys.executable, "-c", KILLED, str(folder), str(point), here],
            capture_output=True,
            text=True,
            timeout=60,
            env={**os.environ, "PYTHONPATH": here},
        )
        found = store(folder).newest()
        assert found.path is not None
        assert found.path.name in ("update-000001", "update-000002")
        save(store(folder), 2)
        again = store(folder).newest().path
        assert again is not None
        assert again.name == "update-000002"
        assert first.is_dir()
        if done.returncode == 0:
            ended.append(point)
            break
        assert done.returncode == -signal.SIGKILL, done.stderr
    assert ended, "the save never came to its end"
    assert ended[0] >= 5, "five points of the save at least"


@pytest.mark.parametrize("harm", ["cut", "gone", "flipped", "no manifest", "bad manifest"])
def test_a_broken_one_is_passed_over_with_the_reason(tmp_path: Path, harm: str) -> None:
    checkpoints = store(tmp_path)
    save(checkpoints, 1)
    broken = save(checkpoints, 2, b"0123456789")
    shard = broken / "optimizer.safetensors"
    match harm:
        case "cut":
            shard.write_bytes(shard.read_bytes()[:-3])
        case "gone":
            shard.unlink()
        case "flipped":
            shard.write_bytes(b"x" + shard.read_bytes()[1:])
        case "no manifest":
            (broken / "MANIFEST.json").unlink()
        case "bad manifest":
            (broken / "MANIFEST.json").write_text('{"job": "j1"')
    found = store(tmp_path).newest()
    assert found.path is not None
    assert found.path.name == "update-000001"
    assert list(found.skipped) == ["update-000002"]
    expected = "MANIFEST.json" if "manifest" in harm else "optimizer.safetensors"
    assert expected in found.skipped["update-000002"]


def test_pruning_keeps_whole_ones_and_never_the_broken_in_their_place(tmp_path: Path) -> None:
    checkpoints = store(tmp_path, keep=2)
    for update in (1, 2, 3):
        save(checkpoints, update)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["update-000002", "update-000003"]
    (tmp_path / "update-000003" / "weights.safetensors").write_bytes(b"broken")
    save(checkpoints, 4)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["update-000002", "update-000003", "update-000004"]
    assert store(tmp_path, keep=1).newest().manifest is not None


def test_another_spec_or_contract_is_refused(tmp_path: Path) -> None:
    save(store(tmp_path), 1)
    with pytest.raises(WrongCheckpoint, match="belongs to spec"):
        store(tmp_path, spec="other").newest()
    with pytest.raises(WrongCheckpoint, match="belongs to precision contract"):
        store(tmp_path, contract="other").newest()


def test_a_full_disk_leaves_the_last_one_standing(tmp_path: Path) -> None:
    checkpoints = store(tmp_path)
    save(checkpoints, 1)

    def full(folder: Path) -> None:
        (folder / "weights.safetensors").write_bytes(b"half")
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space"):
        checkpoints.save(full, VersionId(0, 2), "torch", 1, "0")
    found = store(tmp_path).newest()
    assert found.path is not None
    assert found.path.name == "update-000001"


def test_an_epoch_is_never_taken_twice(tmp_path: Path) -> None:
    assert [next_epoch(tmp_path, -1) for _ in range(3)] == [0, 1, 2]
    assert next_epoch(tmp_path, 7) == 8
    assert next_epoch(tmp_path, -1) == 9
    assert msgspec.json.decode((tmp_path / "epoch.json").read_bytes()) == {"epoch": 9}
