"""`evaluations.jsonl` of a job's folder: what its versions were worth on held-out prompts. The scheduler writes it."""

from __future__ import annotations

from pathlib import Path

import msgspec

from syncline.contract.evaluation import FILE, Evaluation, decoded
from syncline.runtime.durable import write_whole


def kept(folder: Path) -> list[Evaluation]:
    """What `evaluations.jsonl` in the job's folder holds, oldest first. Raises `ValueError` naming the line."""
    path, found = folder / FILE, []
    for number, line in enumerate(path.read_bytes().splitlines() if path.exists() else [], start=1):
        try:
            found.append(decoded(line))
        except msgspec.MsgspecError as error:
            raise ValueError(f"{path} line {number}: {error}") from None
    return found


def keep(folder: Path, result: Evaluation) -> None:
    """Add a line, whole or not at all. One of the same job and version is there already: it stands."""
    before = kept(folder)
    if any((old.job, old.id) == (result.job, result.id) for old in before):
        return
    folder.mkdir(parents=True, exist_ok=True)
    lines = [msgspec.json.encode(one) + b"\n" for one in (*before, result)]
    write_whole(folder / FILE, b"".join(lines))
