"""A rank that dies, freezes or hangs fails the step with its name, inside the job's deadline."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from conformance.trainer_engine import MODELS, samples

pytest.importorskip("megatron.core", reason="the extra `megatron` is not installed")

from ranked import TOPOLOGIES, end_followers, spec

from syncline.contract.sharding.grid import Grid
from syncline.trainer.engines.megatron import ranks
from syncline.trainer.engines.megatron.engine import MegatronEngine
from syncline.trainer.engines.megatron.ranks import SILENT, Group, RankLost

DEADLINE = 8.0
GRACE = 2 * SILENT
"""Seconds that rank 0 may take to find out who it was, after its own collective has failed."""


@pytest.fixture(autouse=True, scope="module")
def no_followers_left() -> Iterator[None]:
    yield
    end_followers()


def awake(topology: str, folder: Path, deadline: float = DEADLINE) -> MegatronEngine:
    engine = MegatronEngine(spec(TOPOLOGIES[topology] | {"deadline": deadline}), MODELS, folder)
    engine.wake()
    return engine


def pid_of(rank: int) -> int:
    return ranks._current[0]._followers[rank].pid


def test_a_killed_rank_fails_the_step_with_its_name(tmp_path: Path) -> None:
    engine = awake("tp2", tmp_path / "a", 60.0)
    os.kill(pid_of(1), signal.SIGKILL)
    began = time.monotonic()
    with pytest.raises(RankLost, match=r"rank 1 \(pp 0, tp 1, .*ended with -9"):
        engine.step(samples(), 1)
    assert time.monotonic() - began < GRACE, "its end is seen, not waited for"
    with pytest.raises(RankLost, match="rank 1"):
        engine.step(samples(), 1)


@pytest.mark.parametrize("topology", ["tp2", "ep2", "pp2"])
def test_a_frozen_rank_fails_the_step_with_its_name_inside_the_deadline(
    topology: str, tmp_path: Path
) -> None:
    engine = awake(topology, tmp_path / "a")
    victim = pid_of(1)
    os.kill(victim, signal.SIGSTOP)
    began = time.monotonic()
    with pytest.raises(RankLost, match=r"rank 1 \(.*is silent for \d+ s"):
        engine.step(samples(), 1)
    assert time.monotonic() - began < DEADLINE + GRACE
    with pytest.raises(ProcessLookupError):
        os.kill(victim, 0)  # nobody is left frozen


DEAF = """
import sys, threading
import msgspec
from syncline.contract.sharding.grid import Grid
from syncline.trainer.engines.megatron import follower
follower._follow = lambda *_: threading.Event().wait()
follower.main(sys.argv[1], int(sys.argv[2]), msgspec.json.decode(sys.argv[3], type=Grid), float(sys.argv[4]))
"""


class WithADeafFollower(Group):
    """Its rank 1 joins, and its heart beats on, and it never takes a command up."""

    follower = (sys.executable, "-c", DEAF)


def test_a_rank_that_lives_and_does_not_come_is_named_too(tmp_path: Path) -> None:
    group = WithADeafFollower(Grid(tp=2), DEADLINE)
    began = time.monotonic()
    with pytest.raises(RankLost, match=r"rank 1 \(.*is alive and kept the others waiting for 8 s"):
        group.build(spec({"tp": 2}), MODELS, tmp_path)
    assert time.monotonic() - began < DEADLINE + GRACE + 1
    assert group._followers[1].poll() is not None
