"""A server's endpoints are its worker's alone: on the loopback address, behind a key that cannot be read off."""

from __future__ import annotations

from pathlib import Path

import httpx
import psutil
import pytest
from conformance.forge import MODELS
from fleet import Fleet

from syncline.rollout.engines.sglang.launch import ServerProcess

ADMINISTRATION = [
    ("POST", "/update_weights_from_disk", {"model_path": "/nowhere"}),
    ("POST", "/update_weights_from_tensor", {"serialized_named_tensors": ["gASVAAAA"]}),
    ("POST", "/pause_generation", {"mode": "abort"}),
    ("POST", "/flush_cache", {}),
    ("POST", "/release_memory_occupation", {}),
    ("POST", "/load_lora_adapter", {"lora_name": "x", "lora_path": "/nowhere"}),
    ("POST", "/generate", {"input_ids": [1, 2]}),
    ("GET", "/server_info", None),
    ("GET", "/model_info", None),
]


@pytest.fixture
def process(fleet: Fleet) -> ServerProcess:
    found = fleet.server(fleet.model(MODELS / "tiny-dense"))
    found.start()
    found.wait()
    return found


def test_every_endpoint_asks_for_the_key(process: ServerProcess) -> None:
    url = process.server.url
    assert url.startswith("http://127.0.0.1:")
    for headers in ({}, {"authorization": "Bearer"}, {"authorization": "Bearer wrong"}):
        for method, path, body in ADMINISTRATION:
            answer = httpx.request(method, url + path, json=body, headers=headers, timeout=30)
            assert answer.status_code == 401, path
    assert process.server.info()["model_path"]  # with the key


def test_the_key_cannot_be_read_off(process: ServerProcess, tmp_path_factory: pytest.TempPathFactory) -> None:
    key = process.server.headers["authorization"].removeprefix("Bearer ")
    assert len(key) >= 43
    assert process.pid is not None
    server = psutil.Process(process.pid)
    for one in (server, *server.children(recursive=True)):
        assert key not in " ".join(one.cmdline())
        assert key not in " ".join(one.environ().values())
    logs: list[Path] = list(tmp_path_factory.getbasetemp().rglob("*.log"))
    assert logs
    told = [part for log in logs for part in log.read_text(errors="replace").split(key)[:-1]]
    assert [part[-200:] for part in told] == []  # what stands before it says who wrote it
