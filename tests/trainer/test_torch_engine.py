"""The torch engine passes the suite, gives its memory back, and packs without waste."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from conformance.trainer_engine import MODELS, MakeEngine, TrainerEngineSuite, spec_of
from hypothesis import given
from hypothesis import strategies as st

from syncline.contract.job import JobSpec
from syncline.trainer.engine import TrainerEngine
from syncline.trainer.engines.torch import TorchEngine
from syncline.trainer.pack import micro_batches, padding_share


class TestTorchEngine(TrainerEngineSuite):
    """The conformance suite."""

    @pytest.fixture
    def make(self, tmp_path: Path) -> MakeEngine:
        made = 0

        def build(spec: JobSpec) -> TrainerEngine:
            nonlocal made
            made += 1
            return TorchEngine(spec, MODELS, tmp_path / f"scratch{made}")

        return build

    def test_a_dead_process_s_sleep_is_not_woken(self, tmp_path: Path) -> None:
        first = TorchEngine(spec_of(), MODELS, tmp_path / "scratch")
        first.wake()
        first.sleep()
        assert any((tmp_path / "scratch").iterdir())
        second = TorchEngine(spec_of(), MODELS, tmp_path / "scratch")
        second.wake()
        assert not (tmp_path / "scratch").exists()


SLEEPER = """
import sys
from pathlib import Path
import psutil
from conformance.trainer_engine import MODELS, samples, spec_of
from syncline.trainer.engines.torch import TorchEngine
engine = TorchEngine(spec_of(sys.argv[2]), MODELS, Path(sys.argv[1]))
size = lambda: psutil.Process().memory_info().rss
baseline = size()
for turn in range(3):
    engine.wake()
    engine.step(samples(32), turn + 1)
    engine.sleep()
print(size() / baseline)
"""


@pytest.mark.parametrize("model", ["tiny-dense", "tiny-moe"])
def test_sleep_returns_memory_to_within_a_tenth_of_the_baseline(tmp_path: Path, model: str) -> None:
    tests = Path(__file__).parents[1]
    done = subprocess.run(
        [sys.executable, "-c", SLEEPER, str(tmp_path / "scratch"), model],
        cwd=tests,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) < 1.1


@given(st.lists(st.integers(1, 60), max_size=40), st.integers(1, 200))
def test_every_sequence_is_in_one_micro_batch_within_its_bound(lengths: list[int], bound: int) -> None:
    batches = micro_batches(lengths, bound)
    assert sorted(i for batch in batches for i in batch) == list(range(len(lengths)))
    for batch in batches:
        width = max(lengths[i] for i in batch)
        assert len(batch) * width <= bound or len(batch) == 1


def test_even_lengths_waste_nothing_and_uneven_ones_little() -> None:
    assert padding_share([7] * 30, micro_batches([7] * 30, 70)) == 0.0
    uneven = [1, 50] * 20
    assert padding_share(uneven, micro_batches(uneven, 500)) < 0.05
    assert padding_share(uneven, [list(range(40))]) > 0.4
