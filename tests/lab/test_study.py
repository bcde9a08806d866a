"""`syncline study`: cells as processes, what is kept, the table and the figure. What a study finds is in test_gap*."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import msgspec
import psutil
import pytest
from waiting import lives, wait_until

from syncline.lab.figure import drawing, page
from syncline.lab.findings import Study, findings, table
from syncline.lab.records import Cell, Gap, Order, Point, finished

SYNCLINE = Path(sys.executable).with_name("syncline")
FEW = ("--groups", "2", "--variants", "unquantised", "--jobs", "1")


def _study(out: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [str(SYNCLINE), "study", *words, "--out", str(out)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, stdin=subprocess.DEVNULL)


def test_finished_cells_are_kept_and_others_run(tmp_path: Path) -> None:
    first = _study(tmp_path, "int4", "--updates", "2", "--seeds", "0", *FEW)
    assert first.returncode == 0, first.stderr
    assert first.stdout.startswith("| trainer variant")
    assert "unquantised/0 took" in first.stderr
    kept = (tmp_path / "cells" / "unquantised-seed0.json").read_bytes()

    again = _study(tmp_path, "int4", "--updates", "2", "--seeds", "0,1", *FEW, "--json")
    assert again.returncode == 0, again.stderr
    assert "unquantised/0 finished before" in again.stderr
    assert "unquantised/1 took" in again.stderr
    assert (tmp_path / "cells" / "unquantised-seed0.json").read_bytes() == kept
    told: dict[str, Any] = json.loads(again.stdout)
    assert told["seeds"] == [0, 1]
    assert len(told["findings"][0]["rewards"]) == 2
    assert (tmp_path / "study.md").read_text().count("\n") == 3


def test_an_interrupted_study_leaves_no_process_and_goes_on(tmp_path: Path) -> None:
    out = tmp_path / "out"
    command = [str(SYNCLINE), "study", "int4", "--updates", "100000", "--seeds", "0", *FEW, "--out", str(out)]
    with (tmp_path / "said").open("w") as said:
        child = subprocess.Popen(command, stdout=said, stderr=said, start_new_session=True)
    try:
        processes = wait_until(
            lambda: [
                p for p in psutil.Process(child.pid).children(True) if "syncline.lab.cell" in p.cmdline()
            ],
            60,
            "the cell's process",
        )
        wait_until(lambda: "reward" in (tmp_path / "said").read_text(), 60, "progress")
        os.killpg(child.pid, signal.SIGINT)
        assert child.wait(30) == 130
    finally:
        if child.poll() is None:
            os.killpg(child.pid, signal.SIGKILL)
    assert not any(map(lives, processes))
    assert "interrupted" in (tmp_path / "said").read_text()
    assert "Traceback" not in (tmp_path / "said").read_text()
    assert list(out.glob("cells/*.json")) == []


def test_a_cell_that_fails_is_named(tmp_path: Path) -> None:
    (tmp_path / "cells" / "unquantised-seed0.json").mkdir(parents=True)  # its result cannot be written
    done = _study(tmp_path, "int4", "--updates", "1", "--seeds", "0", *FEW)
    assert done.returncode == 1
    assert re.search(
        r"^error: cell unquantised/0 ended with 1: .*directory", done.stderr, re.MULTILINE | re.IGNORECASE
    )
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("fp8",), "unified-fp8"),
        (("int4", "--seeds", "0,0"), "different seeds"),
        (("int4", "--variants", "plain,qqq"), "no variant 'qqq'"),
    ],
)
def test_wrong_input_is_refused(words: tuple[str, ...], said: str, tmp_path: Path) -> None:
    done = _study(tmp_path, *words)
    assert done.returncode == 2
    assert said in done.stderr


def test_a_folder_that_cannot_be_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    done = _study(tmp_path / "file", "int4")
    assert done.returncode == 2
    assert f"argument --out: {tmp_path / 'file'} cannot be a folder of results" in done.stderr
    assert "Traceback" not in done.stderr


# ---- what is made of cells, from cells made by hand -------------------------------------------------------------
def _cell(variant: str, seed: int, reward: float, kl: float, same: float, updates: int = 30) -> Cell:
    order = Order(recipe="int4_qat_w4a16", variant=variant, seed=seed, updates=updates)
    points = tuple(
        Point(
            update=u,
            reward=reward if u > updates - 20 else 0.0,
            gap=Gap(tokens=4, mean=kl, median=0.0, p99=10 * kl, max=1.0, exact=0.5, kl=kl),
            clip=0.1,
            grad_norm=2.0,
            entropy=1.0,
            kl_same=same if u % 5 == 0 else None,
            kl_initial=0.3 if u % 5 == 0 else None,
        )
        for u in range(1, updates + 1)
    )
    return Cell(key=order.key(), order=order, contract="c", points=points, seconds=1.0)


def _made() -> Study:
    cells = [
        _cell("qdq", 1, 0.66, 1e-9, 0.02),
        _cell("qdq", 0, 0.64, 1e-9, 0.04),
        _cell("plain", 0, 0.5, 0.02, 0.0),
        _cell("plain", 1, 0.52, 0.02, 0.0),
    ]
    return Study(
        format="int4",
        recipe="int4_qat_w4a16",
        seeds=(0, 1),
        updates=30,
        findings=findings(cells),
        cells=tuple(cells),
    )


def test_findings_are_means_over_updates_and_seeds() -> None:
    plain, qdq = _made().findings
    assert (plain.variant, qdq.variant) == ("plain", "qdq"), "in the order of Table 5"
    assert plain.rewards == pytest.approx((0.5, 0.52)), "the last 20 updates alone"
    assert qdq.rewards == pytest.approx((0.64, 0.66)), "by seed, however cells come"
    assert qdq.reward == pytest.approx(0.65)
    assert plain.kl_same == 0.0
    assert qdq.kl_same == pytest.approx(0.03)
    assert qdq.kl_same_per_seed == pytest.approx((0.04, 0.02))
    assert plain.gap_p99 == pytest.approx(0.2)


def test_the_table_is_markdown_with_a_row_per_variant() -> None:
    lines = table(_made()).splitlines()
    assert len(lines) == 4
    assert len({line.replace("\\|", "").count("|") for line in lines}) == 1
    assert "BF16 baseline" in lines[2]
    assert "0.500 / 0.520" in lines[2]
    assert "10.0 %" in lines[2]


def test_the_figure_stands_alone_and_draws_zero_at_the_axis_end() -> None:
    html = page(_made())
    assert not re.search(r"(src|href)=|https?://|@import|url\(", html), "nothing is fetched"
    alone = ElementTree.fromstring(drawing(_made()))
    assert alone.tag == "{http://www.w3.org/2000/svg}svg"
    drawings = re.findall(r"<svg.*?</svg>", html, re.DOTALL)
    assert len(drawings) == 2
    comparison = ElementTree.fromstring(drawings[0])
    heads = [t.text for t in comparison.iter("text") if t.get("class") == "head"]
    assert heads == ["agreement: KL to rollout", "movement: KL to BF16 reference", "reward"]
    # rows: plain, qdq; columns: agreement, movement, reward; three dots each: two seeds and their mean
    x = [float(dot.get("cx", "nan")) for dot in comparison.iter("circle")]
    assert len(x) == 18
    agreement, movement = x[:6], x[6:12]
    assert max(agreement[3:]) < min(agreement[:3]), "quantised forwards agree better"
    assert max(movement[:3]) < min(movement[3:]), "and are further from BF16, where 0 is leftmost"
    shift = x[6] - x[3]  # a panel's width on: 1e-9, where the axis ends, and 0
    assert movement[0] == pytest.approx(agreement[3] + shift)


def test_only_the_very_same_order_counts_as_finished(tmp_path: Path) -> None:
    cell = _cell("plain", 0, 0.5, 0.02, 0.0)
    path = tmp_path / "cell.json"
    assert finished(path, cell.order) is None
    path.write_bytes(msgspec.json.encode(cell))
    assert finished(path, cell.order) == cell
    assert finished(path, msgspec.structs.replace(cell.order, seed=1)) is None
    assert finished(path, msgspec.structs.replace(cell.order, updates=31)) is None
    path.write_bytes(msgspec.json.encode(msgspec.structs.replace(cell, points=cell.points[:-1])))
    assert finished(path, cell.order) is None
    path.write_text("{")
    assert finished(path, cell.order) is None
