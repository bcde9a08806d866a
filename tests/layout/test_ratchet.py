"""Sizes may only shrink: files of about 300 lines, functions of about 50, loops of at most 40.

An exception is named with its present size. When it shrinks, lower the number; nothing may be added lightly.
"""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PORTIONS = ("services", "rollout_svc", "trainer_svc", "sync_svc", "scheduler", "lab")
SOURCES = sorted(f for portion in PORTIONS for f in (ROOT / portion).rglob("*.py"))

FILE_LIMIT = 300
FUNCTION_LIMIT = 50
LOOP_LIMIT = 40

LONG_FILES: dict[str, int] = {
    "services/syncline/contract/streams.py": 456,  # a table: every key once, in one place
}
LONG_FUNCTIONS: dict[str, int] = {}


def _lines(path: Path) -> int:
    return len(path.read_text().splitlines())


def test_files_do_not_grow() -> None:
    allowed = {name: size for name, size in LONG_FILES.items()}
    too_long = {
        name: size
        for path in SOURCES
        if (size := _lines(path)) > allowed.get(name := path.relative_to(ROOT).as_posix(), FILE_LIMIT)
    }
    assert not too_long


def test_functions_do_not_grow() -> None:
    too_long = {}
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                name = f"{path.relative_to(ROOT).as_posix()}:{node.name}"
                size = (node.end_lineno or node.lineno) - node.lineno + 1
                if size > LONG_FUNCTIONS.get(name, FUNCTION_LIMIT):
                    too_long[name] = size
    assert not too_long


def test_loops_fit_one_screen() -> None:
    """In a `loop.py`, each function that holds a `while` is a loop: at most 40 lines, under a four-line heading."""
    for path in (p for p in SOURCES if p.name == "loop.py"):
        tree = ast.parse(path.read_text())
        heading = (ast.get_docstring(tree) or "").lower()
        for word in ("consumes", "produces", "waits for", "unblocked by"):
            assert word in heading, f"{path.relative_to(ROOT)}: the heading does not say what it {word!r}"
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef) and any(isinstance(n, ast.While) for n in ast.walk(node)):
                size = (node.end_lineno or node.lineno) - node.lineno + 1
                assert size <= LOOP_LIMIT, f"{path.relative_to(ROOT)}:{node.name} has {size} lines"


def test_exceptions_are_still_needed() -> None:
    """An entry whose file or function no longer exceeds the limit is removed from the list."""
    for name, size in LONG_FILES.items():
        assert FILE_LIMIT < _lines(ROOT / name) <= size, name
