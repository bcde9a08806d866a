"""Cases that once were not survived, each with the seed that found it."""

from __future__ import annotations

from pathlib import Path

import pytest
from cases import run
from field import Field, Worker, spec_of
from tally import Recorded

FOUND = (
    ("harm:Redis comes back a moment older", 1),
    ("harm:Redis comes back a moment older", 505065623),
    ("harm:Redis comes back a moment older", 859589524),
    ("harm:Redis comes back a moment older", 859589530),
    ("harm:Redis comes back a moment older", 666500810),
    ("harm:the script cache is emptied", 69705451),
)


@pytest.mark.long
@pytest.mark.parametrize(("case", "seed"), FOUND)
def test_it_is_survived(redis_url: str, case: str, seed: int) -> None:
    recorded = Recorded(seed=seed)
    run(case, seed, recorded, redis_url)
    assert recorded.injections > 0
    assert not recorded.failures


def test_the_group_goes_while_a_worker_keeps_its_items(redis_url: str, job: str, tmp_path: Path) -> None:
    """It finds that nothing is its own any more; what it held is delivered again, to whoever reads first."""
    field = Field(redis_url, job, tmp_path, spec_of())
    field.feed()
    worker = Worker(field, "w2", idle=0.0)
    worker.intake.take(4)
    held = set(worker.intake.held)
    assert len(held) == 4
    key = worker.intake._key
    field.bus.call("XGROUP", "DESTROY", key, "rollout")
    assert set(worker.intake.keep_alive()) == held
    assert not worker.intake.held
    worker.intake.take(4)
    assert set(worker.intake.held) == held
    field.close()
