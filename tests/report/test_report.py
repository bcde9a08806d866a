"""`report.html` shows what the summary says, asks the network for nothing, and runs nobody's markup."""

from __future__ import annotations

import re
from html.parser import HTMLParser

import msgspec
import pytest
from evidence import evidence

from syncline.contract.drawn import Lost, PromptAccount, Tally, in_words, told
from syncline.contract.version_path import WorkerPath
from syncline.gateway import report_charts as charts
from syncline.gateway.report import render

HOSTILE = "</pre><script>alert(1)</script>&\"'"
VOID = {"meta", "link", "br", "input", "circle", "rect", "line", "polyline"}


class Checked(HTMLParser):
    """Collects tags, texts and attributes, and checks that tags close in order."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str, str]] = []
        self.texts: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(tag, name, value or "") for name, value in attrs]
        closed_itself = (self.get_starttag_text() or "").endswith("/>")
        if (tag not in VOID and not closed_itself) or (tag == "rect" and not closed_itself):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag in self.open:
            assert self.open.pop() == tag, f"</{tag}> closes something else"

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def parsed(html: str) -> Checked:
    checked = Checked()
    checked.feed(html)
    checked.close()
    assert checked.open == []
    return checked


def test_every_part_of_the_report_is_there() -> None:
    found = parsed(render(evidence(30)))
    text = " ".join(found.texts)
    for heading in ("Reward", "Phases", "Versions", "Lag", "Log-prob gap", "Ledger", "Lag policy", "Samples"):
        assert heading in text
    for unit in ("Trained trajectories by lag", "in nats", "Trajectories that are being sampled"):
        assert unit in text  # what a vertical axis counts
    charts_drawn = {value for tag, name, value in found.attributes if tag == "svg" and name == "aria-label"}
    assert charts_drawn == {
        "Reward by update",
        "Trained trajectories by lag",
        "Phases over time",
        "Versions over time",
        "Log-prob gap by update",
        "Mismatch and staleness by update",
        "Trajectories in flight over time",
    }


def test_prompts_are_told_by_data_set_and_those_given_up_by_name() -> None:
    tallies = (
        Tally(name="sums", drawn=20, trained=16, filtered={"all 1": 3}, failed=1, scored=19, reward=9.5),
        Tally(name="letters", drawn=7, trained=5, expired=1, again=1, epoch=2, rested=4),
    )
    lost = (Lost("sums", 17, 2, "failed: its prompt is <too> long"),)
    account = PromptAccount(sources=tuple(map(told, tallies)), lost=lost)
    assert [source.open for source in account.sources] == [0, 1]
    text = " ".join(parsed(render(msgspec.structs.replace(evidence(), prompts=account))).texts)
    for shown in ("sums", "letters", "all 1: 3", "0.5", "prompt 17 of sums", "is <too> long"):
        assert shown in text
    assert in_words(account.sources[0]) == "20 drawn, 16 trained, 3 filtered (all 1: 3), 1 failed, reward 0.5"
    assert "Prompts" not in parsed(render(evidence())).texts


def test_the_report_asks_the_network_for_nothing() -> None:
    html = render(evidence(10))
    found = parsed(html)
    assert "script" not in found.tags
    assert [a for a in found.attributes if a[1] in ("src", "href", "action", "data", "poster")] == []
    assert not re.search(r"url\(|@import|https?://", html)


def test_texts_of_a_model_are_text() -> None:
    whole = evidence(5)
    hostile = msgspec.structs.replace(whole.texts[0], text=HOSTILE, prompt=HOSTILE)
    bad = msgspec.structs.replace(whole, name=HOSTILE, reason=HOSTILE, texts=(hostile,))
    found = parsed(render(bad))
    assert "script" not in found.tags
    assert HOSTILE in found.texts


def test_an_empty_job_renders() -> None:
    nothing = msgspec.structs.replace(
        evidence(2),
        metrics=(),
        samples=(),
        phases=(),
        versions=(),
        ledger=(),
        segments=(),
        texts=(),
        diagnostics=(),
        counts={},
    )
    assert parsed(render(nothing)).texts.count("No data yet.") == 7


def test_a_worker_that_never_served_is_drawn_without_a_stretch() -> None:
    """A job may be cancelled between a worker's staging and its first commit."""
    full = evidence(3)
    begun = tuple(
        msgspec.structs.replace(v, workers={**v.workers, "w1": WorkerPath(staged=1.0)}) for v in full.versions
    )
    found = parsed(render(msgspec.structs.replace(full, versions=begun)))
    assert any("w0 served version" in text for text in found.texts)
    assert not any("w1 served version" in text for text in found.texts)
    assert "w1" in found.texts


@pytest.mark.parametrize("values", [[0.5], [0.5, 0.5], [1e-9, 2e-9], [-3.0, 1e7], [0.0, 0.0]])
def test_axes_hold_any_range(values: list[float]) -> None:
    line = charts.Line(label="x", style="a", points=[(float(i), v) for i, v in enumerate(values)])
    drawn = charts.curves("any", [line], "update")
    ys = [
        float(y) for pair in re.findall(r'points="([^"]+)"', drawn) for y in re.findall(r",([-\d.]+)", pair)
    ]
    ys += [float(y) for y in re.findall(r'cy="([-\d.]+)"', drawn)]
    assert len(ys) == len(values)
    assert all(charts.TOP - 0.1 <= y <= charts.HEIGHT - charts.BOTTOM + 0.1 for y in ys), drawn


def test_a_gap_breaks_the_curve() -> None:
    points = [(0.0, 1.0), (1.0, 2.0), (2.0, None), (3.0, float("nan")), (4.0, 1.0), (5.0, 3.0)]
    drawn = charts.curves("any", [charts.Line(label="x", style="a", points=points)], "update")
    assert drawn.count("<polyline") == 2
