"""Steps of an environment in real processes: answered, killed at their deadline, lost."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import psutil
import pytest
from waiting import lives, wait_until

from syncline.contract.job import JobSpec
from syncline.contract.turns import Turn
from syncline.rollout.tools import Answer, BrokenEnvironment, Tools


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", f"{os.environ.get('PYTHONPATH', '')}:{Path(__file__).parent}")


def tools_of(environment: str, **options: object) -> Tools:
    spec = {
        "name": "t",
        "model": {"name": "tiny-dense"},
        "task": {"environment": environment, "options": options},
        "turns": {"tool_timeout": 1.0, "tool_memory_mb": 64},
    }
    return Tools(JobSpec.model_validate(spec))


def answered(tools: Tools, count: int) -> list[Answer]:
    found: list[Answer] = []

    def enough() -> bool:
        found.extend(tools.answers())
        return len(found) >= count

    wait_until(enough, 60, f"{count} answers")
    return found


def test_steps_are_answered_in_order_by_one_process() -> None:
    tools = tools_of("calculator")
    for key, call in (("a", "!34"), ("b", "none"), ("c", "!11")):
        tools.ask(key, 0, (Turn(text=call),))
    tools.cancel("b")
    found = answered(tools, 2)
    assert [(one.key, one.outcome.kind) for one in found] == [("a", "value"), ("c", "value")]
    assert found[0].outcome.value == {"done": False, "observed": [{"role": "tool", "content": "7="}]}
    tools.close()


def test_a_tool_that_hangs_or_hoards_ends_with_its_step_and_the_next_is_taken() -> None:
    tools = tools_of("python", function="bad_tools:made")
    for text in ("hang", "hoard", "raise", "fine"):
        tools.ask(text, 0, (Turn(text=text),))
    kinds = {one.key: one.outcome.kind for one in answered(tools, 4)}
    assert kinds == {"hang": "timeout", "hoard": "memory", "raise": "raised", "fine": "value"}
    tools.close()


def is_stepper(process: psutil.Process) -> bool:
    """A child that another test has ended may still be there without a command line."""
    try:
        return "syncline.rollout.stepper" in process.cmdline()
    except (psutil.ZombieProcess, psutil.NoSuchProcess):
        return False


def is_within_walls(process: psutil.Process) -> bool:
    """Whether it is the first process of a namespace of its own: the kernel gives its id there as the last."""
    [ids] = [
        line.split()[1:]
        for line in Path(f"/proc/{process.pid}/status").read_text().splitlines()
        if line.startswith("NSpid:")
    ]
    return len(ids) > 1 and ids[-1] == "1"


def child_that_steps() -> tuple[psutil.Process, psutil.Process]:
    """The stepper as its parent knows it, and the process that takes the steps: within walls it is a child of that."""
    [outer] = [process for process in psutil.Process().children() if is_stepper(process)]
    within = [process for process in outer.children() if is_within_walls(process)]
    return outer, within[0] if within else outer


WHICH = pytest.mark.parametrize("killed", ["the one that waits outside the walls", "the one that steps"])


@WHICH
def test_a_killed_process_loses_its_step_and_is_replaced(killed: str) -> None:
    tools = tools_of("calculator")
    tools.ask("a", 0, (Turn(text="!12"),))
    answered(tools, 1)
    outer, steps = child_that_steps()
    steps.send_signal(signal.SIGSTOP)
    tools.ask("b", 0, (Turn(text="!12"),))
    assert tools.answers() == []
    (steps if killed == "the one that steps" else outer).send_signal(signal.SIGKILL)
    [lost] = answered(tools, 1)
    assert (lost.key, lost.outcome.kind) == ("b", "lost")
    wait_until(lambda: not lives(steps) and not lives(outer), 10, "the end of both")
    tools.ask("b", 0, (Turn(text="!12"),))
    assert answered(tools, 1)[0].outcome.kind == "value"
    tools.close()


@WHICH
def test_steps_sent_ahead_to_a_killed_process_are_taken_by_the_next(killed: str) -> None:
    tools = tools_of("calculator")
    tools.ask("a", 0, (Turn(text="!12"),))
    answered(tools, 1)
    outer, steps = child_that_steps()
    steps.send_signal(signal.SIGSTOP)
    for key in ("b", "c", "d", "e"):
        tools.ask(key, 0, (Turn(text="!12"),))
    assert tools.answers() == []
    tools.cancel("d")
    (steps if killed == "the one that steps" else outer).send_signal(signal.SIGKILL)
    found = {one.key: one.outcome.kind for one in answered(tools, 3)}
    assert found == {"b": "lost", "c": "value", "e": "value"}
    tools.close()


def test_a_foreign_environment_is_at_one_step_and_its_deadline_is_each_steps_own() -> None:
    tools = tools_of("python", function="bad_tools:made")
    for key in ("1", "2", "3"):
        tools.ask(key, 0, (Turn(text="hang"),))
    found = answered(tools, 3)
    assert [(one.key, one.outcome.kind) for one in found] == [(key, "timeout") for key in ("1", "2", "3")]
    assert all(one.outcome.seconds < 6 for one in found)
    tools.close()


def test_an_environment_that_cannot_be_made_says_why() -> None:
    tools = tools_of("python", function="bad_tools:absent")
    tools.ask("a", 0, (Turn(text="x"),))
    with pytest.raises(BrokenEnvironment, match="no such function"):
        answered(tools, 1)
    tools.close()
