"""A seam of the tests: in processes with rollout engines, version 2 of a job keeps one tensor of what was there.

Python imports this at its start where a test puts the folder on PYTHONPATH. The bytes are right when they are read
back, and the old tensor is put over them afterwards: what a worker checks by itself finds nothing.
"""

from __future__ import annotations

import sys
from typing import Any

LADDER = "j1ab0000000"
"""The job of the ladder's own engines, whose versions count on their own."""


def install() -> None:
    from syncline.rollout.engines.weights import Weights

    original = Weights.load

    def load(self: Weights, signed: Any, manifest: Any, *rest: Any, **more: Any) -> str:
        wrong = manifest.version.number == 2 and manifest.job != LADDER and bool(self._held)
        views = {name: view for name, view in self.packed.views.items() if "k_proj" in name}
        before = {name: view.clone() for name, view in views.items()} if wrong else {}
        loaded = original(self, signed, manifest, *rest, **more)
        for name, tensor in before.items():
            views[name].copy_(tensor)
        return loaded

    Weights.load = load  # type: ignore[method-assign]


if {"syncline.rollout", "syncline.lab.validator"} & set(sys.orig_argv):
    install()
