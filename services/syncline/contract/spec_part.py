"""What every part of a job spec has in common: unknown keys, other types, NaN and infinity are refused."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Part(BaseModel):
    """Base of the tables of a job spec."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)
