"""`update-000001.probes.parquet`: the decomposition of each probed token of an update, one row per token.

Log-probs are natural logs at the trajectory's temperature, FP64; `total` = `mismatch` + `staleness` on each row.
"""

from __future__ import annotations

from pathlib import Path

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq

from syncline.runtime.durable import write_whole
from syncline.runtime.segments import BadSegment, packed

SCHEMA = pa.schema(
    [
        ("trajectory", pa.string()),
        ("token", pa.int32()),  # counts sampled tokens
        ("lag", pa.int32()),  # version updated minus the token's version
        ("version", pa.string()),  # that sampled the token
        ("worker", pa.string()),  # that scored it again
        ("trainer", pa.float64()),  # log pi_t
        ("rollout", pa.float64()),  # log mu_t
        ("behaviour", pa.float64()),  # log mu_tau
        ("total", pa.float64()),
        ("mismatch", pa.float64()),
        ("staleness", pa.float64()),
        ("kv_cache", pa.float64()),  # null: the contract's KV cache is wide
        ("first_of_span", pa.bool_()),
        ("carried", pa.bool_()),  # its context was kept from an older version
    ]
)


class ProbedToken(msgspec.Struct, frozen=True, kw_only=True):
    """One row; fields as in `SCHEMA`."""

    trajectory: str
    token: int
    lag: int
    version: str
    worker: str
    trainer: float
    rollout: float
    behaviour: float
    total: float
    mismatch: float
    staleness: float
    kv_cache: float | None
    first_of_span: bool
    carried: bool


def probes_path(folder: Path, update: int) -> Path:
    """The probes of `update` in the job's segment folder."""
    return folder / f"update-{update:06d}.probes.parquet"


def write_probes(folder: Path, update: int, version: str, rows: list[ProbedToken]) -> Path:
    """Write an update's probed tokens whole, fsynced; returns the path. `version`: the one that was updated."""
    schema = SCHEMA.with_metadata({b"syncline": msgspec.json.encode({"update": update, "version": version})})
    table = pa.Table.from_pylist([msgspec.structs.asdict(row) for row in rows], schema=schema)
    path = probes_path(folder, update)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, packed(table))
    return path


def read_probes(path: Path, trajectory: str | None = None) -> list[ProbedToken]:
    """The rows, of one trajectory alone if named. Raises `BadSegment` naming the file."""
    only = None if trajectory is None else [("trajectory", "=", trajectory)]
    try:
        table = pq.read_table(path, filters=only, partitioning=None)
        table.validate(full=True)
    except (pa.ArrowException, OSError) as error:
        raise BadSegment(f"{path}: {error}") from None
    if table.schema.names != SCHEMA.names:
        raise BadSegment(f"{path}: columns {table.schema.names}, expected {SCHEMA.names}")
    return [ProbedToken(**row) for row in table.to_pylist()]
