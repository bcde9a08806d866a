"""A precision contract as each component's settings: converter, trainer, SGLang, Megatron.

May live here: pure functions from contract and plan to settings, one file per component. May not live here: I/O, an
import of the component itself, or a setting that only nearly says what the contract says: that is `CannotCompile`.
"""

from __future__ import annotations


class CannotCompile(ValueError):
    """The component has no setting for what the contract says. `key` is the contract's, such as `rollout.kernel`."""

    def __init__(self, key: str, message: str) -> None:
        self.key, self.message = key, message
        super().__init__(f"{key}: {message}")
