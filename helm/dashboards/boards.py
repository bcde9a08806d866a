"""The six boards. What each number means: docs/metrics.md."""

from __future__ import annotations

from mismatch import precision
from overview import run_overview
from paths import token_path, version_path
from work import data_plane, phases

BOARDS = {
    "run-overview": run_overview,
    "version-path": version_path,
    "token-path": token_path,
    "precision": precision,
    "phases": phases,
    "data-plane": data_plane,
}
