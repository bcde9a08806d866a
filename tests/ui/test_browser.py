"""The gateway's page in headless Chromium, over a real job: what it shows is what the REST API says."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from typing import Any

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Page, Route, expect
from stack import Stack
from watched import SPEC, UPDATES, Watched

pytestmark = [pytest.mark.browser, pytest.mark.timeout(600)]

HOSTILE = '<img src=x onerror="window.taken=1"><script>window.taken=1</script>\'"&'
Picture = Callable[[Page, str], None]


def to(page: Page, stack: Stack, place: str) -> None:
    page.goto(f"{stack.url}/ui#/{place}")


def several_spans(stack: Stack, job: str) -> dict[str, Any]:
    """The newest trained trajectory that more than one version sampled."""
    for update in range(UPDATES, 0, -1):
        found = stack.get(f"/v1/jobs/{job}/trajectories?state=trained&update={update}")
        for item in found["items"]:
            view: dict[str, Any] = stack.get(f"/v1/jobs/{job}/trajectories/{item['trajectory']}")
            if len({span["version"] for span in view["spans"]}) > 1:
                return view
    raise AssertionError("no trajectory has several versions: the test shows nothing")


def inspect(page: Page, stack: Stack, view: dict[str, Any]) -> None:
    """To the inspector by the search box; its first sampled token is chosen."""
    to(page, stack, "")
    page.get_by_label("Trajectory").fill(view["trajectory"])
    page.get_by_role("button", name="Inspect").click()
    expect(page.locator("h1")).to_have_text(view["trajectory"])
    expect(page.locator(".token[aria-selected=true]")).to_have_count(1)


def panel(page: Page) -> dict[str, str]:
    """The pairs that the panel shows of the chosen token."""
    names = page.locator(".token-panel dt").all_inner_texts()
    return dict(zip(names, page.locator(".token-panel dd").all_inner_texts(), strict=True))


# ---- submission and the job's page ------------------------------------------------------------------------
def test_a_wrong_spec_is_told_key_by_key_and_a_right_one_is_watched_to_its_end(
    job: Watched, stack: Stack
) -> None:
    line = SPEC.splitlines().index(f"updates = {UPDATES}") + 1
    assert re.search(rf"schedule\.updates should be greater than or equal to 1.*Line {line}", job.faults)
    assert re.search(r"schedule\.update is an unknown key.*did you mean schedule\.updates", job.faults)
    assert job.states[-1] == "succeeded"
    assert "running" in job.states
    told = stack.get(f"/v1/jobs/{job.id}/ledger")
    assert job.ledger == {name: told[name] for name in job.ledger}
    assert job.ledger["trained"] == UPDATES * 4 * 8


def test_events_go_on_where_they_broke_off(job: Watched) -> None:
    """The gateway was killed while the page listened; what came before is not asked for again."""
    first, *later = job.resumed
    assert first, "the page began where its timeline ended"
    assert later
    newest = [max(int(place.split("-")[0]) for place in cursor.split("_")) for cursor in job.resumed]
    assert newest == sorted(newest)
    assert newest[-1] > newest[0]


def test_plots_have_named_axes_and_the_same_figures_as_tables(
    page: Page, stack: Stack, job: Watched, picture: Picture
) -> None:
    to(page, stack, f"job/{job.id}")
    chart = page.get_by_role("img", name=re.compile("^Reward, mean reward by update"))
    expect(chart).to_be_visible()
    assert {"update", "mean reward"} <= set(chart.locator("text").all_text_contents())
    expect(page.get_by_role("img", name=re.compile("^Mismatch and staleness, .* nats"))).to_be_visible()
    page.get_by_text("Reward as a table").click()
    rows = page.get_by_role("table", name="Reward (mean reward)").locator("tbody tr").all_inner_texts()
    metrics = stack.get(f"/v1/jobs/{job.id}/metrics?limit=500")["items"]
    shown = {int(row.split()[0]): float(row.split()[1]) for row in rows}
    assert shown == {m["update"]: pytest.approx(m["reward"], rel=5e-3, abs=1e-9) for m in metrics}
    expect(page.get_by_role("img", name=re.compile("^Phases and versions"))).to_be_visible()
    served = {text for text in page.locator("svg rect title").all_text_contents() if " served " in text}
    assert {text.split()[0] for text in served} == {"w0", "w1"}
    page.get_by_text("Reward as a table").click()
    picture(page, "job")
    page.get_by_role("img", name=re.compile("^Phases and versions")).scroll_into_view_if_needed()
    picture(page, "timeline")


def test_jobs_are_listed_with_their_progress(
    page: Page, stack: Stack, job: Watched, picture: Picture
) -> None:
    to(page, stack, "")
    row = page.get_by_role("row").filter(has=page.get_by_role("link", name=job.id))
    expect(row).to_contain_text("watched")
    expect(row).to_contain_text(f"{UPDATES} / {UPDATES}")
    expect(row.locator("progress")).to_have_js_property("value", UPDATES)
    picture(page, "jobs")


# ---- the token inspector ----------------------------------------------------------------------------------
def test_each_token_shows_its_version_as_rest_tells_it(
    page: Page, stack: Stack, job: Watched, picture: Picture
) -> None:
    view = several_spans(stack, job.id)
    inspect(page, stack, view)
    hues = page.locator(".token[class*=hue-]").evaluate_all("all => all.map(one => one.className)")
    by_version: dict[str, set[str]] = {}
    for span in view["spans"]:
        by_version.setdefault(span["version"], set()).update(hues[span["start"] : span["end"]])
    assert len(hues) == len(view["logprobs"])
    assert all(len(colours) == 1 for colours in by_version.values())
    assert len(set.union(*by_version.values())) == len(by_version)
    index = view["spans"][1]["start"]
    page.locator(".token[class*=hue-]").nth(index).click()
    expect(page.locator(".token-panel h2")).to_contain_text(f"Token {index}")
    expect(page.get_by_role("table", name="On each worker, counted from minting")).to_be_visible()
    told = stack.get(f"/v1/jobs/{job.id}/trajectories/{view['trajectory']}/tokens/{index}")
    shown = panel(page)
    assert shown["Version"] == told["span"]["version"] == view["spans"][1]["version"]
    assert shown["Lag"] == str(told["lag"])
    assert shown["Worker"] == told["span"]["worker"]
    assert float(shown["Log-prob, as sampled"]) == pytest.approx(told["behaviour_logprob"], rel=1e-4)
    assert float(shown["Log-prob, trainer"]) == pytest.approx(told["trainer_logprob"], rel=1e-4)
    assert float(shown["Ratio"]) == pytest.approx(math.exp(told["gap"]), rel=1e-4)
    record = told["version"]["record"]
    rows = page.get_by_role("table", name="On each worker, counted from minting").locator("tbody tr")
    seen = {text.split()[0]: text.split() for text in rows.all_inner_texts()}
    assert seen.keys() == record["workers"].keys()
    for worker, path in record["workers"].items():
        if path["active"] is not None:
            after = path["active"] - record["minted"]
            assert f"+{after:.3f}" in seen[worker]
    page.get_by_text("Routes").click()
    first = page.get_by_role("table", name="Experts by routing layer").locator("tbody td").first
    expect(first).to_have_text(", ".join(map(str, told["routes"][0])))
    page.get_by_text("Routes").click()
    picture(page, "inspector")


def test_keys_move_from_token_to_token(page: Page, stack: Stack, job: Watched) -> None:
    view = several_spans(stack, job.id)
    inspect(page, stack, view)
    page.locator(".token[aria-selected=true]").focus()
    focused = page.locator(".token:focus")
    prompt = view["segments"][0]["end"]
    for key, place in (("ArrowRight", prompt + 1), ("ArrowRight", prompt + 2), ("ArrowLeft", prompt + 1)):
        page.keyboard.press(key)
        expect(focused).to_have_attribute("data-place", str(place))
    assert focused.evaluate("one => getComputedStyle(one).outlineStyle") == "solid"
    assert page.url.endswith("/token/1")
    page.keyboard.press("PageDown")
    start = view["spans"][1]["start"]
    expect(focused).to_have_attribute("data-place", str(prompt + start))
    expect(focused).to_have_attribute("aria-selected", "true")
    expect(focused).to_have_accessible_name(
        re.compile(f"^token {start}, .*, version {view['spans'][1]['version']}, log-prob -")
    )
    expect(page.locator("#token-version")).to_have_text(view["spans"][1]["version"])
    page.keyboard.press("Home")
    expect(focused).to_have_attribute("data-place", "0")
    expect(page.locator(".token-panel h2")).to_contain_text("prompt")
    page.keyboard.press("End")
    expect(focused).to_have_attribute("data-place", str(len(view["tokens"]) - 1))
    page.set_viewport_size({"width": 400, "height": 900})  # so that the text has several lines
    page.keyboard.press("ArrowUp")
    above = focused.bounding_box()
    page.keyboard.press("ArrowDown")
    below = focused.bounding_box()
    assert above is not None
    assert below is not None
    assert below["y"] > above["y"]
    page.reload()
    expect(page.locator(".token:focus")).to_have_attribute("aria-selected", "true")


def test_long_trajectories_and_long_runs_come_in_pages(page: Page, stack: Stack, job: Watched) -> None:
    """The same with small pages: going on past what is loaded loads more."""

    def small(route: Route) -> None:
        url = route.request.url.replace("limit=500", "limit=10")
        route.continue_(url=re.sub(r"/timeline(\?(?=before)|$)", "/timeline?versions=5&", url).rstrip("&"))

    page.route(re.compile(r"/tokens\?|/timeline"), small)
    view = several_spans(stack, job.id)
    inspect(page, stack, view)
    total = len(view["tokens"])
    expect(page.locator(".token")).to_have_count(10)
    expect(page.get_by_role("button", name=f"More tokens ({total - 10} left)")).to_be_visible()
    page.locator(".token[aria-selected=true]").focus()
    page.keyboard.press("End")
    page.keyboard.press("ArrowRight")
    expect(page.locator(".token:focus")).to_have_attribute("data-place", "10")
    expect(page.locator(".token")).to_have_count(20)
    to(page, stack, f"trajectory/{view['trajectory']}/token/{len(view['logprobs']) - 1}")
    expect(page.locator(".token:focus")).to_have_attribute("data-place", str(total - 1))
    to(page, stack, f"job/{job.id}")
    versions = page.get_by_role("table", name=re.compile("^Versions, newest first")).locator("tbody th")
    expect(versions.first).to_have_text(f"0.{UPDATES}")
    page.get_by_role("button", name="Earlier").click()
    expect(versions.first).to_have_text(f"0.{UPDATES - 5}")
    expect(versions).to_have_count(5)
    page.get_by_role("button", name="Later").click()
    expect(versions.first).to_have_text(f"0.{UPDATES}")


def test_a_job_that_redis_has_forgotten_is_shown_from_its_folder(
    page: Page, stack: Stack, another: Callable[..., str], job: Watched
) -> None:
    stack.summary(job.id)  # written by now
    url = another(database=9)
    page.goto(f"{url}/ui#/job/{job.id}")
    expect(page.locator(".line")).to_have_text("from the record")
    expect(page.locator(".sub .state")).to_have_text("succeeded")
    expect(page.get_by_role("img", name=re.compile("^Reward, .*last "))).to_be_visible()
    expect(page.get_by_role("img", name=re.compile("^Phases and versions"))).to_be_visible()
    view = several_spans(stack, job.id)
    page.goto(f"{url}/ui#/trajectory/{view['trajectory']}/token/0")
    expect(page.locator("#token-version")).to_have_text(view["spans"][0]["version"])
    expect(page.get_by_role("table", name="On each worker, counted from minting")).to_be_visible()


# ---- looks ------------------------------------------------------------------------------------------------
def test_light_and_dark(page: Page, stack: Stack, job: Watched, picture: Picture) -> None:
    def ground() -> str:
        return str(page.evaluate("() => getComputedStyle(document.body).backgroundColor"))

    page.emulate_media(color_scheme="light")
    inspect(page, stack, several_spans(stack, job.id))
    light = ground()
    page.emulate_media(color_scheme="dark")
    dark = ground()
    assert light != dark
    expect(page.get_by_role("table", name="On each worker, counted from minting")).to_be_visible()
    picture(page, "inspector-dark")
    page.get_by_label("Theme").select_option("Light")
    assert ground() == light
    page.reload()
    assert ground() == light
    page.get_by_label("Theme").select_option("System")
    assert ground() == dark


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_pages_are_accessible(page: Page, stack: Stack, job: Watched, scheme: Any) -> None:
    """No violation of WCAG 2.2 A and AA that axe knows of, on any page."""
    page.emulate_media(color_scheme=scheme, reduced_motion="reduce")
    tags = {"runOnly": ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa", "best-practice"]}
    view = several_spans(stack, job.id)
    places = {
        "": "table",
        "submit": "#spec",
        f"job/{job.id}": "svg",
        f"trajectory/{view['trajectory']}/token/0": ".token",
    }
    for place, part in places.items():
        to(page, stack, place)
        expect(page.locator(part).first).to_be_visible()
        page.wait_for_load_state("networkidle" if not place.startswith("job") else "load")
        found = Axe().run(page, options=tags)
        assert found.violations_count == 0, f"{place}: {found.generate_report()}"


# ---- who may not be trusted -------------------------------------------------------------------------------
def test_hostile_text_stays_text(page: Page, stack: Stack, job: Watched) -> None:
    """Every text that a user, a model or a tool can have written is replaced; none may become markup."""
    view = several_spans(stack, job.id)
    free = {
        *("name", "reason", "alarm", "detail", "owner", "text", "why", "finish"),
        *("digest", "worker", "hint", "message", "judge", "adapter", "context"),
    }

    def bent(value: Any) -> Any:
        if isinstance(value, dict):
            return {
                key: HOSTILE if key in free and isinstance(inner, str) else bent(inner)
                for key, inner in value.items()
            }
        return [bent(inner) for inner in value] if isinstance(value, list) else value

    def answer(route: Route) -> None:
        if route.request.url.endswith("/events"):
            route.continue_()
            return
        real = route.fetch()
        route.fulfill(response=real, body=json.dumps(bent(real.json())))

    page.route("**/v1/**", answer)
    to(page, stack, "")
    expect(page.get_by_role("cell", name=HOSTILE).first).to_be_visible()
    to(page, stack, f"job/{job.id}")
    expect(page.locator("h1")).to_have_text(HOSTILE)
    expect(page.locator("svg title").filter(has_text="served").first).to_be_attached()
    to(page, stack, f"trajectory/{view['trajectory']}/token/0")
    expect(page.locator(".token").first).to_have_text(HOSTILE)
    expect(page.get_by_role("table", name="On each worker, counted from minting")).to_be_attached()
    to(page, stack, "submit")
    page.get_by_label("Or write the spec here").fill(json.dumps({HOSTILE: HOSTILE}))
    page.get_by_role("button", name="Submit").click()
    expect(page.locator(".faults")).to_contain_text(HOSTILE)
    to(page, stack, f"trajectory/{HOSTILE.replace('/', '')}")
    expect(page.get_by_role("alert").first).not_to_be_empty()
    page.unroute_all(behavior="wait")
    assert page.locator("img").count() == 0
    assert page.evaluate("() => window.taken") is None


def test_a_token_is_asked_for_and_kept_in_the_tab(
    page: Page, another: Callable[..., str], job: Watched, picture: Picture
) -> None:
    page.goto(another(token="open sesame"))
    dialog = page.get_by_role("dialog", name="This gateway asks for a token")
    expect(dialog).to_be_visible()
    expect(page.get_by_role("link", name=job.id)).to_have_count(0)
    picture(page, "login")
    page.get_by_label("Bearer token").fill("wrong")
    page.keyboard.press("Enter")
    expect(dialog).to_contain_text("That token was refused.")
    page.get_by_label("Bearer token").fill("open sesame")
    page.get_by_role("button", name="Log in").click()
    expect(page.get_by_role("link", name=job.id)).to_be_visible()
    assert page.evaluate(
        "() => [sessionStorage.length, JSON.stringify(localStorage).includes('sesame')]"
    ) == [1, False]
    page.reload()
    page.get_by_role("link", name=job.id).click()
    expect(page.locator(".line")).to_have_text("ended")
    with page.expect_download() as download:
        page.get_by_role("button", name="Report").click()
    assert "syncline report" in download.value.path().read_text()
    page.get_by_role("button", name="Log out").click()
    expect(dialog).to_be_visible()
    assert page.evaluate("() => sessionStorage.length") == 0
