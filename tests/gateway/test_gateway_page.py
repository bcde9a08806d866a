"""The page's files and the routes that it alone needs: what is served to whom, curves, timelines, rows of tokens."""

from __future__ import annotations

import re
import shutil
import subprocess
from array import array
from collections.abc import Callable
from importlib.resources import files
from pathlib import Path
from typing import Any

import msgspec
import pytest
from left_behind import metrics, publish, row, trajectory, write_update
from serving import Server, problem

from syncline.contract.diagnosis import Diagnostics, Tail
from syncline.contract.events import Phase
from syncline.contract.streams import DIAGNOSTICS, METRICS, PHASES, VERSIONS
from syncline.contract.token_path import Trajectory
from syncline.contract.version_path import VersionId, VersionRecord, WorkerPath
from syncline.gateway import ui
from syncline.gateway.lineage import routes_at
from syncline.gateway.token_text import token_texts
from syncline.gateway.ui_curves import thinned
from syncline.gateway.ui_tokens import ratio
from syncline.runtime.bus import pack

MODELS = Path(__file__).resolve().parents[2] / "examples" / "models"
STATIC = {entry.name: entry.read_text() for entry in (files("syncline.gateway") / "static").iterdir()}
EXPORTED = r"^export (?:async )?(?:function\*?|const|class) (\w+)"
MODULES = sorted(name for name in STATIC if name.endswith(".js"))


# ---- files ------------------------------------------------------------------------------------------------
def test_the_bare_address_leads_to_the_page(server: Server) -> None:
    answer = server.http.get("/")
    assert (answer.status_code, answer.headers["location"]) == (307, "ui")
    assert server.http.get("/", follow_redirects=True).text.startswith("<!doctype html>")


def test_the_page_may_run_its_own_files_alone(server: Server) -> None:
    answer = server.http.get("/ui")
    policy = dict(part.strip().split(" ", 1) for part in answer.headers["content-security-policy"].split(";"))
    assert policy["default-src"] == "'none'"
    assert policy["require-trusted-types-for"] == "'script'"
    assert {policy[kind] for kind in ("script-src", "style-src", "connect-src", "img-src")} == {"'self'"}
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert not re.search(r"<style|<script(?![^>]* src=)|style=| on[a-z]+=|https?:", answer.text)


def test_files_are_kept_for_good_and_the_page_is_looked_up_anew(server: Server) -> None:
    page = server.http.get("/ui")
    assert page.headers["cache-control"] == "no-cache"
    again = server.http.get("/ui", headers={"if-none-match": page.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")
    named = re.findall(r'(?:href|src)="(ui/[^"]+)"', page.text)
    assert len(named) == 5
    for path in named:
        answer = server.http.get(f"/{path}")
        assert answer.status_code == 200
        assert answer.headers["cache-control"] == "public, max-age=31536000, immutable"
        assert answer.headers["content-type"].split(";")[0] in (
            "text/javascript",
            "text/css",
            "image/svg+xml",
        )
    digest = ui.served().digest
    for path in (
        f"{'0' * 16}/app.js",
        f"{digest}/index.html",
        f"{digest}/..%2Fapp.py",
        f"{digest}/nothing.js",
    ):
        problem(server.http.get(f"/ui/{path}"), 404)


def test_the_page_needs_no_token_and_what_it_shows_does(another: Callable[..., Server]) -> None:
    server = another(token="open sesame")
    assert server.http.get("/ui").status_code == 200
    assert server.http.get(f"/ui/{ui.served().digest}/app.js").status_code == 200
    for path in ("/v1/jobs", "/ui/../v1/jobs", "//ui/x", "/uix"):
        assert server.http.get(path).status_code == 401, path


@pytest.mark.parametrize("name", MODULES)
def test_no_module_turns_text_into_markup(name: str) -> None:
    forbidden = r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|DOMParser|\beval\b|new Function|setHTML|srcdoc"
    assert not re.search(forbidden, STATIC[name])


@pytest.mark.parametrize("name", MODULES)
def test_modules_find_what_they_import(name: str) -> None:
    for names, source in re.findall(r"^import \{([^}]+)\} from \"\./([^\"]+)\";", STATIC[name], re.MULTILINE):
        exported = set(
            re.findall(r"^export (?:async )?(?:function\*?|const|class) (\w+)", STATIC[source], re.MULTILINE)
        )
        assert {one.strip() for one in names.split(",")} <= exported, source
    assert len(re.findall(r"^import ", STATIC[name], re.MULTILINE)) == len(
        re.findall(r'from "\./', STATIC[name])
    )


@pytest.mark.skipif(
    shutil.which("node") is None, reason="node is not here: make test-browser runs every module"
)
def test_every_module_parses(tmp_path: Path) -> None:
    for name in MODULES:
        (tmp_path / name).with_suffix(".mjs").write_text(STATIC[name])
    for path in sorted(tmp_path.iterdir()):
        done = subprocess.run(["node", "--check", str(path)], capture_output=True, text=True, timeout=30)
        assert done.returncode == 0, done.stderr


# ---- curves -----------------------------------------------------------------------------------------------
def diagnosed(update: int, mismatch: float) -> Diagnostics:
    tail = Tail(count=8, mean=mismatch, median=0.0, p99=0.0, max=0.0, signed=0.0)
    return Diagnostics(
        update=update,
        version=VersionId(0, update - 1),
        contract="c",
        trajectories=4,
        tokens=8,
        terms={"mismatch": tail},
        baseline=0.5,
    )


def test_a_long_run_is_thinned_and_its_outlier_stays() -> None:
    told = [metrics(update, reward=9.0 if update == 7777 else 0.25) for update in range(1, 10_001)]
    found = thinned(told, [diagnosed(update, 1e-3) for update in range(1, 10_001, 7)], 300)
    assert found.updates == 10_000
    assert len(found.items) <= 300
    assert [p.first for p in found.items[1:]] == [p.last + 1 for p in found.items[:-1]]
    assert (found.items[0].first, found.items[-1].last) == (1, 10_000)
    assert max(p.reward.high for p in found.items if p.reward) == 9.0
    assert all(p.mismatch.mean == pytest.approx(1e-3) for p in found.items if p.mismatch)
    assert sum(p.mismatch is not None for p in found.items) == len(found.items)


def test_an_update_made_again_counts_as_last_told_and_what_nobody_measured_is_null(server: Server) -> None:
    job = server.submit()
    for one in (
        metrics(1, reward=0.1),
        metrics(2, reward=0.2),
        metrics(2, reward=0.6, epoch=1),
        metrics(3, reward=None),
    ):
        server.bus.append(METRICS.at(job), one)
    server.bus.append(DIAGNOSTICS.at(job), diagnosed(2, 2e-3))
    found = server.http.get(f"/v1/jobs/{job}/curves").json()
    rewards = [p["reward"] and p["reward"]["mean"] for p in found["items"]]
    assert rewards == [0.1, 0.6, None]
    assert [p["mismatch"] and p["mismatch"]["mean"] for p in found["items"]] == [None, 2e-3, None]
    assert (found["updates"], found["baseline"]) == (3, 0.5)
    one = server.http.get(f"/v1/jobs/{job}/curves", params={"points": 1}).json()["items"]
    assert one == [{**one[0], "first": 1, "last": 3, "reward": {"low": 0.1, "mean": 0.35, "high": 0.6}}]


# ---- timelines --------------------------------------------------------------------------------------------
START = 1_788_000_000.0


def flow(server: Server, job: str, count: int) -> None:
    """A version each 10 s, active on two workers 1 s and 2 s later; a phase each 15 s, which Redis had at once."""
    for number in range(count):
        at = START + 10 * number
        worker = {f"w{i}": WorkerPath(active=at + 1 + i) for i in range(2)}
        record = VersionRecord(
            version=VersionId(0, number),
            parent=None,
            optimizer_step=number,
            contract="c",
            state="active",
            minted=at,
            active=at + 1,
            workers=worker,
        )
        server.bus.hset(VERSIONS.at(job), str(record.version), msgspec.json.encode(record))
    for seq in range(count * 10 // 15 + 1):
        at = START + 15 * seq
        message = Phase(
            seq=seq,
            mode="disjoint",
            phase="flow",
            rollout="awake",
            trainer="awake",
            gate="open",
            update=seq,
            at=at,
        )
        server.bus.call("XADD", PHASES.at(job), f"{int(at * 1000)}-0", "m", pack(message))


def test_a_long_run_is_told_in_stretches_that_leave_nothing_out(server: Server) -> None:
    job = server.submit()
    flow(server, job, 25)
    params, stretches = {"versions": 6}, list[dict[str, Any]]()
    while True:
        found = server.http.get(f"/v1/jobs/{job}/timeline", params=params).json()
        stretches.insert(0, found)
        if found["earlier"] is None:
            break
        params = {"versions": 6, "before": found["earlier"]}
    numbers = [int(v["version"].split(".")[1]) for s in stretches for v in s["versions"]]
    assert numbers == list(range(25))
    assert [s["end"] for s in stretches[:-1]] == [s["start"] for s in stretches[1:]]
    assert [s["cursor"] is None for s in stretches] == [True] * 4 + [False]
    for stretch in stretches:
        seqs = [p["seq"] for p in stretch["phases"]]
        assert seqs == list(range(seqs[0], seqs[-1] + 1))
        assert stretch["phases"][0]["at"] <= stretch["start"]
        for p in stretch["phases"]:
            assert p["until"] == (None if p["seq"] == 16 else p["at"] + 15)
        for worker in ("w0", "w1"):
            served = [s for s in stretch["served"] if s["worker"] == worker]
            assert [s["until"] for s in served[:-1]] == [s["at"] for s in served[1:]]
            assert served[-1]["until"] == (None if stretch is stretches[-1] else stretch["end"])
    assert len({s["version"] for stretch in stretches for s in stretch["served"]}) == 25


def test_the_newest_stretch_says_where_its_events_go_on(server: Server) -> None:
    job = server.submit()
    server.bus.append(METRICS.at(job), metrics(1))
    cursor = server.http.get(f"/v1/jobs/{job}/timeline").json()["cursor"]
    server.bus.append(METRICS.at(job), metrics(2))
    server.set_state(job, "succeeded")
    with server.http.stream("GET", f"/v1/jobs/{job}/events", headers={"last-event-id": cursor}) as answer:
        told = [line for line in answer.iter_lines() if line.startswith("data: ") and '"update"' in line]
    assert len(told) == 1
    assert '"update":2' in told[0]


def test_a_job_without_a_version_has_an_empty_timeline_and_strange_bounds_are_refused(server: Server) -> None:
    job = server.submit()
    found = server.http.get(f"/v1/jobs/{job}/timeline").json()
    assert (found["start"], found["phases"], found["versions"], found["earlier"]) == (None, [], [], None)
    for before in ("0.7", "x", "0.0.0"):
        body = problem(server.http.get(f"/v1/jobs/{job}/timeline", params={"before": before}), 422)
        assert body["errors"][0]["path"] == "before"


# ---- tokens -----------------------------------------------------------------------------------------------
def test_every_token_is_told_in_pages(server: Server) -> None:
    job = server.submit(batch={"groups": 1, "group_size": 2}, schedule={"max_lag": 5})
    made = publish(server, job, 0)
    write_update(server.settings.job_dir(job), job, 9, [row(t) for t in made])
    path = f"/v1/jobs/{job}/trajectories/{made[0].trajectory}/tokens"
    items: list[dict[str, Any]] = []
    after: int | None = None
    while True:
        page = server.http.get(path, params={"limit": 4} | ({} if after is None else {"after": after})).json()
        items += page["items"]
        after = page["next"]
        if after is None:
            break
    assert page["total"] == len(items) == 11
    assert [item["position"] for item in items] == list(range(11))
    assert "".join(item["kind"][0] for item in items) == "pppsssoosss"
    sampled = [item for item in items if item["kind"] == "sampled"]
    assert [item["index"] for item in sampled] == list(range(6))
    assert [item["version"] for item in sampled] == ["0.7"] * 4 + ["0.8"] * 2
    assert [item["span"] for item in sampled] == [0] * 4 + [1] * 2
    assert [item["loss_mask"] for item in sampled] == [1, 1, 1, 1, 1, 0]
    others = [item for item in items if item["kind"] != "sampled"]
    assert all(item[name] is None for item in others for name in ("index", "version", "ratio", "lag"))
    beyond = server.http.get(path, params={"after": 10}).json()
    assert (beyond["items"], beyond["next"]) == ([], None)
    one = server.http.get(f"{path}/{sampled[4]['index']}").json()
    assert (sampled[4]["behaviour_logprob"], sampled[4]["id"]) == (
        one["behaviour_logprob"],
        one["token"]["id"],
    )


def test_a_ratio_that_no_float_holds_is_infinite() -> None:
    assert ratio(-1.0, -1.0) == 1.0
    assert ratio(0.0, -1e9) == float("inf")
    assert ratio(-1e9, 0.0) == 0.0


def test_texts_of_tokens_add_up_to_the_text() -> None:
    text = token_texts(MODELS, "tiny-moe", [6, 7, 5, 8])
    assert text is not None
    assert all(len(one) == 1 for one in text)
    assert text[2] == " "
    assert token_texts(MODELS, "no-such-model", [1]) is None


@pytest.mark.parametrize(("dtype", "width"), [("u1", 1), ("u2", 2)])
def test_routes_are_those_of_the_position_that_made_the_token(dtype: Any, width: int) -> None:
    plain = trajectory("j0123456789", 0, 0)
    ids = array("B" if width == 1 else "H", range(10 * 2 * 2))
    routed: Trajectory = msgspec.structs.replace(
        plain, expert_ids=ids.tobytes(), expert_shape=(10, 2, 2), expert_dtype=dtype
    )
    assert routes_at(routed, 3) == [[8, 9], [10, 11]]
    assert routes_at(plain, 3) is None
