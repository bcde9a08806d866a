"""A segment gives back exactly what went in, bit by bit, and says what is wrong with one that cannot."""

from __future__ import annotations

from array import array
from pathlib import Path

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from trainer_records import reward, trajectory

from syncline.contract.token_path import BadTrajectory
from syncline.contract.version_path import VersionId
from syncline.runtime import segments


def segment(count: int = 5) -> segments.Segment:
    rows = []
    for i in range(count):
        t = trajectory("j7", i // 2, i % 2, versions=(0, 1) if i % 2 else (1,), experts=i % 3 == 0)
        filtered = i == 3
        rows.append(
            segments.SegmentRow(
                trajectory=t,
                reward=None if i == 2 else reward(t, None if filtered else 0.1 * i),
                use="filtered" if filtered else "train",
                why="reward unscored" if filtered else "",
                lag=i % 2,
                advantage=0.1 * i - 0.3,
                used_mask=bytes([0] * t.sampled) if filtered else bytes([i % 2] * t.sampled),
            )
        )
    return segments.Segment(
        job="j7",
        update=2,
        base=VersionId(0, 1),
        contract="c",
        spec_hash="h",
        members=tuple(rows),
        lost={"j7-9-0": "record gone"},
    )


def test_trajectories_and_rewards_are_rebuilt_exactly(tmp_path: Path) -> None:
    written = segment()
    path = segments.write(tmp_path / "segments", written)
    assert path.name == "update-000002.parquet"
    back = segments.read(path)
    assert back == written
    for before, after in zip(written.members, back.members, strict=True):
        assert before.trajectory.tokens.tobytes() == after.trajectory.tokens.tobytes()
        assert before.trajectory.logprobs.tobytes() == after.trajectory.logprobs.tobytes()
    assert [row.trajectory.trajectory for row in back.filtered] == ["j7-1-1"]
    assert len(back.rows) == 4


def test_the_same_segment_is_the_same_bytes(tmp_path: Path) -> None:
    written = segment()
    first = segments.write(tmp_path / "a", written).read_bytes()
    assert segments.write(tmp_path / "b", written).read_bytes() == first


def test_one_trajectory_is_found_without_the_others(tmp_path: Path) -> None:
    written = segment()
    path = segments.write(tmp_path, written)
    assert segments.read_one(path, "j7-2-0") == written.members[4]
    assert segments.read_one(path, "j7-8-0") is None
    assert segments.members(path) == [(m.trajectory.trajectory, m.use) for m in written.members]
    assert segments.sampled_counts(path) == [
        (r.trajectory.trajectory, r.trajectory.sampled, len(r.trajectory.spans)) for r in written.rows
    ]


def test_an_update_without_members_is_a_segment_too(tmp_path: Path) -> None:
    empty = segment(0)
    assert segments.read(segments.write(tmp_path, empty)) == empty


def test_scores_are_rebuilt_exactly(tmp_path: Path) -> None:
    rows = tuple(
        segments.ScoreRow(
            trajectory=f"j7-0-{i}",
            logprobs=array("f", [-0.1 * i] * 4),
            weights=array("f", [1.0, 0.0, 0.5, float(i)]),
            gap=array("f", [1e-8] * 4),
            advantage=-0.25,
        )
        for i in range(3)
    )
    written = segments.Scores(update=2, minted=VersionId(1, 2), skipped=False, rows=rows)
    path = segments.write_scores(tmp_path, written)
    assert segments.read_scores(path) == written
    assert segments.read_scores(path, "j7-0-2").rows == rows[2:]


def test_updates_are_listed_in_order_and_scores_are_no_updates(tmp_path: Path) -> None:
    assert segments.updates(tmp_path / "absent") == []
    for update in (10, 9, 1):
        segments.write(tmp_path, msgspec.structs.replace(segment(1), update=update))
    segments.write_scores(tmp_path, segments.Scores(update=1, minted=VersionId(0, 1), skipped=True, rows=()))
    (tmp_path / ".update-000011.parquet.part").write_bytes(b"half")
    assert segments.updates(tmp_path) == [1, 9, 10]


def test_a_cut_file_is_refused_by_name(tmp_path: Path) -> None:
    path = segments.write(tmp_path, segment())
    path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(segments.BadSegment, match=r"update-000002\.parquet"):
        segments.read(path)


def test_a_record_that_does_not_add_up_is_not_written(tmp_path: Path) -> None:
    whole = segment()
    t = whole.members[0].trajectory
    broken = msgspec.structs.replace(
        whole.members[0], trajectory=msgspec.structs.replace(t, logprobs=t.logprobs[:-1])
    )
    with pytest.raises(BadTrajectory, match="log-probs"):
        segments.write(tmp_path, msgspec.structs.replace(whole, members=(broken,)))
    assert segments.updates(tmp_path) == []


def test_text_that_is_no_text_is_refused_by_name(tmp_path: Path) -> None:
    path = segments.write(tmp_path, segment())
    table = pq.read_table(path, partitioning=None)
    bent = pa.array([b"\x80"] * table.num_rows, pa.binary()).view(pa.string())
    pq.write_table(table.set_column(table.schema.get_field_index("trajectory"), "trajectory", bent), path)
    for read in (segments.read, segments.members, segments.sampled_counts):
        with pytest.raises(segments.BadSegment, match=path.name):
            read(path)
