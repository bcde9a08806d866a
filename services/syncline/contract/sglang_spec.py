"""The part of a job spec that says how an SGLang server is run and given weights. See docs/sglang.md."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from syncline.contract.spec_part import Part

Update = Literal["disk", "buckets", "group"]


class SGLangSpec(Part):
    """Of `rollout.engine = "sglang"` alone."""

    update: Update = Field(
        "disk",
        description="how a version reaches the server: a checkpoint folder that it loads, flattened buckets over HTTP, "
        "or a torch.distributed group (gloo) that broadcasts them; each is read back",
    )
    tp: int = Field(1, ge=1, le=64, description="ranks that one server cuts the model over")
