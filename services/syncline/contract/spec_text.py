"""A job spec from text: TOML or JSON in, `JobSpec` out, or all problems, with path and what is right.

Nothing is coerced, ignored or repaired. The text is measured (size, nesting) before it is parsed, so that
hostile input costs milliseconds. `spec_problems.py` says what pydantic found in a user's words.
"""

from __future__ import annotations

import json
import math
import re
import tomllib
from collections import Counter
from collections.abc import Iterator
from itertools import islice
from typing import Any

from pydantic import ValidationError

from syncline.contract.job import JobSpec, Problem
from syncline.contract.job_rules import problems
from syncline.contract.spec_problems import MOST, explain

MAX_BYTES = 1 << 20
MAX_DEPTH = 32
MAX_VALUES = 10_000
MAX_TABLES = 1000  # headers in TOML, whose parser is slow at them


class SpecError(ValueError):
    """A spec that is refused; `problems` lists all that is wrong with it, at least one."""

    def __init__(self, found: list[Problem]) -> None:
        self.problems = found
        super().__init__("; ".join(told(problem) for problem in found))


def told(problem: Problem) -> str:
    """One line: path, what is wrong, what would be right."""
    where = f"{problem.path}: " if problem.path else ""
    return f"{where}{problem.message}" + (f" ({problem.hint})" if problem.hint else "")


def parse_json(text: str | bytes) -> JobSpec:
    """The spec that `text` says. Raises `SpecError`; text that is not JSON has one problem with path ""."""
    return _checked(strict_json(text))


def strict_json(text: str | bytes) -> Any:
    """Any JSON, within the limits and without repeated keys. Raises `SpecError`."""
    source = _measured(text, _JSON_PARTS)
    try:
        loaded = json.loads(source, object_pairs_hook=_Object.of, parse_constant=_no_constant)
    except ValueError as error:
        raise SpecError([Problem(path="", message=f"is not JSON: {error}")]) from None
    repeated = [
        Problem(path=path, message="is given more than once", hint="keep one")
        for path in islice(_repeated(loaded, ""), MOST)
    ]
    if repeated:
        raise SpecError(repeated)
    return loaded


def parse_toml(text: str | bytes) -> JobSpec:
    """The spec that `text` says. Raises `SpecError`; text that is not TOML has one problem."""
    source = _measured(text, _TOML_PARTS)
    tables = len(_TOML_TABLE.findall(source))
    if tables > MAX_TABLES:
        raise SpecError([Problem(path="", message=f"has {tables} tables", hint=f"at most {MAX_TABLES}")])
    try:
        loaded = tomllib.loads(source)
    except (ValueError, RecursionError) as error:
        raise SpecError([_toml_problem(source, str(error))]) from None
    odd = list(islice(_not_json(loaded, ""), MOST))
    if odd:
        raise SpecError(odd)
    return _checked(loaded)


def _checked(loaded: Any) -> JobSpec:
    """Structure first, then combinations: a spec of the wrong shape has no combinations to speak of."""
    if _many(loaded):
        raise SpecError([Problem(path="", message=f"has more than {MAX_VALUES} values")])
    if not isinstance(loaded, dict):
        raise SpecError(
            [Problem(path="", message="is not a table of keys", hint="such as name, model, task")]
        )
    try:
        spec = JobSpec.model_validate_json(json.dumps(loaded))
    except ValidationError as error:
        raise SpecError(explain(error.errors(include_url=False), loaded)) from None
    found = problems(spec)
    if found:
        raise SpecError(found)
    return spec


def _many(loaded: Any) -> bool:
    """Whether there are more than `MAX_VALUES` values; no more than that are looked at."""
    waiting, seen = [loaded], 0
    while waiting and seen <= MAX_VALUES:
        value = waiting.pop()
        inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
        seen += len(inner)
        waiting.extend(inner)
    return seen > MAX_VALUES


# ---- before parsing ----------------------------------------------------------------------------------------
_JSON_PARTS = re.compile(r'"(?:[^"\\]|\\.)*"|(?P<open>[\[{])|(?P<shut>[\]}])', re.DOTALL)
_TOML_PARTS = re.compile(
    r'"""(?:[^\\]|\\.)*?"""'  # strings and comments first: what is inside them nests nothing
    r"|'''.*?'''"
    r'|"(?:[^"\\\n]|\\.)*"'
    r"|'[^'\n]*'"
    r"|\#[^\n]*"
    r"|(?P<open>[\[{])|(?P<shut>[\]}])|(?P<dot>\.)|(?P<next>[=,\n])",
    re.DOTALL,
)


def _measured(text: str | bytes, parts: re.Pattern[str]) -> str:
    size = len(text) if isinstance(text, bytes) else len(text.encode("utf-8", "surrogatepass"))
    if size > MAX_BYTES:
        raise SpecError([Problem(path="", message=f"has {size} bytes", hint=f"at most {MAX_BYTES}")])
    try:
        source = text.decode() if isinstance(text, bytes) else text
    except UnicodeDecodeError as error:
        raise SpecError(
            [Problem(path="", message=f"is not UTF-8: {error.reason} at byte {error.start}")]
        ) from None
    if source.startswith("\ufeff"):
        hint = "save the file as UTF-8 without one"
        raise SpecError([Problem(path="", message="begins with a byte order mark", hint=hint)])
    depth = dots = 0
    for part in parts.finditer(source):
        kind = part.lastgroup
        if kind == "open":
            depth, dots = depth + 1, 0
        elif kind == "shut":
            depth -= 1
        elif kind == "dot":
            dots += 1  # a dotted key nests as deeply as brackets do
        elif kind == "next":
            dots = 0
        if depth + dots > MAX_DEPTH:
            line = source.count("\n", 0, part.start()) + 1
            raise SpecError(
                [Problem(path="", message=f"nests too deeply (line {line})", hint=f"at most {MAX_DEPTH}")]
            )
    return source


# ---- JSON --------------------------------------------------------------------------------------------------
class _Object(dict[str, Any]):
    """A parsed JSON object that still knows which of its keys came more than once."""

    repeated: tuple[str, ...] = ()

    @classmethod
    def of(cls, pairs: list[tuple[str, Any]]) -> _Object:
        made = cls(pairs)
        if len(made) != len(pairs):
            times = Counter(name for name, _ in pairs)
            made.repeated = tuple(name for name in made if times[name] > 1)
        return made


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not a JSON number")


def _repeated(value: Any, path: str) -> Iterator[str]:
    if isinstance(value, _Object):
        for name in value.repeated:
            yield _join(path, name)
        for name, inner in value.items():
            yield from _repeated(inner, _join(path, name))
    elif isinstance(value, list):
        for i, inner in enumerate(value):
            yield from _repeated(inner, _join(path, str(i)))


# ---- TOML --------------------------------------------------------------------------------------------------
def _not_json(value: Any, path: str) -> Iterator[Problem]:
    """Values that TOML knows and a spec does not: dates, times, nan and inf."""
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from _not_json(inner, _join(path, name))
    elif isinstance(value, list):
        for i, inner in enumerate(value):
            yield from _not_json(inner, _join(path, str(i)))
    elif isinstance(value, float) and not math.isfinite(value):
        yield Problem(path=path, message=f"{value} is not a finite number")
    elif not isinstance(value, str | int | float):
        yield Problem(
            path=path, message=f"{value} is a date or time, which no key takes", hint="quote it for a string"
        )


_TOML_TABLE = re.compile(r"^[ \t]*\[", re.MULTILINE)
_TOML_REPEATS = re.compile(r"Cannot (?:overwrite a value|declare .* twice|mutate immutable namespace)")
_TOML_LINE = re.compile(r"at line (\d+), column")
_TOML_KEY = re.compile(r"\s*([^=\[\]#]+?)\s*=")
_TOML_HEADER = re.compile(r"\s*\[\[?\s*([^\[\]#]+?)\s*\]")


def _toml_problem(source: str, message: str) -> Problem:
    """tomllib names a line; a repeated key is named by its path."""
    if not _TOML_REPEATS.search(message):
        return Problem(path="", message=f"is not TOML: {message}")
    at = _TOML_LINE.search(message)
    lines = source.splitlines()
    lines = lines[: int(at[1])] if at else lines  # no line named: the end of the document
    header = next((h[1] for h in map(_TOML_HEADER.match, reversed(lines)) if h), "")
    key = _TOML_KEY.match(lines[-1])
    path = _join(header, key[1]) if key else header
    return Problem(path=path, message=f"is given more than once (line {len(lines)})", hint="keep one")


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name
