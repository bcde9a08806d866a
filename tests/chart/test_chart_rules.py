"""The Prometheus rules of chart and compose file: their syntax, what makes each fire, and that their series exist."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from chart_tools import CHART, ROOT, promtool, ran
from rendered import named, render

from syncline.gateway.metrics_names import METRICS

RULES = CHART / "rules.yaml"
UNIT = Path(__file__).with_name("rules_test.yaml")


def rules() -> list[dict[str, Any]]:
    return [rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]]


def judged(folder: Path, text: str) -> tuple[int, str]:
    """Run the unit tests over rules with this text."""
    (folder / "rules.yaml").write_text(text)
    test = folder / "test.yaml"
    test.write_text(UNIT.read_text().replace("RULES", str(folder / "rules.yaml")))
    return ran(promtool(), "test", "rules", test)


def test_the_rules_are_valid() -> None:
    code, said = ran(promtool(), "check", "rules", RULES)
    assert code == 0, said
    assert f"{len(rules())} rules found" in said


def test_each_alert_fires_when_it_should(tmp_path: Path) -> None:
    code, said = judged(tmp_path, RULES.read_text())
    assert code == 0, said


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("syncline_redis_up == 0", "syncline_redis_up == 2"),
        (
            "increase(syncline_conservation_violations_total[10m]) > 0",
            "syncline_conservation_violations_total >= 0",
        ),
        ("(syncline_lag_bound + 1)", "syncline_lag_bound"),
        ('syncline_job_info{state="running"}', "syncline_job_info"),
        ("> 0.01", "> 0.5"),
    ],
)
def test_a_wrong_rule_fails_its_test(tmp_path: Path, old: str, new: str) -> None:
    """The unit tests can fail: a rule that never fires, one that always does, one whose bound is off by one."""
    text = RULES.read_text()
    assert text.count(old) == 1
    code, said = judged(tmp_path, text.replace(old, new))
    assert code != 0
    assert "FAILED" in said


def test_every_alert_is_judged() -> None:
    cases = yaml.safe_load(UNIT.read_text())["tests"]
    fired = {c["alertname"] for case in cases for c in case.get("alert_rule_test", ()) if c.get("exp_alerts")}
    silent = {
        c["alertname"] for case in cases for c in case.get("alert_rule_test", ()) if not c.get("exp_alerts")
    }
    alerts = {rule["alert"] for rule in rules() if "alert" in rule}
    assert alerts == fired
    assert alerts <= silent


def exported() -> dict[str, tuple[str, ...]]:
    """Sample name -> labels, of all that the gateway serves about jobs."""
    found = {}
    for metric in METRICS:
        if metric.kind == "counter":
            found[f"{metric.name}_total"] = metric.labels
        elif metric.kind == "histogram":
            found[f"{metric.name}_bucket"] = (*metric.labels, "le")
        else:
            found[metric.name] = metric.labels
    return found


def test_rules_ask_for_what_is_exported() -> None:
    recorded = {rule["record"] for rule in rules() if "record" in rule}
    known = exported()
    for rule in rules():
        for name in re.findall(r"\bsyncline[a-z0-9_:]*", rule["expr"]):
            assert name in known or name in recorded, f"{name} in {rule.get('alert', rule.get('record'))}"
        for name, labels in re.findall(r"\b(syncline_[a-z0-9_]+)\{([^}]*)\}", rule["expr"]):
            asked = re.findall(r"(\w+)\s*(?:=|!=|=~|!~)", labels)
            assert set(asked) <= set(known[name]), name


def test_severities_are_three() -> None:
    found = {rule["labels"]["severity"] for rule in rules() if "alert" in rule}
    assert found == {"critical", "warning", "info"}


def test_the_chart_carries_the_same_rules() -> None:
    assert named(render(), "PrometheusRule", "rel-syncline")["spec"] == yaml.safe_load(RULES.read_text())


def test_compose_scrapes_with_the_same_rules(tmp_path: Path) -> None:
    text = (ROOT / "compose" / "prometheus.yaml").read_text()
    (tmp_path / "metrics_token").write_text("t")
    here = text.replace("/etc/prometheus/rules.yaml", str(RULES)).replace(
        "/run/secrets/metrics_token", str(tmp_path / "metrics_token")
    )
    assert here.count(str(tmp_path)) == here.count(str(RULES)) == 1
    (tmp_path / "prometheus.yaml").write_text(here)
    code, said = ran(promtool(), "check", "config", tmp_path / "prometheus.yaml")
    assert code == 0, said
