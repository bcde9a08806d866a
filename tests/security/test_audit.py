"""The audit log: who did what to which job. Appended, rotated, and without a secret in it."""

from __future__ import annotations

import stat
from pathlib import Path

import msgspec
import pytest
from security_world import OPERATOR, Installation
from serving import SPEC

from syncline.gateway import audit
from syncline.gateway.audit import Audit, Line
from syncline.runtime.tokens import OPERATOR as OPERATORS


def lines(house: Installation) -> list[Line]:
    """All that was written down, oldest first."""
    text = house.server.app.state.gateway.audit.path.read_bytes()
    return [msgspec.json.decode(line, type=Line) for line in text.splitlines()]


def test_who_did_what_to_which_job(apart: Installation) -> None:
    job = apart.submit("alpha")
    apart.ask("alpha", "POST", f"/v1/jobs/{job}/pause")
    apart.ask("alpha", "GET", f"/v1/jobs/{job}")  # looking at one's own is not written down
    apart.ask("beta", "POST", f"/v1/jobs/{job}/cancel")
    apart.ask("beta", "GET", f"/v1/jobs/{job}")
    apart.ask("admin", "GET", f"/v1/jobs/{job}")
    apart.ask("operator", "POST", f"/v1/jobs/{job}/cancel")
    apart.ask("", "GET", f"/v1/jobs/{job}", headers={"authorization": "Bearer guess-of-a-token"})
    found = [(one.tenant, one.role, one.method, one.route, one.job, one.status) for one in lines(apart)]
    about = "/v1/jobs/{job}"
    assert found == [
        ("alpha", "member", "POST", "/v1/jobs", job, 201),
        ("alpha", "member", "POST", f"{about}/pause", job, 202),
        ("beta", "member", "POST", f"{about}/cancel", job, 404),
        ("beta", "member", "GET", about, job, 404),
        ("staff", "admin", "GET", about, job, 200),
        ("default", "admin", "POST", f"{about}/cancel", job, 202),
        ("", "", "GET", "none", job, 401),
    ]
    assert {one.client for one in lines(apart)} == {"127.0.0.1"}
    ids = {token.tenant: token.id for token in apart.store.read().tokens}
    assert [one.token for one in lines(apart)][:5] == [
        ids[t] for t in ("alpha", "alpha", "beta", "beta", "staff")
    ]


def test_it_holds_no_secret_and_nothing_that_was_sent(apart: Installation) -> None:
    """A path, a query, a body and a header may hold anything."""
    apart.ask("alpha", "POST", "/v1/jobs", json={**SPEC, "name": "canary-body"})
    apart.ask("alpha", "POST", "/v1/canary-path", params={"q": "canary-query"})
    apart.ask(
        "", "POST", "/v1/jobs", headers={"authorization": "Bearer canary-token", "x-k": "canary-header"}
    )
    apart.ask("alpha", "POST", "/v1/jobs/j0000000000/cancel%0a%7b%22canary%22%7d", content=b"canary")
    text = apart.server.app.state.gateway.audit.path.read_text()
    assert len(text.splitlines()) == 4
    for secret in ("canary", OPERATOR, *apart.texts.values()):
        assert secret not in text


def test_it_is_appended_to_and_private(apart: Installation) -> None:
    apart.submit("alpha")
    path: Path = apart.server.app.state.gateway.audit.path
    before = path.read_bytes()
    again = Audit(apart.settings.runs)  # the next gateway on this host
    scope = {"method": "POST", "path": "/v1/jobs", "client": None}
    again.told(OPERATORS, scope, "/v1/jobs", 201, "j0000000000")
    assert path.read_bytes().startswith(before)
    assert len(path.read_bytes()) > len(before)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_it_is_rotated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audit, "BYTES", 1000)
    monkeypatch.setattr(audit, "FILES", 2)
    log = Audit(tmp_path)
    for _ in range(50):
        log.told(OPERATORS, {"method": "POST", "path": "/", "client": None}, "none", 404, "")
    files = sorted(log.path.parent.iterdir())
    assert [path.name for path in files] == [f"{log.path.name}{end}" for end in ("", ".1", ".2")]
    assert all(path.stat().st_size <= 1000 for path in files)
    assert all(stat.S_IMODE(path.stat().st_mode) & 0o077 == 0 for path in files)
