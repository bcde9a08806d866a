"""The table of recipes in `docs/precision.md`: `python -m syncline.contract.precision_page < docs/precision.md`."""

from __future__ import annotations

import sys

from syncline.contract.precision_trace import COMPONENTS
from syncline.contract.precision_words import components
from syncline.contract.recipes import RECIPES

BEGIN, END = "<!-- recipes: generated -->\n", "<!-- recipes: end -->\n"


def table() -> str:
    """One row per recipe, one column per component."""
    rows = [f"| recipe | {' | '.join(COMPONENTS)} |", f"|---|{'---|' * len(COMPONENTS)}"]
    for name, contract in sorted(RECIPES.items()):
        said = components(contract)
        rows.append(f"| `{name}` | {' | '.join(said[part] for part in COMPONENTS)} |")
    return "\n".join(rows) + "\n"


def with_table(text: str) -> str:
    """`text` with its generated part made anew. Raises `ValueError` for a text without the two marks."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"the marks {BEGIN.strip()} and {END.strip()} are not both there")
    return f"{before}{BEGIN}\n{table()}\n{END}{after}"


if __name__ == "__main__":
    sys.stdout.write(with_table(sys.stdin.read()))
