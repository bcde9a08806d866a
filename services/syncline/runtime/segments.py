"""Parquet segments: the trajectories of each update, rebuilt exactly. The only importer of pyarrow.

`update-000001.parquet` is written before the update's optimizer step and is what a resume repeats it
from: every claimed record, its reward, and what the batch decided about it.
`update-000001.scores.parquet` is written after the step: the trainer's log-prob and weight of each
sampled token. Both are immutable once renamed into place, with one exception: when the step was skipped
the segment is written again with nothing marked as trained.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq

from syncline.contract.token_path import Reward, Trajectory
from syncline.contract.version_path import VersionId
from syncline.runtime.durable import write_first, write_whole
from syncline.runtime.segment_files import listed
from syncline.runtime.segment_schema import SCHEMA, SCORES, column_floats, row_of, trajectory_of

SMALL = 1 << 20  # bytes of a table, uncompressed, up to which Snappy is enough
_REWARD = ("state", "value", "reason", "judge", "seconds", "attempt")  # columns `reward_...`


class BadSegment(ValueError):
    """A segment file that cannot be read or contradicts itself. The message names the file and the part."""


class SegmentRow(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One claimed trajectory of an update.

    use         "train": in the batch; "filtered": ended with `why` and left out
    lag         version being updated minus version of the oldest sampled token
    advantage   0.0 for a filtered one
    used_mask   bytes [S]: the record's loss mask after the lag policy; all 0 for a filtered one
    """

    trajectory: Trajectory
    reward: Reward | None  # None: it had none when it was claimed (its scorer is gone)
    use: Literal["train", "filtered"]
    why: str
    lag: int
    advantage: float
    used_mask: bytes


class Segment(msgspec.Struct, frozen=True, kw_only=True):
    """What one update consumed. `number` of `base` is the version being updated: `update - 1`."""

    job: str
    update: int
    base: VersionId
    contract: str
    spec_hash: str
    members: tuple[SegmentRow, ...]
    lost: dict[str, str] = {}  # claimed trajectories without a readable record -> why

    @property
    def rows(self) -> tuple[SegmentRow, ...]:
        """The members that were trained on, in batch order."""
        return tuple(row for row in self.members if row.use == "train")

    @property
    def filtered(self) -> tuple[SegmentRow, ...]:
        """The members that were claimed and left out, with the reason in `why`."""
        return tuple(row for row in self.members if row.use == "filtered")


class ScoreRow(msgspec.Struct, frozen=True, kw_only=True):
    """The trainer's view of one trained trajectory, before the step of its update.

    logprobs   array('f') [S]  the trainer's log-probs under the record's convention
    weights    array('f') [S]  what multiplied each token's loss: the importance weight, 0 outside the loss
    gap        array('f') [S]  trainer minus behaviour log-prob
    """

    trajectory: str
    logprobs: array[float]
    weights: array[float]
    gap: array[float]
    advantage: float


class Scores(msgspec.Struct, frozen=True, kw_only=True):
    """The scores of one update. `minted` is the version that the update made."""

    update: int
    minted: VersionId
    skipped: bool
    rows: tuple[ScoreRow, ...]


class _Head(msgspec.Struct, frozen=True, kw_only=True):
    """What is said once per segment, in the schema's metadata."""

    job: str
    update: int
    base: VersionId
    contract: str
    spec_hash: str
    lost: dict[str, str]


class _ScoresHead(msgspec.Struct, frozen=True, kw_only=True):
    update: int
    minted: VersionId
    skipped: bool


# ---- where -------------------------------------------------------------------------------------------------
def segment_path(folder: Path, update: int) -> Path:
    """The segment of `update` in the job's segment folder."""
    return folder / f"update-{update:06d}.parquet"


def scores_path(folder: Path, update: int) -> Path:
    """The scores of `update`."""
    return folder / f"update-{update:06d}.scores.parquet"


def updates(folder: Path) -> list[int]:
    """Updates whose segment is in `folder`, in order. Empty for an absent folder."""
    return sorted(update for update, _ in listed(folder))


# ---- segments ----------------------------------------------------------------------------------------------
def write(folder: Path, segment: Segment) -> Path:
    """Write the segment whole, fsynced, under its final name; returns the path. The folder is made."""
    return _put(segment_path(folder, segment.update), _table_of(segment))


def write_new(folder: Path, segment: Segment) -> bool:
    """`write`, unless that update has a segment already. False: another one is there, and stays."""
    folder.mkdir(parents=True, exist_ok=True)
    path = segment_path(folder, segment.update)
    return write_first(path, packed(_table_of(segment))) or read(path) == segment


def read(path: Path) -> Segment:
    """The whole segment. Raises `BadSegment` naming the file."""
    table = _table(path, None)
    head = _head(path, table, _Head)
    return Segment(
        **{name: getattr(head, name) for name in _Head.__struct_fields__},
        members=tuple(_rows(path, table)),
    )


def read_one(path: Path, trajectory: str) -> SegmentRow | None:
    """The row of one trajectory, or None; reads no other's arrays."""
    rows = list(_rows(path, _table(path, ("trajectory", "=", trajectory))))
    return rows[0] if rows else None


def members(path: Path) -> list[tuple[str, Literal["train", "filtered"]]]:
    """(trajectory id, use) of every row, without the arrays: what an index is made from."""
    table = _columns(path, ["trajectory", "use"])
    return list(zip(table["trajectory"].to_pylist(), table["use"].to_pylist(), strict=True))


def sampled_counts(path: Path) -> list[tuple[str, int, int]]:
    """(trajectory id, sampled tokens, spans) of each trained row, without the arrays."""
    table = _columns(path, ["trajectory", "use", "sampled", "span_count"])
    return [
        (row["trajectory"], row["sampled"], row["span_count"])
        for row in table.to_pylist()
        if row["use"] == "train"
    ]


# ---- scores ------------------------------------------------------------------------------------------------
def write_scores(folder: Path, scores: Scores) -> Path:
    """Write the scores of an update whole; returns the path."""
    head = _ScoresHead(update=scores.update, minted=scores.minted, skipped=scores.skipped)
    rows = [
        {
            "trajectory": row.trajectory,
            "logprobs": row.logprobs.tolist(),
            "weights": row.weights.tolist(),
            "gap": row.gap.tolist(),
            "advantage": row.advantage,
        }
        for row in scores.rows
    ]
    table = pa.Table.from_pylist(rows, schema=_with(SCORES, head))
    return _put(scores_path(folder, scores.update), table)


def read_scores(path: Path, trajectory: str | None = None) -> Scores:
    """The scores of an update, of one trajectory alone if named. Raises `BadSegment` naming the file."""
    table = _table(path, None if trajectory is None else ("trajectory", "=", trajectory))
    head = _head(path, table, _ScoresHead)
    columns = {name: column_floats(table, name) for name in ("logprobs", "weights", "gap")}
    rows = tuple(
        ScoreRow(
            trajectory=table["trajectory"][i].as_py(),
            logprobs=columns["logprobs"][i],
            weights=columns["weights"][i],
            gap=columns["gap"][i],
            advantage=table["advantage"][i].as_py(),
        )
        for i in range(table.num_rows)
    )
    return Scores(update=head.update, minted=head.minted, skipped=head.skipped, rows=rows)


# ---- parts -------------------------------------------------------------------------------------------------
def _flat(row: SegmentRow) -> dict[str, Any]:
    reward = {f"reward_{name}": row.reward and getattr(row.reward, name) for name in _REWARD}
    return (
        row_of(row.trajectory)
        | reward
        | {
            "use": row.use,
            "why": row.why,
            "lag": row.lag,
            "advantage": row.advantage,
            "used_mask": row.used_mask,
        }
    )


def _rows(path: Path, table: pa.Table) -> Iterable[SegmentRow]:
    arrays = {
        "tokens": column_floats(table, "tokens", "i"),
        "logprobs": column_floats(table, "logprobs", "f"),
    }
    light = table.drop_columns(list(arrays)).to_pylist()
    for i, raw in enumerate(light):
        try:
            trajectory = trajectory_of(raw, arrays["tokens"][i], arrays["logprobs"][i])
        except ValueError as error:
            raise BadSegment(f"{path}: row {i}: {error}") from None
        reward = None
        if raw["reward_state"] is not None:
            given = {name: raw[f"reward_{name}"] for name in _REWARD}
            reward = Reward(trajectory=trajectory.trajectory, **given)
        yield SegmentRow(
            trajectory=trajectory,
            reward=reward,
            **{name: raw[name] for name in ("use", "why", "lag", "advantage", "used_mask")},
        )


def _with(schema: pa.Schema, head: msgspec.Struct) -> pa.Schema:
    return schema.with_metadata({b"syncline": msgspec.json.encode(head)})


def _head(path: Path, table: pa.Table, type: Any) -> Any:
    metadata = table.schema.metadata or {}
    if b"syncline" not in metadata:
        raise BadSegment(f"{path}: no head in its metadata")
    try:
        return msgspec.json.decode(metadata[b"syncline"], type=type)
    except msgspec.MsgspecError as error:
        raise BadSegment(f"{path}: head: {error}") from None


def _table_of(segment: Segment) -> pa.Table:
    head = _Head(**{name: getattr(segment, name) for name in _Head.__struct_fields__})
    return pa.Table.from_pylist([_flat(row) for row in segment.members], schema=_with(SCHEMA, head))


def _put(path: Path, table: pa.Table) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, packed(table))
    return path


def packed(table: pa.Table) -> memoryview:
    """The file's bytes. Of a small table Zstandard takes longer to begin on each column than to write the others."""
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink, compression="zstd" if table.nbytes > SMALL else "snappy")
    return memoryview(sink.getvalue())


def _table(path: Path, only: tuple[str, str, str] | None) -> pa.Table:
    return _read(path, filters=None if only is None else [only])


def _columns(path: Path, names: Sequence[str]) -> pa.Table:
    return _read(path, columns=list(names))


def _read(path: Path, **how: Any) -> pa.Table:
    try:
        table = pq.read_table(path, partitioning=None, **how)
        table.validate(
            full=True
        )  # a reader takes bytes for text, and lengths for true, without a look at them
    except (pa.ArrowException, OSError) as error:
        raise BadSegment(f"{path}: {error}") from None
    return table
