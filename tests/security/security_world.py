"""A gateway with tenants: `alpha` and `beta` with a member each, an admin, and the operator's own token.

Not in `conftest.py`: other folders have one too, and where several are collected that name is any of theirs.
"""

from __future__ import annotations

from typing import Any

import httpx
import msgspec
from exports_left import write_export
from left_behind import metrics, publish, row, write_update
from serving import SPEC, Server

from syncline.contract.streams import METRICS, VERSIONS
from syncline.contract.version_path import VersionId, VersionRecord
from syncline.runtime.bus import Bus
from syncline.runtime.settings import Settings
from syncline.runtime.tokens import TokenStore

OPERATOR = "operators-own-token"
TENANTS = ("alpha", "beta")


class Installation:
    """One gateway, its token store, and a client for each who may ask."""

    def __init__(self, settings: Settings) -> None:
        self.store = TokenStore(settings.token_store)
        self.texts: dict[str, str] = {"operator": OPERATOR}
        for tenant in TENANTS:
            self.texts[tenant] = self.store.add(tenant, "member")[1]
            self.store.limit(tenant, rate=10_000.0, burst=100_000, running=1000)
        self.texts["admin"] = self.store.add("staff", "admin")[1]
        self.bus = Bus(settings.redis_url, deadline=5)
        self.server = Server(settings, self.bus)
        self.settings = settings

    def ask(self, who: str, method: str, path: str, **request: Any) -> httpx.Response:
        """A request with the token of `who`; "" for none."""
        headers = {**request.pop("headers", {})}
        if who:
            headers["authorization"] = f"Bearer {self.texts[who]}"
        return self.server.http.request(method, path, headers=headers, **request)

    def submit(self, who: str, **changes: Any) -> str:
        answer = self.ask(who, "POST", "/v1/jobs", json={**SPEC, **changes})
        assert answer.status_code == 201, answer.text
        return str(answer.json()["id"])

    def stop(self) -> None:
        self.server.stop()
        self.bus.close()


def whole_job(house: Installation, who: str) -> dict[str, str]:
    """A job of `who` with something on every route, and ended; ids by parameter name."""
    name = f"{who}-canary-name"
    job = house.submit(who, name=name, batch={"groups": 1, "group_size": 2}, schedule={"max_lag": 5})
    made = publish(house.server, job, 0)
    write_update(house.settings.job_dir(job), job, 9, [row(t) for t in made])
    house.bus.append(METRICS.at(job), metrics(1))
    record = VersionRecord(
        version=VersionId(0, 7), parent=None, optimizer_step=7, contract="c", state="minted", minted=1.0
    )
    house.bus.hset(VERSIONS.at(job), "0.7", msgspec.json.encode(record))
    house.server.set_state(job, "succeeded")
    named = {"export": write_export(house.settings.job_dir(job)), "file": "config.json"}
    return {
        "job": job,
        "trajectory": made[0].trajectory,
        "version": "0.7",
        "token": "1",
        "name": name,
    } | named
