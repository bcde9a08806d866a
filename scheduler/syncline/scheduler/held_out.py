"""Work of an evaluation: each held-out prompt once, in order, and again what was lost on the way."""

from __future__ import annotations

from syncline.scheduler.feed import Feeder
from syncline.scheduler.prompts import Draw
from syncline.scheduler.saved import Watch


class HeldOut(Feeder):
    """Group g samples the held-out prompt `first + g`, once; how it ends decides nothing."""

    def draw_held_out(self, watch: Watch, first: int, groups: int) -> None:
        """Decide on so many new groups."""
        drawn = self._drawn(watch)
        drawn.pending += [Draw(watch.group + i, first + watch.group + i, 0) for i in range(groups)]
        watch.group += groups

    def note(self, watch: Watch, left: bool = False) -> None:
        """Nothing follows from outcomes."""

    def in_vain(self, watch: Watch) -> str | None:
        """Never: each prompt is asked once."""
        return None
