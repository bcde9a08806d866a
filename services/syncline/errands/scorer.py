"""A job's reward source as a function that the sandbox can run, and the sandbox's outcome as a reward.

`python -m syncline.errands.scorer SECRET ...` is the process that runs it (`forker.py` starts it), with the paths that
it hides from the job's code as arguments: one line of JSON with the job in, `Ready` out; then for each line with
responses an `Outcome` from a sandbox: one for each line, or a kept one for an environment of our own, which alone is
asked about several responses at once (`scores_many`). What it imports is in the memory of every fork, so nothing is
imported here that a scorer does not need.

Three outcomes, never confused: a finite number, `unscored` (it could not be told for this response) and `failed`
(the scorer itself is broken). None, NaN and infinity are `unscored`, and nothing is ever turned into 0.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import msgspec

from syncline.contract.job import JobSpec
from syncline.environments.environment import (
    Environment,
    Prompt,
    Turn,
    load,
    reaches_network,
    scores_many,
)
from syncline.runtime import lines, sandbox, sandbox_kept, sandbox_walls
from syncline.runtime.sandbox import Limits, Outcome

_IMPORT = Limits(seconds=60.0, memory_mb=16384)  # for a trial import of a user's module


Response = tuple[str, int, str, tuple[Turn, ...]]
"""Trajectory, prompt index, text, turns."""


class BrokenScorer(ValueError):
    """The scorer of a job cannot be made. The message names the function, option or file."""


class Verdict(msgspec.Struct, frozen=True):
    """What an outcome means. `again`: worth another try, for the cause may have passed."""

    state: Literal["scored", "unscored"]
    value: float | None
    reason: str
    again: bool = False


class Scorer(msgspec.Struct, frozen=True):
    """Makes the function that scores one response: `(trajectory, prompt index, text, turns) -> () -> number`."""

    judge: str  # name and version, recorded with each reward
    task: Callable[[str, int, str, tuple[Turn, ...]], Callable[[], object]]
    limits: Limits


class Ready(msgspec.Struct, frozen=True):
    """What the process says first: who judges, or why nobody can (then it ends). `missing`: walls that do not stand."""

    judge: str = ""
    broken: str = ""
    missing: str = ""


def main() -> None:
    """Serve one job on standard input and output, until the input ends or the parent dies."""
    sandbox.die_with_parent()
    requests, answer = lines.take_over()
    spec = JobSpec.model_validate_json(requests.readline())
    missing = sandbox_walls.around(sys.argv[1:], network=_given_network(spec))
    try:
        scorer = make(spec)
    except BrokenScorer as error:
        answer(Ready(broken=str(error)))
        return
    answer(Ready(judge=scorer.judge, missing=missing))
    kept = scores_many(spec.task, spec.reward)
    run = sandbox_kept.runner(functools.partial(_scored, scorer), scorer.limits, kept=kept)
    for line in requests:
        answer(run(line))


def _given_network(spec: JobSpec) -> bool:
    return reaches_network(spec.task) or (spec.reward.source == "python" and spec.reward.network)


def _scored(scorer: Scorer, line: bytes) -> object:
    """The score of one response, or a list with those of several."""
    found = [scorer.task(*response)() for response in msgspec.json.decode(line, type=list[Response])]
    return found[0] if len(found) == 1 else found


def make(spec: JobSpec) -> Scorer:
    """The scorer of a job. Raises `BrokenScorer`."""
    try:
        environment = load(spec.task, spec.seeds.data)
    except ValueError as error:
        raise BrokenScorer(str(error)) from error
    reward = spec.reward
    network = _given_network(spec)
    limits = Limits(seconds=reward.timeout, memory_mb=reward.memory_mb, network=network)
    match reward.source:
        case "environment":
            return Scorer(
                judge=environment.name,
                task=lambda _, prompt, text, turns: (
                    functools.partial(environment.score_turns, prompt, turns)
                    if turns
                    else functools.partial(environment.score, prompt, text)
                ),
                limits=limits,
            )
        case "python":
            function, judge = _imported(str(reward.function), network)
            return Scorer(
                judge=judge,
                task=lambda _, prompt, text, turns: functools.partial(
                    _python, function, environment, prompt, text, turns
                ),
                limits=limits,
            )
        case "http":
            raise BrokenScorer("an HTTP judge is asked by `errands/judge.py`, and has no scorer")


def judged(outcome: Outcome) -> Verdict:
    """What an outcome of the sandbox means."""
    if outcome.kind != "value":
        again = outcome.kind in ("timeout", "lost") or outcome.passing
        return Verdict("unscored", None, f"{outcome.kind}: {outcome.reason}", again)
    number = _finite(outcome.value)
    if number is None:
        story = f"the scorer returned {outcome.value!r}, which is no finite number"
        return Verdict("unscored", None, story[:200])
    return Verdict("scored", number, "")


def all_judged(outcome: Outcome, count: int) -> list[float] | None:
    """The scores of `count` responses that were asked about at once; None: not every one of them has one."""
    if outcome.kind != "value" or not isinstance(outcome.value, list) or len(outcome.value) != count:
        return None
    found = [number for value in outcome.value if (number := _finite(value)) is not None]
    return found if len(found) == count else None


def _finite(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return float(value)


def _python(
    function: Callable[..., object], environment: Environment, index: int, text: str, turns: tuple[Turn, ...]
) -> object:
    prompt = environment.prompt(index)
    return function(prompt.plain(), text, meta_of(prompt, turns))


def meta_of(prompt: Prompt, turns: tuple[Turn, ...]) -> dict[str, Any]:
    """What a scorer is told besides; `turns`, as plain JSON, of a task that has several."""
    return {**prompt.meta, "turns": msgspec.to_builtins(turns)} if turns else prompt.meta


# ---- a user's function ----------------------------------------------------------------------------------------
def _imported(name: str, network: bool) -> tuple[Callable[..., object], str]:
    """The function `module:function`, and its name with its file's digest. Raises `BrokenScorer`.

    The import is tried in a sandbox first: of a module that raises, hangs or kills its process we can tell the reason.
    """
    module, _, attribute = name.partition(":")
    limits = msgspec.structs.replace(_IMPORT, network=network)
    trial = sandbox.call(functools.partial(_tried, module, attribute), limits)
    if trial.kind != "value":
        raise BrokenScorer(f"reward.function {name}: {trial.kind}: {trial.reason}")
    function = _attribute(module, attribute)
    file = sys.modules[module].__file__
    digest = hashlib.sha256(Path(file).read_bytes()).hexdigest()[:12] if file else "built-in"
    return function, f"{name} {digest}"


def _tried(module: str, attribute: str) -> None:
    _attribute(module, attribute)


def _attribute(module: str, attribute: str) -> Callable[..., object]:
    function: object = vars(importlib.import_module(module)).get(attribute)
    if not callable(function):
        raise ValueError(f"module {module} has no function {attribute}")
    return function


if __name__ == "__main__":
    main()
