"""`python helm/dashboards/make.py`: write the chart's dashboards. `--check`: only say whether they are up to date."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from boards import BOARDS
from grafana_foundation_sdk.cog.encoder import JSONEncoder

FOLDER = Path(__file__).parent.parent / "syncline" / "dashboards"


_OF_INTERVALS = (
    "auto",
    "auto_count",
    "auto_min",
)  # the SDK gives them to every variable, Grafana's types to none


def made() -> dict[str, str]:
    """File name -> JSON."""
    files = {}
    for name, board in BOARDS.items():
        built = json.loads(JSONEncoder().encode(board().build()))
        for variable in built["templating"]["list"]:
            for key in _OF_INTERVALS:
                variable.pop(key, None)
        files[f"{name}.json"] = json.dumps(built, sort_keys=True, indent=1) + "\n"
    return files


def main() -> int:
    """Exit code."""
    files = made()
    if "--check" in sys.argv[1:]:
        there = {path.name: path.read_text() for path in FOLDER.glob("*.json")}
        stale = sorted(name for name in files.keys() | there.keys() if files.get(name) != there.get(name))
        for name in stale:
            print(f"{name} is not what helm/dashboards/make.py writes")  # noqa: T201
        return 1 if stale else 0
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (FOLDER / name).write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
