"""stub"""

from __future__ import annotations

from syncline.contract.events import Mode
from syncline.contract.job import JobSpec
from syncline.runtime.bus import Bus
from syncline.scheduler.stages import State


class Policy:
    """stub"""

    def __init__(self, bus: Bus, job: str, spec: JobSpec) -> None:
        pass

    def wish(self, state: State) -> Mode | None:
        """stub"""
        return None
