"""One control plane per session, one installation per test; its logs are shown when a test fails."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from control import ControlPlane
from rig import Rig


@pytest.fixture(scope="session")
def plane() -> Iterator[ControlPlane]:
    started = ControlPlane()
    try:
        yield started.start()
    finally:
        started.stop()


@pytest.fixture
def rig(plane: ControlPlane) -> Iterator[Rig]:
    made = Rig(plane)
    try:
        yield made
    finally:
        made.tell_logs()
        made.stop()
