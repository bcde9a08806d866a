"""Prompts and answers from a JSONL file under the installation's data root.

Each line is an object with `prompt` (text) or `messages` (a chat), and `answer`; other keys go to the
prompt's meta. The reward is 1.0 for a right response, else 0.0. Right is what equals the answer, white space at both
ends apart, or with `judge = "math_verify"` (extra `math`) what the `math-verify` library finds to be worth the same.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from syncline.contract.job import Problem
from syncline.environments.jsonl_judge import Judge, exact
from syncline.environments.turns import Message, Prompt, SingleTurn, require_index

FILE = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,120}\.jsonl$"


class Options(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """`file`: a name under the data root, without folders."""

    file: Annotated[str, msgspec.Meta(pattern=FILE)]
    judge: Literal["exact", "math_verify"] = "exact"


class _Line(msgspec.Struct, frozen=True, kw_only=True):
    answer: str
    prompt: str | None = None
    messages: tuple[Message, ...] = ()


def problems(options: Options) -> list[Problem]:
    """Nothing beyond the types: whether the file exists is known only where it is read."""
    return []


def data_root(environ: dict[str, str] | os._Environ[str] = os.environ) -> Path:
    """The installation's data root: the only setting of this layer, which knows no `runtime/`."""
    return Path(environ.get("SYNCLINE_DATA", "examples/data"))


class JsonLines(SingleTurn):
    """A file of items, read and checked whole when loaded.

    judge  whether a response (second) is right by an answer (first)
    """

    def __init__(self, options: Options, root: Path | None = None, judge: Judge = exact) -> None:
        """Raises `ValueError` naming the file, and the line, that is wrong."""
        base = (root or data_root()).resolve()
        path = (base / options.file).resolve()
        if not path.is_relative_to(base):
            raise ValueError(f"task.options.file: {options.file} leads out of the data root")
        if not path.is_file():
            raise ValueError(f"task.options.file: there is no file {options.file} under the data root {base}")
        with path.open(encoding="utf-8") as lines:
            self.items = [_read(options.file, number, line) for number, line in enumerate(lines, start=1)]
        if not self.items:
            raise ValueError(f"task.options.file: {options.file} is empty")
        self.name = f"jsonl/1 {options.file}" + (f" {options.judge}" if options.judge != "exact" else "")
        self._judge = judge
        self.size = len(self.items)

    def prompt(self, index: int) -> Prompt:
        """Item `index % size`; `meta` carries the epoch."""
        item, extra = self.items[require_index(index) % self.size]
        meta = {**extra, "answer": item.answer, "epoch": index // self.size}
        return Prompt(index=index, text=item.prompt, messages=item.messages, meta=meta)

    def score(self, index: int, text: str) -> float:
        """1.0: right; 0.0: not."""
        return float(self._judge(self.items[require_index(index) % self.size][0].answer, text))


def _read(file: str, number: int, line: str) -> tuple[_Line, dict[str, Any]]:
    try:
        raw = msgspec.json.decode(line, type=dict[str, Any])
        item = msgspec.convert(raw, _Line, strict=True)
    except msgspec.MsgspecError as error:
        raise ValueError(f"{file} line {number}: {error}") from None
    if (item.prompt is None) == (not item.messages):
        raise ValueError(f"{file} line {number}: give one of prompt and messages")
    return item, {key: value for key, value in raw.items() if key not in ("answer", "prompt", "messages")}
