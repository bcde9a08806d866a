"""Every defect is found at its own level: the levels before it hold, and it does not hold."""

from __future__ import annotations

import pytest
from climbs import climbed, spec_of, story
from defects import DEFECTS, Defect
from matrix import PAGE, page


@pytest.mark.parametrize("defect", DEFECTS, ids=lambda d: d.name)
def test_a_defect_is_found_at_its_own_level(defect: Defect) -> None:
    with defect.broken():
        report = climbed(defect.asked(spec_of(defect.recipe, defect.model)))
    assert report.failed_at == defect.level, story(report)
    assert report.diagnosis is not None


def test_the_page_has_the_matrix_of_these_defects() -> None:
    assert PAGE.read_text() == page(PAGE.read_text()), "run python tests/ladder/matrix.py"
