"""The frozen base of a LoRA job on one rank: its digest from loading to unloading, and that of the whole base."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor


class FrozenPart:
    """What this rank holds of the base, `tensors` (live), and the digest of all of it, the same on every rank.

    whole   checkpoint name -> the full tensor as the base was made of, before it was cut
    """

    def __init__(self, tensors: Mapping[str, Tensor], whole: Mapping[str, Tensor]) -> None:
        self._tensors = dict(tensors)
        self.whole = digest_of(whole)
        self._loaded = digest_of(self._tensors)

    def moved(self) -> str:
        """What is wrong with this rank's part, if it is not what it was when it was loaded; else empty."""
        now = digest_of(self._tensors)
        same = now == self._loaded
        return "" if same else f"the frozen base was {self._loaded} when it was loaded and is {now} now"


def anywhere(here: bool) -> bool:
    """Whether it is so on any rank. All of them ask, so that none goes on alone into a collective."""
    if dist.get_world_size() == 1:
        return here
    flag = torch.tensor(int(here))
    if torch.cuda.is_available():
        flag = flag.cuda()
    dist.all_reduce(flag, op=dist.ReduceOp.MAX)
    return bool(flag)


def digest_of(tensors: Mapping[str, Tensor]) -> str:
    """sha256 hex over names, dtypes, shapes and bytes as they are held."""
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
