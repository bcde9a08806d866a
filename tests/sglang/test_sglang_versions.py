"""Versions in a real server: read back after every update, faults caught, in flight, and a server that dies."""

from __future__ import annotations

import base64
import os
import signal
import threading
import time
from pathlib import Path

import pytest
import torch
from conformance.forge import JOB, KEY, MODELS, Forge, cold_logprobs, gap
from conformance.rollout_engine import requests, run
from fleet import DRAIN, Fleet
from msgspec.structs import replace
from safetensors.torch import load_file, save_file
from waiting import wait_until

from syncline.contract.sglang_spec import Update
from syncline.contract.version_path import VersionId
from syncline.rollout.engine import CommitPolicy, Sampling, StageFailed
from syncline.rollout.engines.sglang import buckets, checkpoint
from syncline.rollout.engines.sglang.client import Refused, Server
from syncline.rollout.engines.sglang.engine import SGLangEngine
from syncline.rollout.engines.sglang.labels import attested, label_of

IDS = [1, *range(10, 40)]
CLOSE = 5e-5
MOE = MODELS / "tiny-moe"


@pytest.fixture
def forge(tmp_path: Path) -> Forge:
    return Forge(tmp_path, MOE)


@pytest.fixture
def engine(fleet: Fleet, tmp_path: Path, forge: Forge) -> SGLangEngine:
    made = fleet.engine(MOE, tmp_path / "scratch", JOB, KEY, 64)
    made.stage(forge.version(0), forge.store)
    made.commit(DRAIN)
    return made


def server_of(engine: SGLangEngine) -> Server:
    return engine.process.server


def true_to(engine: SGLangEngine, forge: Forge, number: int) -> float:
    found = engine.score(IDS, 2, buffer="active").logprobs
    return gap(found, cold_logprobs(forge.cold(number), IDS, 2))


# ---- read-back
@pytest.mark.parametrize("update", ["buckets", "group"])
def test_buckets_and_broadcasts_update_as_a_checkpoint_on_disk_does(
    fleet: Fleet,
    tmp_path: Path,
    forge: Forge,
    engine: SGLangEngine,
    monkeypatch: pytest.MonkeyPatch,
    update: Update,
) -> None:
    monkeypatch.setattr("syncline.rollout.engines.sglang.loader.BUCKET", 100_000)  # several of them
    other = fleet.engine(MOE, tmp_path / "other", JOB, KEY, 64, update=update)
    for number in (0, 1):  # the second finds the group of the first
        other.stage(forge.version(number), forge.store)
        other.commit(DRAIN)
        assert true_to(other, forge, number) < CLOSE
    by_bucket = server_of(other).checksums()
    engine.stage(forge.version(1), forge.store)
    assert server_of(engine).checksums() == by_bucket
    assert server_of(engine).info()["weight_version"] == label_of(VersionId(0, 1), forge.manifest(1).digest())


def test_a_misnamed_tensor_is_skipped_by_the_server_and_found_by_the_read_back(
    engine: SGLangEngine, forge: Forge, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the server takes for a success: one tensor under a name that it does not know."""
    name = "model.layers.1.self_attn.o_proj.weight"
    check = checkpoint.check_file

    def misname(file: Path, entries: object) -> None:
        check(file, entries)  # type: ignore[arg-type]
        tensors = load_file(file)
        tensors["model.layers.1.self_attn.out_proj.weight"] = tensors.pop(name)
        save_file(tensors, file, metadata={"format": "pt"})

    monkeypatch.setattr(checkpoint, "check_file", misname)
    with pytest.raises(StageFailed, match=rf"tensor {name} reads back with checksum"):
        engine.stage(forge.version(1), forge.store)
    assert engine.serving is not None
    assert engine.serving[0] == VersionId(0, 0)
    assert true_to(engine, forge, 0) < CLOSE, "the old version was loaded again"
    monkeypatch.undo()
    engine.stage(forge.version(1), forge.store)
    engine.commit(DRAIN)
    assert true_to(engine, forge, 1) < CLOSE


@pytest.mark.parametrize("fault", ["truncated", "bent", "missing", "extra"])
def test_a_faulty_file_never_reaches_the_server(tmp_path: Path, forge: Forge, fault: str) -> None:
    manifest = forge.manifest(0)
    entries = {entry.name: entry for entry in manifest.tensors}
    tensors = {name: checkpoint.blob(entry, forge.store) for name, entry in entries.items()}
    file = tmp_path / "model.safetensors"
    checkpoint.write_tensors(file, tensors, entries.values())
    norm = "model.norm.weight"
    match fault:
        case "truncated":
            file.write_bytes(file.read_bytes()[:-64])
        case "bent":
            save_file({**tensors, norm: tensors[norm] * 2}, file)
        case "missing":
            save_file({name: tensor for name, tensor in tensors.items() if name != norm}, file)
        case "extra":
            save_file({**tensors, "model.more.weight": torch.ones(2)}, file)
    expected = {"truncated": "model.safetensors", "extra": "model.more.weight"}.get(fault, norm)
    with pytest.raises(StageFailed, match=expected):
        checkpoint.check_file(file, entries)


def test_a_bucket_of_any_dtype_is_written_as_the_server_reads_it() -> None:
    tensors = {
        "a": torch.arange(6, dtype=torch.bfloat16).reshape(2, 3),
        "b": torch.ones(4).to(torch.float8_e4m3fn),
        "c": torch.ones(3, dtype=torch.uint8),
    }
    said = base64.b64decode(buckets.encoded(tensors))
    assert b"sglang.srt.weight_sync.tensor_bucket\nFlattenedTensorMetadata\n" in said
    assert [list(part) for part in buckets.buckets(tensors, 14)] == [["a"], ["b", "c"]]


def test_what_would_end_the_server_is_refused_before_it_is_sent(engine: SGLangEngine) -> None:
    request = requests(1)[0]
    with pytest.raises(ValueError, match="outside the vocabulary"):
        engine.submit(replace(request, prompt=(1, 100)))
    with pytest.raises(ValueError, match="outside the vocabulary"):
        engine.score([1, 5, 100], 1, buffer="active")
    greedy = Sampling(max_tokens=4, top_k=1, temperature=0.5)
    with pytest.raises(ValueError, match="top_k 1 with a temperature"):
        engine.submit(replace(request, sampling=greedy))
    assert server_of(engine).ready()


def test_a_misnamed_tensor_of_a_broadcast_is_found_by_the_read_back(
    fleet: Fleet, tmp_path: Path, forge: Forge, engine: SGLangEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = fleet.engine(MOE, tmp_path / "other", JOB, KEY, 64, update="group")
    other.stage(forge.version(0), forge.store)
    other.commit(DRAIN)
    name = "model.layers.1.self_attn.o_proj.weight"
    read = checkpoint.read_tensors

    def misnamed(file: Path) -> dict[str, torch.Tensor]:
        tensors = read(file)
        if file.parent.name.startswith("0.1-"):
            tensors["model.layers.1.self_attn.out_proj.weight"] = tensors.pop(name)
        return tensors

    monkeypatch.setattr(checkpoint, "read_tensors", misnamed)
    with pytest.raises(StageFailed, match=rf"tensor {name} reads back with checksum"):
        other.stage(forge.version(1), forge.store)
    assert true_to(other, forge, 0) < CLOSE, "the old version was broadcast again"


def test_a_broadcast_that_the_server_refuses_ends_and_the_next_one_meets_anew(
    fleet: Fleet, tmp_path: Path, forge: Forge, engine: SGLangEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sent outside a session: the server answers at once and takes nothing, while this end has begun to send."""
    monkeypatch.setattr("syncline.rollout.engines.sglang.groups.SEND", 3.0)
    other = fleet.engine(MOE, tmp_path / "other", JOB, KEY, 64, update="group")
    with monkeypatch.context() as patch:
        patch.setattr(Server, "begin_update", lambda self: None)
        patch.setattr(Server, "end_update", lambda self: None)
        with pytest.raises(StageFailed, match="must run between begin_weight_update"):
            other.stage(forge.version(1), forge.store)
    other.stage(forge.version(1), forge.store)
    other.commit(DRAIN)
    assert true_to(other, forge, 1) < CLOSE


# ---- log-probs
def test_log_probs_are_scaled_by_the_temperature_whatever_is_cut(engine: SGLangEngine, forge: Forge) -> None:
    cold = forge.cold(0)
    for more in ({}, {"top_k": 5}, {"top_p": 0.6}):
        wanted = requests(4, temperature=0.7, **more)
        for name, (chunk,) in run(engine, wanted).items():
            request = next(r for r in wanted if r.trajectory == name)
            ids = [*request.prompt, *chunk.tokens]
            with torch.inference_mode():
                rows = torch.log_softmax(cold(input_ids=torch.tensor([ids])).logits[0] / 0.7, -1)
            first = len(request.prompt)
            due = [float(rows[i - 1, ids[i]]) for i in range(first, len(ids))]
            assert gap(chunk.logprobs, due) < CLOSE
            found = engine.score(ids, first, buffer="active", temperature=0.7, experts=True)
            assert gap(found.logprobs, due) < CLOSE
            assert found.experts == chunk.experts


def test_the_last_id_of_the_vocabulary_is_scored_as_itself(engine: SGLangEngine, forge: Forge) -> None:
    """SGLang 0.5.23 takes it for padding among input tokens and scores token 0 in its place."""
    ids = [1, 99, 10, 99, 99, 0, 11]
    found = engine.score(ids, 1, buffer="active").logprobs
    assert gap(found, cold_logprobs(forge.cold(0), ids, 1)) < CLOSE


# ---- in flight, as the server does it
@pytest.mark.parametrize("mode", ["retract", "in_place"])
def test_a_paused_scheduler_attests_a_span_per_version(engine: SGLangEngine, forge: Forge, mode: str) -> None:
    """retract: contexts are made anew under the new weights. in_place: they are kept, which no span says."""
    old, new = (label_of(VersionId(0, n), forge.manifest(n).digest()) for n in (0, 1))
    prepared = engine._loader.prepare(forge.manifest(1), forge.store, None)
    server = server_of(engine)
    server.slow_down(0.05)
    rid = "p" * 32
    body = {
        "rid": rid,
        "input_ids": IDS,
        "sampling_params": {"max_new_tokens": 40, "temperature": 1.0, "ignore_eos": True},
        "return_logprob": True,
    }
    replies: list[dict[str, object]] = []
    thread = threading.Thread(target=lambda: replies.append(server.generate(body)))
    thread.start()
    time.sleep(0.8)  # a window in flight, made wide by the slowed server
    server.pause("retract" if mode == "retract" else "in_place")
    server.load_disk(str(prepared.folder), prepared.label, flush=mode == "retract")
    engine._loader.verify(server, prepared)
    server.resume()
    server.slow_down(None)
    thread.join()
    reply = replies[0]
    meta, tokens = reply["meta_info"], reply["output_ids"]
    assert isinstance(meta, dict)
    assert isinstance(tokens, list)
    spans = attested(meta, len(tokens))
    assert [span.label for span in spans] == [old, new]
    ids = [*IDS, *tokens]
    logprobs = [float(row[0]) for row in meta["output_token_logprobs"]]
    for number, span in enumerate(spans):
        part = logprobs[span.start : span.end]
        first, end = len(IDS) + span.start, len(IDS) + span.end
        own = gap(part, cold_logprobs(forge.cold(number), ids[:end], first))
        other = gap(part, cold_logprobs(forge.cold(1 - number), ids[:end], first))
        assert other > 1e-2
        assert (own < CLOSE) == (number == 0 or mode == "retract")


def test_an_aborted_request_comes_back_with_what_it_has_and_goes_on_under_the_next_version(
    engine: SGLangEngine, forge: Forge
) -> None:
    engine.in_flight = CommitPolicy(kind="in_place")
    server_of(engine).slow_down(0.03)
    request = requests(1, max_tokens=60, min_tokens=60)[0]
    engine.submit(request)
    time.sleep(0.7)
    engine.stage(forge.version(1), forge.store)
    assert engine.serving is None
    committed = engine.commit(engine.in_flight)
    assert committed is not None
    assert (committed.in_flight, committed.recomputed) == (1, 1)
    chunks = []
    while engine.running:
        chunks += engine.step()
    assert [chunk.version.number for chunk in chunks] == [0, 1]
    assert sum(len(chunk.tokens) for chunk in chunks) == 60
    ids = [*request.prompt, *chunks[0].tokens, *chunks[1].tokens]
    first = len(request.prompt)
    for chunk in chunks:
        at = first + chunk.start
        due = cold_logprobs(forge.cold(chunk.version.number), ids[: at + len(chunk.tokens)], at)
        assert gap(chunk.logprobs, due) < CLOSE
    experts = chunks[1].experts
    assert experts is not None
    assert experts.shape == (len(ids) - 1, 2, 2)


# ---- a server that dies
@pytest.mark.timeout(600)
def test_a_killed_server_leaves_rotation_and_comes_back_with_a_verified_version(
    fleet: Fleet, tmp_path: Path, forge: Forge
) -> None:
    engine = fleet.engine(MOE, tmp_path / "scratch", JOB, KEY, 64, number=1)
    engine.stage(forge.version(0), forge.store)
    engine.commit(DRAIN)
    pid, starts = engine.process.pid, engine.process.starts
    assert pid is not None
    server_of(engine).slow_down(0.05)
    request = requests(1, max_tokens=40, min_tokens=40)[0]
    engine.submit(request)
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: engine.serving is None, 30, "the engine to notice")
    assert engine.room == 0
    assert engine.step() == []
    assert engine.running == 1, "the request waits for a version"
    staged = engine.stage(forge.version(0), forge.store)
    assert staged.verdict == "verified"
    assert engine.process.starts == starts + 1
    engine.commit(DRAIN)
    chunks = []
    while engine.running:
        chunks += engine.step()
    (chunk,) = chunks
    ids = [*request.prompt, *chunk.tokens]
    assert gap(chunk.logprobs, cold_logprobs(forge.cold(0), ids, len(request.prompt))) < CLOSE


def test_a_server_without_sessions_is_told_apart(engine: SGLangEngine) -> None:
    server = server_of(engine)
    assert server.has_sessions()
    assert server.release() == "0.5.23"
    with pytest.raises(Refused, match="404"):
        server._call("POST", "/no_such_endpoint", {})
