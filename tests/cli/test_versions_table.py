"""`syncline versions`: what is read from a version's record, and a table that fits 100 columns."""

from __future__ import annotations

import io
import json

import msgspec
import pytest
from rich.console import Console

from syncline.contract.pulled import Pulled
from syncline.contract.version_path import VersionId, VersionRecord, WorkerPath
from syncline.scheduler import cli_session
from syncline.scheduler.cli_paths import VERSION_COLUMNS, version_row
from syncline.scheduler.cli_session import show_table


def record(number: int = 123) -> VersionRecord:
    """A version over http by deltas, active on two of three workers."""
    pulled = [
        Pulled(kind="http", seconds=0.25, full=1_000_000, deltas=234_567, held=90_000_000),
        Pulled(kind="http", seconds=0.5, full=91_234_567),
    ]
    return VersionRecord(
        version=VersionId(0, number),
        parent=VersionId(0, number - 1),
        optimizer_step=number,
        contract="c",
        state="active",
        digest="9f" * 32,
        nbytes=991_234_567,
        changed_bytes=95_000_000,
        changed_share=0.0125,
        delta_bytes=1_234_567,
        minted=100.0,
        converted=100.2,
        published=100.25,
        active=101.0,
        workers={
            "w0": WorkerPath(staged=100.5, verified=100.6, active=101.0, pause_ms=3.25, pulled=pulled[0]),
            "w1": WorkerPath(staged=100.7, verified=100.875, active=100.9, pause_ms=12.5, pulled=pulled[1]),
            "w2": WorkerPath(reason="tensor w: blob"),
        },
    )


def shown(record: VersionRecord) -> dict[str, str]:
    told = json.loads(msgspec.json.encode(record))
    told["version"] = str(record.version)
    return dict(zip(VERSION_COLUMNS, version_row(told), strict=True))


def test_a_row_says_how_a_version_came_to_the_workers() -> None:
    assert shown(record()) == {
        "version": "0.123",
        "state": "active",
        "convert": "0.25 s",
        "stage": "0.625 s",
        "commit": "0.125 s",
        "on": "2",
        "size": "991.2 MB",
        "changed": "1.25 %",
        "delta": "1.2 MB",
        "pulled": "91.2 MB",
        "pause": "12.5 ms",
    }


def test_what_is_not_known_is_a_dash() -> None:
    bare = VersionRecord(version=VersionId(1, 0), parent=None, optimizer_step=0, contract="c", state="minted")
    row = shown(bare)
    assert {name: row[name] for name in ("on", "size")} == {"on": "0", "size": "0 B"}
    named = {"version", "state", "on", "size"}
    assert {row[name] for name in VERSION_COLUMNS if name not in named} == {"-"}


def test_a_rolling_version_is_active_before_the_last_worker_has_verified_it() -> None:
    early = record()
    early.active = 100.65
    assert shown(early)["commit"] == "-"


def test_the_table_fits_a_hundred_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    out = io.StringIO()
    monkeypatch.setattr(cli_session, "show", Console(file=out, width=200).print)
    wide = record(100_000)
    wide.state = "published"
    show_table(list(VERSION_COLUMNS), [list(shown(wide).values())])
    assert max(map(len, out.getvalue().splitlines())) <= 100
    assert "91.2 MB" in out.getvalue()
