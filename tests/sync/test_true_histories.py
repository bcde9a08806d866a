"""A thousand random histories of one job: for every token, the version in its span is the one that was really read.

Real are sync's control and machine, the store, Redis, the workers' orders and the reference engine; see
`true_world.py`. The weights are made so that a token and its log-probability tell which version sampled it, and what
made the context that it attended to (`true_weights.py`). Versions are published, replaced, published again with the
same weights; blobs are damaged in the store and on the way into one buffer; answers are lost, late and repeated; orders
run out of time; sync dies before or after anything that it writes; workers come, go and come back empty; modes change;
engines sleep. In the end everything heals, and every worker must serve and sample the newest version.

    PYTHONPATH=tests:tests/sync python tests/sync/true_history.py URL SEED     one history again, with its log
"""

from __future__ import annotations

import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest
import true_weights
from true_history import Told, histories
from true_mutants import MUTANTS, Mutant

HISTORIES = 1000
PROCESSES = 2
TRIES = 40  # histories within which a mutant must be caught


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_every_token_was_sampled_by_the_version_that_its_span_names(redis_url: str, tmp_path: Path) -> None:
    spawn = multiprocessing.get_context("spawn")
    shares = [range(first, HISTORIES, PROCESSES) for first in range(PROCESSES)]
    with ProcessPoolExecutor(PROCESSES, mp_context=spawn) as pool:
        running = [
            pool.submit(histories, share, redis_url, tmp_path / str(i)) for i, share in enumerate(shares)
        ]
        told = [future.result() for future in running]
    both = Told(*(sum(part) for part in zip(*told, strict=True)))
    assert both.histories == HISTORIES
    # they were no walk in the park
    assert both.tokens > 20 * HISTORIES, both
    assert both.carried > HISTORIES // 10, both
    assert both.kills > HISTORIES, both
    assert both.refusals > HISTORIES, both


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.__name__)
def test_a_broken_rule_is_caught(mutant: Mutant, redis_url: str, tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        mutant(patch)
        with pytest.raises(AssertionError, match=r"history of seed \d+: AssertionError: w\d token"):
            histories(range(TRIES), redis_url, tmp_path)


def test_tokens_tell_versions_apart() -> None:
    """Within what any history mints, no two serials sample alike from alike contexts."""
    seen: dict[tuple[int, int], int] = {}
    for serial in range(40):
        token = true_weights.token(serial)
        alone = float(true_weights.logprobs(serial, (serial,) * 4)[token])
        mixed = float(true_weights.logprobs(serial, (serial + 1,) * 2 + (serial,) * 2)[token])
        assert abs(alone - mixed) > 1e-2
        assert seen.setdefault((token, serial // 10), serial) == serial
