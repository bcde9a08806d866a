"""Parsers of what comes from outside, or from a damaged disk or Redis: never another error than the declared.

Bytes that are almost right find more than bytes that are not: each case is a good document, bent. `long` does it a
hundred times as often.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from left_behind import metrics, reward, row, trajectory, write_update
from record_parts import parts, with_part
from safetensors.numpy import save

from syncline.contract.deltas import BadIndex, SignedIndex, decoded_index, opened_index
from syncline.contract.events import Event, LedgerSample, Phase, WorkerStatus, WorkItem
from syncline.contract.recipes import RECIPES, BadContract
from syncline.contract.recipes import read as read_recipe
from syncline.contract.spec_text import SpecError, parse_json, parse_toml, strict_json
from syncline.contract.token_path import BadTrajectory, parse_trajectory_id
from syncline.contract.trajectory_wire import decode, encode
from syncline.contract.version_path import (
    BadManifest,
    SignedManifest,
    VersionId,
    VersionRecord,
    opened,
    parse_version,
)
from syncline.errands.judge_wire import BadAnswer, read_answer
from syncline.gateway.precision_plan import BadHeader, header_shapes
from syncline.runtime import delta, segments
from syncline.runtime.messages import BadMessage, pack, unpack
from syncline.runtime.segments import BadSegment
from syncline.runtime.tokens import TokenStore, TokensUnreadable

SPEC_JSON = b'{"name": "run", "model": {"name": "tiny", "weights": "random"}, "batch": {"groups": 4, "group_size": 2}}'
SPEC_TOML = b'name = "run"\n[model]\nname = "tiny"\n[task]\noptions = { a = [1, 2.5, "x"], b = true }\n'
JOB = "j0123456789"


def bent(good: bytes) -> st.SearchStrategy[bytes]:
    """`good` with some of its bytes changed, taken out, repeated, or more put in; or anything at all."""

    def apply(changes: list[tuple[int, int, bytes]]) -> bytes:
        made = bytearray(good)
        for place, length, new in changes:
            at = place % (len(made) + 1)
            made[at : at + length] = new
        return bytes(made)

    change = st.tuples(st.integers(0, 2**16), st.integers(0, 8), st.binary(max_size=8))
    return st.one_of(
        st.lists(change, min_size=1, max_size=4).map(apply),
        st.integers(0, len(good)).map(lambda end: good[:end]),
        st.binary(max_size=64),
    )


def only(act: Callable[[], object], *declared: type[Exception]) -> None:
    """Do it; what it raises is one of these."""
    with contextlib.suppress(*declared):
        act()


def fuzz(examples: int) -> Callable[[Any], Any]:
    return settings(
        max_examples=examples,
        deadline=None,
        derandomize=True,
        suppress_health_check=list(HealthCheck),
        database=None,
    )


def _recipe(raw: bytes) -> object:
    told = strict_json(raw)
    return read_recipe(told, "precision.custom") if isinstance(told, dict) else None


def _index(raw: bytes) -> object:
    return opened_index(decoded_index(raw), b"key", JOB, VersionId(0, 1))


CASES: dict[str, tuple[bytes, Callable[[bytes], object], tuple[type[Exception], ...]]] = {
    "spec as JSON": (SPEC_JSON, parse_json, (SpecError,)),
    "spec as TOML": (SPEC_TOML, parse_toml, (SpecError,)),
    "body as JSON": (b'{"mode": "disjoint", "k": [1, 4]}', strict_json, (SpecError,)),
    "recipe": (msgspec.json.encode(RECIPES["unified_fp8"]), _recipe, (SpecError, BadContract)),
    "signed manifest": (
        msgspec.json.encode(SignedManifest(manifest=b"{}", mac="00" * 32)),
        lambda raw: opened(msgspec.json.decode(raw, type=SignedManifest), b"key"),
        (BadManifest, msgspec.MsgspecError),
    ),
    "delta index": (msgspec.json.encode(SignedIndex(index=b"{}", mac="00" * 32)), _index, (BadIndex,)),
    "judge's answer": (
        b'{"rewards": [{"id": "a", "reward": 0.5}], "judge": "j/1"}',
        lambda raw: read_answer(raw, ["a"], single=False),
        (BadAnswer,),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_text(name: str) -> None:
    _text(name, 200)


@pytest.mark.long
@pytest.mark.parametrize("name", CASES)
def test_text_long(name: str) -> None:
    _text(name, 20_000)


def _text(name: str, examples: int) -> None:
    good, parse, declared = CASES[name]

    @fuzz(examples)
    @given(bent(good))
    def run(raw: bytes) -> None:
        only(lambda: parse(raw), *declared)

    run()


# ---- names
@fuzz(300)
@given(st.text(max_size=30) | st.from_regex(r"\A[0-9.\-j]{1,30}\Z"))
def test_names(text: str) -> None:
    only(lambda: parse_version(text), ValueError)
    only(lambda: parse_trajectory_id(text), ValueError)


# ---- messages
MESSAGES: list[msgspec.Struct] = [
    WorkItem(trajectory=f"{JOB}-0-0", group=0, index=0, prompt=0, job=JOB, submitted_at=1.0, traceparent=""),
    reward(trajectory(JOB, 0, 0)),
    metrics(1),
    LedgerSample(
        at=1.0, submitted=1, running=1, buffered=0, trained=0, filtered=0, failed=0, expired=0, holds=True
    ),
]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda one: type(one).__name__)
def test_messages(message: msgspec.Struct) -> None:
    _messages(message, 200)


@pytest.mark.long
@pytest.mark.parametrize("message", MESSAGES, ids=lambda one: type(one).__name__)
def test_messages_long(message: msgspec.Struct) -> None:
    _messages(message, 20_000)


def _messages(message: msgspec.Struct, examples: int) -> None:
    @fuzz(examples)
    @given(bent(pack(message)))
    def run(raw: bytes) -> None:
        for kind in (type(message), Event, Phase, WorkerStatus, VersionRecord):
            only(lambda kind=kind: unpack(raw, kind), BadMessage)  # type: ignore[misc]

    run()


def test_trajectories() -> None:
    _trajectories(200)


@pytest.mark.long
def test_trajectories_long() -> None:
    _trajectories(20_000)


def _trajectories(examples: int) -> None:
    good = encode(trajectory(JOB, 0, 0))

    arrays = [name for name, part in parts(good).items() if isinstance(part, bytes)]

    @fuzz(examples)
    @given(st.sampled_from([None, *arrays]), st.data())
    def run(which: str | None, data: st.DataObject) -> None:
        if which is None:
            made = {b"m": data.draw(bent(good[b"m"]))}
        else:
            made = with_part(good, which, data.draw(bent(parts(good)[which])))
        only(lambda: decode(made), BadTrajectory)

    run()


# ---- files
def _file_cases(
    folder: Path,
) -> dict[str, tuple[bytes, Callable[[Path], object], tuple[type[Exception], ...]]]:
    kept = [row(trajectory(JOB, group, index)) for group in range(2) for index in range(2)]
    write_update(folder, JOB, 1, kept)
    segment = segments.segment_path(folder / "segments", 1).read_bytes()
    tensors = save({"a.weight": np.zeros((4, 4), np.float32), "b": np.zeros(3, np.uint8)})
    old, new = bytes(4096), bytes(2048) + bytes([1]) * 2048
    made = delta.encode(old, new, 2)
    assert made is not None
    store = TokenStore(folder / "tokens.json")
    store.add("acme", "member")

    def headers(path: Path) -> object:
        return header_shapes(path.parent)

    return {
        "segment.parquet": (segment, segments.read, (BadSegment,)),
        "members.parquet": (segment, segments.members, (BadSegment,)),
        "counts.parquet": (segment, segments.sampled_counts, (BadSegment,)),
        "model.safetensors": (tensors, headers, (BadHeader,)),
        "delta": (bytes(made.data), lambda path: delta.apply(old, path.read_bytes()), (delta.BadDelta,)),
        "tokens.json": (store.path.read_bytes(), lambda path: TokenStore(path).read(), (TokensUnreadable,)),
    }


FILES = ["segment.parquet", "members.parquet", "counts.parquet", "model.safetensors", "delta", "tokens.json"]


@pytest.mark.parametrize("name", FILES)
def test_files(name: str, tmp_path: Path) -> None:
    _files(name, tmp_path, 100)


@pytest.mark.long
@pytest.mark.parametrize("name", FILES)
def test_files_long(name: str, tmp_path: Path) -> None:
    _files(name, tmp_path, 10_000)


def _files(name: str, folder: Path, examples: int) -> None:
    good, parse, declared = _file_cases(folder)[name]
    path = folder / "fuzzed" / name
    path.parent.mkdir()

    @fuzz(examples)
    @given(st.data())  # drawn inside: a whole segment is more than hypothesis puts on show
    def run(data: st.DataObject) -> None:
        path.write_bytes(data.draw(bent(good)))
        only(lambda: parse(path), *declared)

    run()
