"""The token store: what lies at rest, who gets in, and what happens when it changes or cannot be read."""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import msgspec
import pytest
from security_world import OPERATOR, Installation
from serving import SPEC, problem

from syncline.gateway.app import create_app
from syncline.runtime.bus import Bus
from syncline.runtime.settings import Settings
from syncline.runtime.tokens import TokenStore, TokensUnreadable


def test_only_a_digest_lies_at_rest(tmp_path: Path) -> None:
    store = TokenStore(tmp_path / "tokens.json")
    token, text = store.add("acme", "member")
    assert re.fullmatch(r"sl_[0-9a-f]{8}_[A-Za-z0-9_-]{43}", text)
    kept = store.path.read_text()
    assert text not in kept
    assert text.rpartition("_")[2] not in kept
    assert token.sha256 == hashlib.sha256(text.encode()).hexdigest()
    assert stat.S_IMODE(store.path.stat().st_mode) == 0o600
    assert {path.name for path in tmp_path.iterdir()} == {"tokens.json", ".tokens.json.lock"}


def test_who_a_token_is(tmp_path: Path) -> None:
    store = TokenStore(tmp_path / "tokens.json")
    token, text = store.add("acme", "member")
    other = store.add("acme", "admin")[1]
    found = store.who(text)
    assert found is not None
    assert (found.tenant, found.role, found.token, found.admin) == ("acme", "member", token.id, False)
    swapped = f"sl_{token.id}_{other.rpartition('_')[2]}"
    for wrong in (
        "",
        text[:-1],
        text + "x",
        text.upper(),
        swapped,
        f"sl_{'0' * 8}_{'A' * 43}",
        "é",
        token.sha256,
    ):
        assert store.who(wrong) is None
    store.revoke(token.id)
    assert store.who(text) is None
    assert store.who(other) is not None


@pytest.mark.parametrize("tenant", ["", "A", "a b", "-a", "a" * 33, "a/../b", "a\n", "é"])
def test_a_tenant_is_a_plain_name(tmp_path: Path, tenant: str) -> None:
    store = TokenStore(tmp_path / "tokens.json")
    with pytest.raises(ValueError, match="tenant"):
        store.add(tenant, "member")
    assert not store.exists()


def test_a_file_that_is_mounted_says_so() -> None:
    """/proc takes no new files, as a mounted Secret takes none."""
    store = TokenStore(Path("/proc/self/tokens.json"))
    with pytest.raises(
        ValueError, match=r"/proc/self/tokens\.json cannot be changed from here .*SYNCLINE_TOKENS"
    ):
        store.add("acme", "member")


def test_the_operators_tenant_has_no_members(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="default"):
        TokenStore(tmp_path / "tokens.json").add("default", "member")


@pytest.mark.parametrize(
    "changed", [{"running": 0}, {"rate": -1}, {"rate": float("nan")}, {"hosts": [1]}, {"x": 1}]
)
def test_a_limit_that_cannot_be_is_refused(tmp_path: Path, changed: dict[str, Any]) -> None:
    store = TokenStore(tmp_path / "tokens.json")
    store.add("acme", "member")
    before = store.path.read_bytes()
    with pytest.raises(ValueError, match="limits of acme"):
        store.limit("acme", **changed)
    assert store.path.read_bytes() == before


def test_tokens_made_at_once_are_all_kept(tmp_path: Path) -> None:
    """Each with a store of its own, as processes have."""
    made: list[str] = []
    threads = [
        threading.Thread(
            target=lambda: made.append(TokenStore(tmp_path / "t.json").add("acme", "member")[0].id)
        )
        for _ in range(12)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(made) == sorted(token.id for token in TokenStore(tmp_path / "t.json").read().tokens)


def test_a_revoked_token_is_refused_at_once(apart: Installation) -> None:
    token, text = apart.store.add("gamma", "member")
    apart.texts["gamma"] = text
    assert apart.ask("gamma", "GET", "/v1/jobs").status_code == 200
    TokenStore(apart.store.path).revoke(token.id)
    assert problem(apart.ask("gamma", "GET", "/v1/jobs"), 401)["detail"] == "a valid bearer token is needed"


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"tokens": [{}]}', b"\xff", b'{"extra": 1}'])
def test_a_store_that_cannot_be_read_lets_nobody_in(apart: Installation, content: bytes) -> None:
    apart.store.path.write_bytes(content)
    assert problem(apart.ask("alpha", "GET", "/v1/jobs"), 503)["type"].endswith("tokens-unreadable")
    assert apart.ask("operator", "GET", "/v1/jobs").status_code == 200  # needs no store
    problem(apart.ask("", "GET", "/v1/jobs"), 401)
    with pytest.raises(TokensUnreadable, match=re.escape(apart.store.path.name)):
        create_app(apart.settings, apart.bus)


def test_an_empty_store_opens_no_door(base: Settings, tmp_path: Path) -> None:
    """Who revokes the last token does not mean everybody."""
    settings = msgspec.structs.replace(base, token=None, runs=tmp_path)
    store = TokenStore(settings.token_store)
    store.revoke(store.add("acme", "member")[0].id)
    bus = Bus(settings.redis_url)
    with pytest.raises(ValueError, match="SYNCLINE_HOST"):
        create_app(msgspec.structs.replace(settings, host="0.0.0.0"), bus)
    bus.close()


def test_the_first_token_closes_an_open_gateway(base: Settings, tmp_path: Path) -> None:
    made = Installation(msgspec.structs.replace(base, token=None, runs=tmp_path))
    try:
        problem(made.ask("", "GET", "/v1/jobs"), 401)
        problem(made.ask("operator", "GET", "/v1/jobs"), 401)  # there is no such token here
        assert made.ask("alpha", "GET", "/v1/jobs").status_code == 200
    finally:
        made.stop()


@pytest.mark.parametrize(
    "header",
    ["Bearer", "Bearer ", "bearer {}", "Bearer  {}", "Bearer {}x", "Basic {}", "{}", "Bearer " + "x" * 5000],
)
def test_a_header_is_the_token_and_nothing_else(house: Installation, header: str) -> None:
    text = header.format(house.texts["alpha"])
    problem(house.ask("", "GET", "/v1/jobs", headers={"authorization": text.rstrip() or "x"}), 401)


def test_two_tokens_are_none(house: Installation) -> None:
    given = [("authorization", f"Bearer {house.texts[who]}") for who in ("alpha", "operator")]
    problem(house.server.http.get("/v1/jobs", headers=given), 401)


def test_numbers_of_the_installation_are_for_admins(house: Installation) -> None:
    problem(house.ask("alpha", "GET", "/metrics"), 403)
    for who in ("admin", "operator"):
        assert house.ask(who, "GET", "/metrics").status_code == 200


def test_the_command_line_makes_lists_and_revokes(tmp_path: Path) -> None:
    def run(*words: str) -> subprocess.CompletedProcess[str]:
        env = {**os.environ, "SYNCLINE_RUNS": str(tmp_path)}
        command = [sys.executable, "-m", "syncline.scheduler.cli", "token", *words]
        return subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)

    made = run("add", "--tenant", "acme")
    text = made.stdout.strip()
    assert made.returncode == 0
    store = TokenStore(tmp_path / "tokens.json")
    found = store.who(text)
    assert found is not None
    listed = run("list", "--json").stdout
    assert text not in listed
    assert json.loads(listed)["tokens"][0]["id"] == found.token
    assert run("limits", "--tenant", "acme", "--rate", "5", "--host", "judge.example.org").returncode == 0
    assert store.read().tenants["acme"].hosts == ("judge.example.org",)
    assert run("revoke", found.token).returncode == 0
    assert store.who(text) is None
    refused = run("revoke", found.token)
    assert (refused.returncode, refused.stdout) == (2, "")


def test_a_tenant_may_name_the_hosts_it_was_given(apart: Installation) -> None:
    def submitted(who: str, url: str) -> Any:
        spec = {**SPEC, "reward": {"source": "http", "url": url}}
        return apart.ask(who, "POST", "/v1/jobs", json=spec)

    inside = ["http://127.0.0.1:6379/", "http://169.254.169.254/latest", "http://judge.example.org.evil.net/"]
    for url in [*inside, "http://judge.example.org@127.0.0.1/", "http://127.0.0.1\\@judge.example.org/"]:
        refused = problem(submitted("alpha", url), 422)
        assert refused["errors"][0]["path"] == "reward.url"
    apart.store.limit("alpha", hosts=["judge.example.org", "*.judges.net"])
    for url in [*inside, "http://judge.example.org@127.0.0.1/", "http://127.0.0.1\\@judge.example.org/"]:
        problem(submitted("alpha", url), 422)
    for url in ("https://judge.example.org/score", "http://JUDGE.example.org:8000/", "https://a.judges.net/"):
        assert submitted("alpha", url).status_code == 201
    assert submitted("operator", inside[0]).status_code == 201
    assert OPERATOR not in apart.store.path.read_text()
