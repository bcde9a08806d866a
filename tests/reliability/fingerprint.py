"""A trainer engine whose weights say which trajectories were used, and how often.

The policy is one matrix, a cell per trajectory. The loss of an update is minus the sum of its trajectories' cells, so
gradients are one-hot and orthogonal, and one step of SGD with rate 1 adds exactly 1 to each cell that was used. It
stands in the engine's place behind the engine's protocol; everything around it is the trainer as it is.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from syncline.contract.job import JobSpec
from syncline.contract.token_path import parse_trajectory_id
from syncline.runtime.durable import sync_file, sync_folder
from syncline.trainer.engine import Description, Sample, StepResult
from syncline.trainer.loss import Tally

GROUPS = 4096
NAME = "used"
WEIGHTS = "model.safetensors"


class FingerprintEngine:
    """`engine.TrainerEngine`. `used_GS` float32 [groups, group size]: how often each trajectory was trained on."""

    def __init__(self, spec: JobSpec, models: Path, scratch: Path) -> None:
        self._shape = (GROUPS, spec.batch.group_size)
        self.used_GS = torch.nn.Parameter(torch.zeros(self._shape))
        self._awake = False

    @property
    def memory(self) -> int:
        return 1 << 20

    @property
    def awake(self) -> bool:
        return self._awake

    def describe(self) -> Description:
        return Description("fingerprint", "cpu", self.used_GS.numel(), (NAME,), "fp32", 0)

    def wake(self) -> None:
        self._awake = True

    def sleep(self) -> None:
        self._awake = False

    def score(self, samples: Sequence[Sample], as_rollout: bool = False) -> list[array[float]]:
        return [array("f", bytes(4 * len(sample.positions))) for sample in samples]

    def free_routes(self, samples: Sequence[Sample]) -> list[Tensor] | None:
        return None

    def step(self, samples: Sequence[Sample], update: int) -> StepResult:
        if not samples:
            return StepResult((), (), None, None, Tally(), (), skipped=True)
        sgd = torch.optim.SGD([self.used_GS], lr=1.0)
        loss = self.backward([parse_trajectory_id(sample.trajectory)[1:] for sample in samples])
        self.optimize(sgd)
        sgd.zero_grad()
        weights = tuple(array("f", [1.0] * len(sample.positions)) for sample in samples)
        tokens = float(sum(len(sample.positions) for sample in samples))
        tally = Tally(tokens=tokens, ratio=tokens)
        return StepResult(tuple(self.score(samples)), weights, loss, 1.0, tally, (), skipped=False)

    def backward(self, cells: Sequence[tuple[int, int]]) -> float:
        """Gradients of minus the sum of `cells`, (group, index) each."""
        loss_ = -torch.stack([self.used_GS[group, index] for group, index in cells]).sum()
        loss_.backward()  # type: ignore[no-untyped-call]
        return float(loss_.detach())

    def optimize(self, sgd: torch.optim.SGD) -> None:
        """The optimizer's step."""
        sgd.step()

    def export(self, folder: Path, base: bool = True) -> dict[str, str]:
        folder.mkdir(parents=True, exist_ok=True)
        return {WEIGHTS: self._write(folder / WEIGHTS)}

    def save(self, folder: Path) -> None:
        self._write(folder / "weights.safetensors")
        save_file({"steps": torch.ones(1)}, folder / "optimizer.safetensors")

    def load(self, folder: Path) -> None:
        with torch.no_grad():
            self.used_GS.copy_(load_file(folder / "weights.safetensors")[NAME])

    def _write(self, path: Path) -> str:
        save_file({NAME: self.used_GS.detach()}, path)
        digest = sync_file(path)
        sync_folder(path.parent)
        return digest


def uses(folder: Path, shape: tuple[int, int]) -> dict[tuple[int, int], int]:
    """(group, index) -> how often, of an export or a checkpoint. Raises `ValueError` for a count that is none."""
    names = [name for name in (WEIGHTS, "weights.safetensors") if (folder / name).is_file()]
    used_GS = load_file(folder / names[0])[NAME]
    if tuple(used_GS.shape) != shape or not torch.equal(used_GS, used_GS.round()):
        raise ValueError(f"{folder}: these are no counts of {shape}")
    return {(int(g), int(i)): int(used_GS[g, i]) for g, i in used_GS.nonzero().tolist()}
