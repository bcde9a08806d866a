"""The pages say what was recorded, and name tests that exist."""

from __future__ import annotations

import re

import tally
from tally import PAGE, ROOT


def test_the_page_is_made_from_the_last_record() -> None:
    made = "run make chaos, or python -c 'import tally; tally.PAGE.write_text(tally.page(tally.load()))' in tests/chaos"
    assert PAGE.read_text() == tally.page(tally.load()), made


def test_the_record_is_of_enough_and_nothing_was_lost_or_repeated() -> None:
    recorded = tally.load()
    assert recorded.injections >= 500
    assert not recorded.failures
    for row in recorded.rows:
        assert row.survived == row.injections, row
        assert row.lost == row.repeated == 0, row


def test_every_test_that_a_page_names_is_there() -> None:
    there = set()
    for path in (ROOT / "tests").rglob("*.py"):
        there.update(re.findall(r"^\s*(?:async )?def (test_\w+)", path.read_text(), flags=re.MULTILINE))
    for page in (ROOT / "docs" / "cases.md", PAGE):
        named = {name for name in re.findall(r"`(test_\w+)(?:\[[^`]*\])?`", page.read_text())}
        assert named, page
        assert named <= there, f"{page.name}: {sorted(named - there)}"
