"""`python tests/ladder/matrix.py`: write the localization matrix of `docs/ladder.md` from the named defects."""

from __future__ import annotations

from pathlib import Path

from defects import DEFECTS

from syncline.lab.ladder.climb import LEVELS
from syncline.lab.ladder.records import TITLES

PAGE = Path(__file__).parents[2] / "docs" / "ladder.md"
BEGIN, END = "<!-- matrix -->", "<!-- end of matrix -->"


def matrix() -> str:
    """Defect by level: `.` holds, `F` fails and ends the climb. `test_localization.py` sees that it is so."""
    levels = list(LEVELS)
    lines = [
        f"| defect | recipe | {' | '.join(str(level) for level in levels)} |",
        f"|---|---|{'---|' * len(levels)}",
    ]
    for defect in DEFECTS:
        cells = ["." if n < defect.level else "F" if n == defect.level else "" for n in levels]
        lines.append(f"| {defect.name} | `{defect.recipe}` | {' | '.join(cells)} |")
    return "\n".join(lines)


def level_table() -> str:
    """Each level with what a failure there localizes."""
    rows = [f"| {n} | {name} | {what} |" for n, (name, what) in TITLES.items() if n in LEVELS]
    return "\n".join(["| level | compares | a failure localizes |", "|---|---|---|", *rows])


def page(old: str) -> str:
    """The page with its tables made anew."""
    before, rest = old.split(BEGIN)
    return f"{before}{BEGIN}\n\n{level_table()}\n\n{matrix()}\n\n{END}{rest.split(END)[1]}"


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text()))
