"""`submit_and_watch`: a job from the form to its end, as somebody at the page sees it; the gateway dies on the way."""

from __future__ import annotations

import os

import msgspec
from playwright.sync_api import FilePayload, Page, Request, expect
from stack import Stack

UPDATES = 40 if os.environ.get("SYNCLINE_PICTURES") else 12  # a picture of a reward has to show it rise
SPEC = f"""name = "watched"

[model]
name = "tiny-moe"

[task]
environment = "characters"
options = {{ game = "kind", length = 48, alphabet = "ab12" }}

[sampling]
max_tokens = 48

[batch]
groups = 4
group_size = 8

[optimizer]
lr = 1e-2
warmup = 3

[schedule]
mode = "disjoint"
updates = {UPDATES}
max_lag = 2
in_flight = "in_place"

[rollout]
workers = 2
pace = [0.5, 0.5]
"""


class Watched(msgspec.Struct, frozen=True, kw_only=True):
    """What was seen of a job.

    faults   what the form said of a wrong spec
    states   states of the job in the order in which the page showed them
    resumed  `Last-Event-ID` of each time that the page asked for the events, "" for none
    """

    id: str
    faults: str
    states: list[str]
    resumed: list[str]
    ledger: dict[str, int]


def submit_and_watch(page: Page, stack: Stack) -> Watched:
    """Submit through the form, kill the gateway once updates were made, and watch until the page says how it ended."""
    resumed: list[str] = []

    def asked(request: Request) -> None:
        if request.url.endswith("/events"):
            resumed.append(request.headers.get("last-event-id", ""))

    page.on("request", asked)
    page.goto(stack.url)
    page.get_by_role("link", name="Submit", exact=True).click()
    text = page.get_by_label("Or write the spec here")
    expect(text).not_to_be_empty()
    text.fill(SPEC.replace(f"updates = {UPDATES}", "updates = 0\nupdate = 12"))
    page.get_by_role("button", name="Submit").click()
    faults = page.locator(".faults li")
    expect(faults).to_have_count(2)
    told = "\n".join(faults.all_inner_texts())
    chosen: FilePayload = {"name": "spec.toml", "mimeType": "application/toml", "buffer": SPEC.encode()}
    page.get_by_label("Choose a file").set_input_files(chosen)
    expect(text).to_have_value(SPEC)
    page.get_by_role("button", name="Submit").click()
    page.wait_for_url("**/ui#/job/*")
    id = page.url.rpartition("/")[2]
    page.evaluate(_NOTE_STATES)
    # the job itself gives its workers three minutes to come up
    page.wait_for_function("() => document.querySelector('.sub progress')?.value >= 1", timeout=200_000)
    expect(page.locator(".line")).to_have_text("live")
    before = len(resumed)
    stack.kill("gateway")
    expect(page.locator(".line")).to_have_text("reconnecting", timeout=30_000)
    expect(page.locator(".line")).to_have_text("ended", timeout=180_000)
    assert len(resumed) > before
    states = page.evaluate("() => window.seen")
    rows = page.get_by_role("table", name="Trajectories by state").locator("tbody tr").all_inner_texts()
    ledger = {name: int(count) for name, count in (row.split() for row in rows)}
    return Watched(id=id, faults=told, states=states, resumed=resumed, ledger=ledger)


_NOTE_STATES = """() => {
  window.seen = [];
  const note = () => {
    const state = document.querySelector(".sub .state")?.textContent;
    if (state && state !== window.seen.at(-1)) window.seen.push(state);
  };
  note();
  new MutationObserver(note).observe(document.getElementById("main"), { childList: true, subtree: true });
}"""
