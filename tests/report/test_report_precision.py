"""The report and the summary show mismatch beside staleness, the six components, and what was not measured."""

from __future__ import annotations

import re

import msgspec
import pytest
from evidence import diagnosis, evidence, tail

from syncline.contract.diagnosis import TERMS, Diagnostics
from syncline.contract.precision_trace import COMPONENTS, ComponentTrace, Use
from syncline.gateway import report_charts as charts
from syncline.gateway import report_precision as precision
from syncline.gateway.diagnosed import last_of_each, summarise_diagnostics
from syncline.gateway.report import render


def told(html: str) -> str:
    return re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", html))


def component(name: str, **held: int) -> ComponentTrace:
    use = Use(
        family="experts",
        tensors=4,
        encoded=f"E4M3 of {name}",
        operands="X codes, W codes",
        kernel="emulated codes",
        persistent="codes",
    )
    return ComponentTrace(component=name, uses=(use,), bytes=held)  # type: ignore[arg-type]


def test_terms_are_added_up_by_token_and_absent_ones_say_why() -> None:
    records = [
        diagnosis(1, terms={"mismatch": tail(1.0, count=10)}),
        diagnosis(2, terms={"mismatch": tail(4.0, count=30), "staleness": tail(0.5)}, baseline=1.5),
        diagnosis(3, terms={}, unmeasured=dict.fromkeys(TERMS, "w0 was away"), alarms=("mismatch: mean 9",)),
    ]
    s = summarise_diagnostics(records)
    assert s.updates == 2
    assert s.terms["mismatch"].mean == pytest.approx((10 + 120) / 40)
    assert (s.terms["mismatch"].tokens, s.terms["mismatch"].p99, s.terms["mismatch"].max) == (40, 16.0, 20.0)
    assert s.unmeasured["mismatch"] == "w0 was away"
    assert (s.baseline, s.alarms) == (1.5, ("update 3: mismatch: mean 9",))
    nothing = summarise_diagnostics([])
    assert nothing.terms == {}
    assert set(nothing.unmeasured) == set(TERMS)


def test_an_update_that_was_told_twice_counts_once() -> None:
    twice = [diagnosis(1, tokens=1), diagnosis(2), diagnosis(1, tokens=2)]
    assert [(r.update, r.tokens) for r in last_of_each(twice)] == [(1, 2), (2, 30)]


def test_the_report_shows_each_term_or_why_it_is_absent() -> None:
    text = told(render(evidence(12)))
    for title in precision.TITLES.values():
        assert title in text
    assert "not measured: the contract's KV cache is wide".replace("'", "&#39;") in text
    assert "not measured: the model does not route" in text
    assert "effective sample size 0.98" in text
    assert "baseline of the mismatch" in text


def test_an_alarm_stands_on_the_page() -> None:
    whole = evidence(6)
    loud = (*whole.diagnostics[:-1], diagnosis(6, alarms=("mismatch: mean 1 against a baseline of 0.001",)))
    text = told(render(msgspec.structs.replace(whole, diagnostics=loud)))
    assert "update 6: mismatch: mean 1 against a baseline of 0.001" in text
    assert "against a baseline" not in told(render(whole))


def test_all_six_components_are_listed_and_silence_is_shown() -> None:
    whole = evidence(3)
    last = msgspec.structs.replace(
        whole.metrics[-1], trace=tuple(component(n, saved_activations=2048) for n in ("fprop", "dgrad"))
    )
    active = msgspec.structs.replace(whole.versions[-1], rollout_trace=component("rollout", codes=1_234_567))
    bent = msgspec.structs.replace(
        whole, metrics=(*whole.metrics[:-1], last), versions=(*whole.versions[:-1], active)
    )
    found = precision.traces(bent.metrics, bent.versions)
    assert [trace.component for trace in found] == ["rollout", "fprop", "dgrad"]
    rows = precision.trace_rows(found)
    assert len(rows) == len(COMPONENTS)
    assert [bool(row.uses) for row in rows] == [True, True, True, False, False, False]
    text = told(render(bent))
    assert "E4M3 of fprop" in text
    assert text.count("not recorded") == 3
    assert "1,234,567" in text
    assert "saved activations" in text


def test_what_people_write_is_text() -> None:
    hostile = "<script>alert(1)</script>"
    whole = msgspec.structs.replace(
        evidence(2), diagnostics=(diagnosis(2, alarms=(hostile,), unmeasured={"answers": hostile}),)
    )
    assert hostile not in render(whole)


def test_a_logarithmic_axis_has_powers_and_no_place_for_zero() -> None:
    line = charts.Line(label="x", style="a", points=[(1, 1e-7), (2, 0.0), (3, 0.1), (4, None)])
    drawn = charts.curves("t", [line], "update", powers=True)
    assert drawn.count("<circle") == 2, "the zero between them breaks the curve"
    assert "1.0e-08" in drawn
    assert charts.curves("t", [charts.Line(label="x", style="a", points=[(1, 0.0)])], "u", powers=True).count(
        "No data yet."
    )


def test_a_record_survives_its_file() -> None:
    record = diagnosis(4, alarms=("a",))
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(record), type=Diagnostics) == record
