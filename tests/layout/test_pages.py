"""Generated pages are as their source says."""

from __future__ import annotations

from pathlib import Path

from syncline.contract.keys_page import page

ROOT = Path(__file__).resolve().parents[2]


def test_the_page_of_keys_is_up_to_date() -> None:
    assert (ROOT / "docs" / "keys.md").read_text() == page(), "run python -m syncline.contract.keys_page"
