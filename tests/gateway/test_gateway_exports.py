"""Exports over REST: asked for, made by a process, fetched in ranges, taken away; and how a command fetches them."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import msgspec
import pytest
from conformance.forge import KEY, Forge
from exports_left import CONFIG, write_export
from serving import Server, problem
from waiting import wait_until

from syncline.contract.evaluation import Evaluation
from syncline.contract.streams import VERSIONS
from syncline.contract.version_path import VersionId, VersionRecord
from syncline.runtime.evaluations import keep
from syncline.scheduler.cli_session import Failure
from syncline.scheduler.client import Client
from syncline.scheduler.fetching import target_of

MODELS = Path(__file__).parents[2] / "examples" / "models"


@pytest.fixture
def real(another: Any) -> Server:
    """A gateway over the example models."""
    found: Server = another(models=MODELS)
    return found


def job_with_versions(server: Server) -> str:
    """A job of `tiny-dense` with versions 0.0 and 0.1 in its store, and an evaluation of the second."""
    job = server.submit(model={"name": "tiny-dense"})
    folder = server.settings.job_dir(job)
    forge = Forge(folder, MODELS / "tiny-dense", job=job)
    (folder / "key").write_bytes(KEY)
    digest = [forge.version(number) for number in (0, 1)][1]
    for number in (0, 1):
        told = VersionRecord(
            version=VersionId(0, number),
            parent=VersionId(0, 0) if number else None,
            optimizer_step=number,
            contract="",
            state="published",
            digest=hashlib.sha256(digest.manifest).hexdigest(),
        )
        server.bus.hset(VERSIONS.at(job), str(told.version), msgspec.json.encode(told))
    keep(folder, evaluation(job, hashlib.sha256(digest.manifest).hexdigest()))
    return job


def evaluation(job: str, digest: str) -> Evaluation:
    return Evaluation(
        job=job,
        of=job,
        version=1,
        epoch=0,
        digest=digest,
        contract="c",
        model="tiny-dense",
        prompts=64,
        samples=4,
        first=1000,
        seed=3,
        counted=250,
        correct=125,
        threshold=1.0,
        mean_reward=0.4321,
        reward_interval=(0.4, 0.45),
        pass_at={"1": (0.5, 0.45, 0.55), "4": None},
        pass_prompts={"1": 64},
        shared=False,
        unscored=5,
        lost=1,
        foreign=0,
        sampling={"temperature": 1.0},
        when=1_788_000_000.0,
    )


def ready(server: Server, path: str) -> dict[str, Any]:
    """The export at `path` once it is there."""

    def ended() -> dict[str, Any] | None:
        view: dict[str, Any] = server.http.get(path).json()
        return None if view["state"] == "running" else view

    view = wait_until(ended, 60, "the end of an export")
    assert view["state"] == "ready", view
    return view


def test_an_export_is_made_fetched_and_taken_away(real: Server, tmp_path: Path) -> None:
    job = job_with_versions(real)
    path = f"/v1/jobs/{job}/exports"
    begun = real.http.post(path, json={"format": "hf"})
    assert begun.status_code == 202, begun.text
    assert begun.json()["name"] == "0.1-hf"
    view = ready(real, f"{path}/0.1-hf")
    listed = real.http.get(path).json()
    assert listed == {"items": [view], "versions": ["0.0", "0.1"], "checkpoints": []}
    assert real.http.post(path, json={"format": "hf", "version": "1"}).json() == view, "it is not made again"

    whole = real.http.get(f"{path}/0.1-hf/files/model.safetensors").content
    part = real.http.get(f"{path}/0.1-hf/files/model.safetensors", headers={"range": "bytes=100-"})
    assert (part.status_code, part.content) == (206, whole[100:])
    card = real.http.get(f"{path}/0.1-hf/files/README.md").text
    assert "mean reward 0.4321 (0.4 to 0.45) over 64 prompts from index 1000 on (data seed 3)" in card
    assert "pass@1: 0.5 (0.45 to 0.55), over 64 prompts" in card
    assert "pass@4: unknown" in card
    assert "5 unscored, 1 lost" in card
    assert "of this manifest" in card
    for stranger in ("../0.1-hf.request.json", "..%2f..%2fkey", "nothing", "%2e%2e/%2e%2e/key"):
        problem(real.http.get(f"{path}/0.1-hf/files/{stranger}"), 404)

    client = Client(real.url)
    target_of(str(tmp_path / "out")).fetch(client, f"{path}/0.1-hf", view["record"], lambda done, total: None)
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == whole
    client.close()
    assert real.http.delete(f"{path}/0.1-hf").json() == view
    problem(real.http.get(f"{path}/0.1-hf"), 404)
    assert real.http.get(path).json()["items"] == []


def test_what_cannot_be_exported_says_what_can(real: Server) -> None:
    job = job_with_versions(real)
    path = f"/v1/jobs/{job}/exports"
    told = problem(real.http.post(path, json={"format": "hf", "version": "0.9"}), 422)
    assert "versions in the store: 0.0, 0.1; checkpoints: none" in told["detail"]
    assert "adapter" in problem(real.http.post(path, json={"format": "lora"}), 422)["detail"]
    problem(real.http.post(path, json={"format": "onnx"}), 422)
    problem(real.http.post(path, json={"format": "hf", "Version": "1"}), 422)
    problem(real.http.post(path, json={"format": "sglang", "from": "checkpoint"}), 422)
    problem(real.http.get(f"{path}/0.1-hf"), 404)


def test_a_failed_export_says_why_and_may_be_asked_for_again(real: Server) -> None:
    job = job_with_versions(real)
    folder, path = real.settings.job_dir(job), f"/v1/jobs/{job}/exports"
    (folder / "key").write_bytes(b"another key")
    real.http.post(path, json={"format": "hf"})

    def failed() -> str:
        view = real.http.get(f"{path}/0.1-hf").json()
        return str(view["reason"]) if view["state"] == "failed" else ""

    assert "signature" in wait_until(failed, 60, "a failed export")
    (folder / "key").write_bytes(KEY)
    real.http.post(path, json={"format": "hf"})
    ready(real, f"{path}/0.1-hf")


def test_an_export_whose_process_died_is_told_and_made_anew(real: Server) -> None:
    """What a killed gateway and its process leave: the request, a part, links to blobs."""
    job = job_with_versions(real)
    path, place = f"/v1/jobs/{job}/exports", real.settings.job_dir(job) / "exports"
    (place / ".0.1-hf.part").mkdir(parents=True)
    (place / ".0.1-hf.part" / "model.safetensors").write_bytes(b"half")
    (place / ".0.1-hf.pin" / "blobs").mkdir(parents=True)
    (place / "0.1-hf.lock").write_bytes(b"")
    (place / "0.1-hf.request.json").write_bytes(b"{}")
    told = real.http.get(f"{path}/0.1-hf").json()
    assert told["state"] == "interrupted"
    assert "logs/export.log" in told["reason"]
    assert real.http.post(path, json={"format": "hf"}).json()["state"] == "running"
    record = ready(real, f"{path}/0.1-hf")["record"]
    assert {file["name"] for file in record["files"]} >= {"model.safetensors", "README.md"}
    # the export is there from its rename on; its process ends a moment later, and takes the rest along
    wait_until(lambda: not list(place.glob(".0.1-hf.*")), 10, "the end of what was left behind")


def test_fetching_goes_on_where_it_broke_off(server: Server, tmp_path: Path) -> None:
    job = server.submit()
    path = f"/v1/jobs/{job}/exports/{write_export(server.settings.job_dir(job))}"
    record = server.http.get(path).json()["record"]
    client = Client(server.url)
    part = tmp_path / ".out.part"
    part.mkdir()
    (part / "config.json").write_bytes(CONFIG[:7])
    (part / "stray.safetensors").write_bytes(b"of another try")
    target_of(str(tmp_path / "out")).fetch(client, path, record, lambda done, total: None)
    assert (tmp_path / "out" / "config.json").read_bytes() == CONFIG
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == ["config.json", "export.json"]
    with pytest.raises(ValueError, match="is there already"):
        target_of(str(tmp_path / "out")).refuse_taken()

    part.mkdir()
    (part / "config.json").write_bytes(b"#" * 7)
    with pytest.raises(Failure, match=r"config\.json has sha256"):
        target_of(str(tmp_path / "out")).fetch(client, path, record, lambda done, total: None)
    assert not (part / "config.json").exists()
    client.close()


def test_an_address_gets_every_file_and_the_record_last(server: Server) -> None:
    import fsspec

    job = server.submit()
    path = f"/v1/jobs/{job}/exports/{write_export(server.settings.job_dir(job))}"
    record = server.http.get(path).json()["record"]
    client = Client(server.url)
    target = target_of(f"memory://{job}/out")
    target.refuse_taken()
    target.fetch(client, path, record, lambda done, total: None)
    client.close()
    files = fsspec.filesystem("memory")
    assert files.cat(f"/{job}/out/config.json") == CONFIG
    assert files.exists(f"/{job}/out/export.json")
    with pytest.raises(ValueError, match="holds an export already"):
        target.refuse_taken()
