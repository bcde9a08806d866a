"""What a study shows. In short: the findings that need no learning. In full (`long`): what plain trainers lose."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from syncline.lab.cell import run
from syncline.lab.findings import findings
from syncline.lab.pair import one_thread
from syncline.lab.records import Order, Point

SYNCLINE = Path(sys.executable).with_name("syncline")


@pytest.mark.parametrize(
    ("recipe", "matched"), [("unified_fp8", "real"), ("int4_qat_w4a16", "forward_qdq")], ids=["fp8", "int4"]
)
def test_quantised_forwards_agree_with_rollout_and_leave_bf16(
    recipe: str, matched: str, tmp_path: Path
) -> None:
    """The seed's two findings, from the first updates on."""
    one_thread()
    told: list[Point] = []
    cells = []
    for variant in ("unquantised", "plain", matched):
        order = Order(recipe=recipe, variant=variant, seed=0, updates=3, groups=8, every=1)
        folder = tmp_path / variant
        folder.mkdir()
        cells.append(run(order, folder, told.append))
    assert len(told) == 9
    yardstick, plain, quantised = findings(cells)
    assert quantised.kl_rollout < plain.kl_rollout / 1000
    assert quantised.gap_mean < plain.gap_mean / 100
    assert yardstick.gap_mean < 1e-5
    # one is the BF16 forward itself; the other moved by quantisation alone, and by about what plain misses rollout
    assert (yardstick.kl_same, plain.kl_same) == (0, 0)
    assert plain.kl_rollout / 3 < quantised.kl_same < plain.kl_rollout * 3


@pytest.mark.long
@pytest.mark.timeout(5400)
@pytest.mark.parametrize("name", ["int4", "mxfp4", "nvfp4"])
def test_a_matched_trainer_learns_more(name: str, tmp_path: Path) -> None:
    """120 updates, two seeds: QDQ is at least 0.05 above plain in reward. About 4 cell-minutes on a quiet core."""
    command = [str(SYNCLINE), "study", name, "--variants", "plain,qdq", "--seeds", "0,1", "--json"]
    done = subprocess.run(
        [*command, "--out", str(tmp_path)], capture_output=True, text=True, stdin=subprocess.DEVNULL
    )
    assert done.returncode == 0, done.stderr
    plain, qdq = json.loads(done.stdout)["findings"]
    assert (plain["variant"], qdq["variant"]) == ("plain", "qdq")
    assert qdq["reward"] >= plain["reward"] + 0.05
    assert qdq["kl_rollout"] < plain["kl_rollout"] / 1000
    assert qdq["kl_same"] > plain["kl_same"] == 0
