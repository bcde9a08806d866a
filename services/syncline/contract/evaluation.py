"""What came of an evaluation: tied to a version, its contract, and the way tokens were drawn.

Beside the job's segments lies `evaluations.jsonl`, one `Evaluation` per line, in the order in which they ended.
"""

from __future__ import annotations

from typing import Any

import msgspec

from syncline.contract.version_path import VersionId

FILE = "evaluations.jsonl"


class Guest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """An evaluation whose work a training job's workers take beside their own. Stamped by the scheduler.

    Nothing of it is begun under any other version, or once the key is gone.
    """

    job: str  # whose `work` and ledger are the evaluation's
    version: VersionId
    digest: str  # of the version's signed manifest
    groups: int
    slots: int  # of its samples that one worker runs at once while it has work of its own


class Evaluation(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One evaluation of one version. Stamped by the scheduler, once every sample has ended.

    `correct`: its reward is at least `threshold`. `unscored` samples have a record and no reward, `lost` ones have no
    record, `foreign` ones have spans of another version or contract; none of them counts as wrong. `pass_at`: of each
    k the estimate with the lower and the upper end of its 95 % interval over prompts; None: no prompt has k counted
    samples. `mean_reward`: mean over prompts of the mean of their counted samples, as a training update tells it.
    """

    job: str  # whose ledger the samples were in
    shared: bool  # sampled by the training job's own workers, beside its work
    of: str  # the training job
    version: int
    epoch: int
    digest: str  # of the version's signed manifest
    contract: str  # digest of the precision contract
    model: str
    prompts: int  # asked
    samples: int  # of each prompt
    first: int  # index of the first prompt
    seed: int  # data seed
    counted: int  # samples that count
    correct: int
    threshold: float
    mean_reward: float | None
    reward_interval: (
        tuple[float, float] | None
    )  # 95 %, over prompts; None: fewer than two prompts have a reward
    pass_at: dict[str, tuple[float, float, float] | None]
    pass_prompts: dict[str, int]  # k -> prompts with at least k counted samples: what `pass_at` is over
    unscored: int
    lost: int
    foreign: int
    sampling: dict[str, Any]
    when: float  # wall-clock unix seconds

    @property
    def id(self) -> VersionId:
        """The version."""
        return VersionId(self.epoch, self.version)


def decoded(line: bytes) -> Evaluation:
    """Inverse of `msgspec.json.encode`. Raises `msgspec.MsgspecError`."""
    return msgspec.json.decode(line, type=Evaluation)
