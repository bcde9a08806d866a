"""Validations as folders: numbers that no two get, and what state is read from what lies there."""

from __future__ import annotations

import threading
from pathlib import Path

import msgspec
import pytest

from syncline.contract.validation import (
    LOCK,
    REPORT,
    Check,
    Report,
    Result,
    ValidationProgress,
    ValidationRequest,
    Why,
)
from syncline.runtime import validations


def request(number: int, why: Why = "asked", at: float = 0.0) -> ValidationRequest:
    return ValidationRequest(job="j0123456789", number=number, levels=(1, 2), why=why, spec="{}", at=at)


def begun(folder: Path, why: Why = "asked", found: float | None = None) -> int:
    """A validation; `found`: its report's only figure, of which at most 1 is right."""
    number = validations.begin(folder, lambda n: request(n, why)).number
    if found is not None:
        check = Check(name="gap", found=found, bound=1.0, source="a test")
        result = Result(level=2, checks=(check,), seconds=1.0)
        report = Report(recipe="bf16", model="tiny", contract="c", seed=0, results=(result,))
        (validations.folder_of(folder, number) / REPORT).write_bytes(msgspec.json.encode(report))
    return number


def state(folder: Path, number: int, alive: bool | None = None) -> str:
    view = validations.look(folder, number, alive)
    assert view is not None
    return view.state


def test_no_two_get_one_number(tmp_path: Path) -> None:
    found: list[int] = []
    threads = [threading.Thread(target=lambda: found.append(begun(tmp_path))) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(found) == list(range(1, 17)) == validations.numbers(tmp_path)


def test_the_state_is_what_lies_there(tmp_path: Path) -> None:
    number = begun(tmp_path)
    assert validations.look(tmp_path, number + 1) is None
    assert [state(tmp_path, number, alive) for alive in (True, False, None)] == [
        "running",
        "interrupted",
        "interrupted",
    ]
    with validations.climbing(tmp_path, number) as place:
        assert place is not None
        with validations.climbing(tmp_path, number) as second:
            assert second is None, "one process at a time"
        validations.note(place, ValidationProgress(results=(), now=2))
        view = validations.look(tmp_path, number)
        assert view is not None
        assert (view.state, view.now) == ("running", 2)
        validations.broken(place, "no such model")
    assert not (place / validations.SCRATCH).exists()
    assert state(tmp_path, number) == "broken"
    with validations.climbing(tmp_path, number):
        assert state(tmp_path, number) == "running", "begun again, what was said before is gone"
    validations.cancel(tmp_path, number)
    assert state(tmp_path, number) == "cancelled"


def test_a_process_that_has_not_begun_yet_is_waited_for_a_while(tmp_path: Path) -> None:
    validations.begin(tmp_path, lambda n: request(n, at=4e9))
    assert state(tmp_path, 1) == "running"
    assert state(tmp_path, 1, alive=False) == "interrupted"
    (validations.folder_of(tmp_path, 1) / LOCK).touch()
    assert state(tmp_path, 1) == "interrupted"


@pytest.mark.parametrize(
    ("found", "says"), [(0.5, "holds"), (2.0, "fails"), (float("inf"), "fails"), (float("nan"), "fails")]
)
def test_a_report_says_how_it_ended(tmp_path: Path, found: float, says: str) -> None:
    view = validations.look(tmp_path, begun(tmp_path, found=found))
    assert view is not None
    assert view.state == says
    assert view.boundary == ("" if says == "holds" else "level 2 (quantizer and converter)")


def test_of_versions_that_held_the_newest_are_kept_and_all_else_stays(tmp_path: Path) -> None:
    asked, failed = begun(tmp_path, found=0.5), begun(tmp_path, "before_active", found=2.0)
    held = [begun(tmp_path, "before_active", found=0.5) for _ in range(5)]
    validations.prune(tmp_path, 2)
    assert validations.numbers(tmp_path) == [asked, failed, *held[-2:]]


def test_what_cannot_be_read_is_named(tmp_path: Path) -> None:
    number = begun(tmp_path, found=0.5)
    (validations.folder_of(tmp_path, number) / REPORT).write_bytes(b"{")
    with pytest.raises(ValueError, match=r"validations/1/validation\.json"):
        validations.look(tmp_path, number)
