"""The OpenAPI document is what the gateway does: generated requests, checked against its own promises."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
import schemathesis
from exports_left import write_export
from hypothesis import HealthCheck, settings
from left_behind import metrics, publish, row, write_update
from schemathesis.checks import negative_data_rejection, positive_data_acceptance
from serving import Server
from validations_left import write_validation

from syncline.contract.streams import METRICS, VERSIONS
from syncline.contract.token_path import PROMPTED
from syncline.contract.version_path import VersionId, VersionRecord
from syncline.gateway.app import create_app
from syncline.runtime import tracing
from syncline.runtime.bus import Bus
from syncline.runtime.settings import Settings


@pytest.fixture(scope="module")
def ended(server: Server) -> dict[str, str]:
    """Ids of a job with something on every route; it has ended, so that its event stream does too."""
    job = server.submit(batch={"groups": 1, "group_size": 2}, schedule={"max_lag": 5})
    made = publish(server, job, 0)
    write_update(server.settings.job_dir(job), job, 9, [row(t) for t in made])
    server.bus.append(METRICS.at(job), metrics(1, loss=float("nan")))
    record = VersionRecord(
        version=VersionId(0, 7), parent=None, optimizer_step=7, contract="c", state="minted", minted=1.0
    )
    server.bus.hset(VERSIONS.at(job), "0.7", msgspec.json.encode(record))
    server.set_state(job, "succeeded")
    tracing.setup("scheduler", "scheduler", server.settings.traces, None)
    root = tracing.record(PROMPTED, None, 1.0, 2.0, job=job, trajectory=made[0].trajectory, group=0, index=0)
    tracing.setup("unnamed", "unnamed", None, None)
    named = {"trace": root.split("-")[1], "tag": "span.trajectory"} | {
        "export": write_export(server.settings.job_dir(job)),
        "file": "config.json",
        "number": write_validation(server.settings.job_dir(job)),
    }
    return {"job": job, "trajectory": made[0].trajectory, "version": "0.7", "token": "1", **named}


def document() -> dict[str, Any]:
    """The document of an application that never serves."""
    return create_app(Settings.read({}), Bus("redis://127.0.0.1:1/0")).openapi()


@schemathesis.serializer("application/toml")
def _as_it_is(_: Any, value: Any) -> bytes:
    return value.encode("utf-8", "replace") if isinstance(value, str) else json.dumps(value).encode()


SCHEMA = schemathesis.openapi.from_dict(document())
BRIEF = settings(
    max_examples=15,
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)


@SCHEMA.parametrize()
@BRIEF
def test_generated_requests_are_answered_as_documented(case: schemathesis.Case[Any], server: Server) -> None:
    """A well-formed spec may still be one that cannot run (422), so acceptance is not demanded here."""
    case.call_and_validate(base_url=server.url, excluded_checks=[positive_data_acceptance], timeout=30)


@SCHEMA.parametrize()
@BRIEF
def test_what_there_is_is_shown_as_documented(
    case: schemathesis.Case[Any], server: Server, ended: dict[str, str]
) -> None:
    """The same on a job that exists."""
    for name in case.path_parameters or {}:
        case.path_parameters[name] = ended[name]
    excluded = [positive_data_acceptance, negative_data_rejection]  # what was wrong may have been in the path
    case.call_and_validate(base_url=server.url, excluded_checks=excluded, timeout=30)


def test_every_route_has_an_example(server: Server) -> None:
    served = server.http.get("/openapi.json").json()
    assert served == json.loads(json.dumps(document()))
    for path, operations in served["paths"].items():
        for method, operation in operations.items():
            good = [r for status, r in operation["responses"].items() if status.startswith("2")]
            assert good, f"{method} {path}"
            for answer in good:
                assert all("example" in said for said in answer["content"].values()), f"{method} {path}"
            if "requestBody" in operation:
                assert all("example" in said for said in operation["requestBody"]["content"].values())
            assert operation["responses"]["4XX"]["content"].keys() == {"application/problem+json"}, path
