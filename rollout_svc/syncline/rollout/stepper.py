"""The process that takes an environment's steps for one rollout worker: `python -m syncline.rollout.stepper`.

One line of JSON with the job in, `Ready` out; then for each line with an episode an `Outcome`, in order, from a
sandbox, so that a tool that hangs, floods or dies ends with its step. An environment of our own keeps its sandbox from
step to step (`runtime/sandbox_kept.py`); others have one for each. It imports no torch: a fork costs by the memory of
the process that forks. `tools.py` starts it, with the paths that it hides from the job's code as arguments.
"""

from __future__ import annotations

import functools
import sys

import msgspec

from syncline.contract.job import JobSpec
from syncline.contract.turns import Turn
from syncline.environments.environment import Environment, load, reaches_network, runs_foreign_code
from syncline.runtime import lines, sandbox, sandbox_kept, sandbox_walls
from syncline.runtime.sandbox import Limits


class Ready(msgspec.Struct, frozen=True):
    """What the process says first. `broken`: why it cannot serve; then it ends."""

    broken: str = ""


def main() -> None:
    """Serve one job on standard input and output, until the input ends or the parent dies."""
    sandbox.die_with_parent()
    requests, answer = lines.take_over()
    spec = JobSpec.model_validate_json(requests.readline())
    network = reaches_network(spec.task)
    sandbox_walls.around(sys.argv[1:], network=network)
    try:
        environment = load(spec.task, spec.seeds.data)
    except ValueError as error:
        answer(Ready(broken=str(error)))
        return
    limits = Limits(seconds=spec.turns.tool_timeout, memory_mb=spec.turns.tool_memory_mb, network=network)
    answer(Ready())
    kept = not runs_foreign_code(spec.task)
    run = sandbox_kept.runner(functools.partial(_step, environment), limits, kept=kept)
    for line in requests:
        answer(run(line))


def _step(environment: Environment, line: bytes) -> object:
    index, turns = msgspec.json.decode(line, type=tuple[int, tuple[Turn, ...]])
    return msgspec.to_builtins(environment.step(index, turns))


if __name__ == "__main__":
    main()
