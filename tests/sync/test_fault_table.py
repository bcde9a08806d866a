"""The fault table, row by row: what is said, the state of the version and of each worker, and that it goes on.

Rows of one kind share a stack; a stack in which a row fails is not used again.
"""

from __future__ import annotations

import secrets
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from fault_board import Kind, Switchboard
from fault_rows import FAULTS, Fault, page
from fault_stack import SECONDS, Stack
from waiting import wait_until

from syncline.contract.version_path import VersionId

ROOT = Path(__file__).resolve().parents[2]
ROWS: list[Fault] = sorted(FAULTS, key=lambda fault: fault.kind.name)


class Stacks:
    """One stack of each kind, made when it is first asked for."""

    def __init__(self, board: Switchboard, url: str, runs: Path) -> None:
        self._board, self._url, self._runs = board, url, runs
        self._made: dict[str, Stack] = {}

    def of(self, kind: Kind) -> Stack:
        if kind.name not in self._made:
            self.close()  # of the kind before: rows come in order, and threads take memory
            stack = Stack(self._board, self._url, "j" + secrets.token_hex(5), self._runs, kind)
            self._made[kind.name] = stack
        return self._made[kind.name]

    def close(self) -> None:
        for stack in self._made.values():
            stack.close()
        self._made.clear()


@pytest.fixture(scope="module")
def stacks(redis_url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stacks]:
    with pytest.MonkeyPatch.context() as patch:
        made = Stacks(Switchboard(patch), redis_url, tmp_path_factory.mktemp("faults"))
        yield made
        made.close()


def label(fault: Fault) -> str:
    return f"{fault.kind.name}-{fault.where.split(',')[0]}-{fault.name}".replace(" ", "_")


@pytest.mark.parametrize("fault", ROWS, ids=label)
def test_fault(fault: Fault, stacks: Stacks, tmp_path: Path) -> None:
    if fault.kind.store_kib is not None and not may_mount(tmp_path):
        pytest.skip("a store that is full needs a file system of its own, and mounting one needs root")
    stack = stacks.of(fault.kind)
    try:
        carry_out(fault, stack)
    except BaseException:
        stacks.close()
        raise


def may_mount(folder: Path) -> bool:
    tried = subprocess.run(["mount", "-t", "tmpfs", "none", folder], capture_output=True, check=False)
    if tried.returncode == 0:
        subprocess.run(["umount", folder], check=True)
    return tried.returncode == 0


def carry_out(fault: Fault, stack: Stack) -> None:
    first = fault.kind.name == "first"
    if not first and stack.served < 1:  # a spare buffer exists from the second version on
        stack.settle(stack.mint())
        stack.settle(stack.mint())
    before = None if first else stack.served
    with fault.inject(stack):
        version = VersionId(0, stack.number)
        names = fault.kind.names
        wait_until(lambda: stands(fault, stack, version, before), SECONDS, f"{fault.name}")
        for name, place in zip(names, fault.workers, strict=True):
            if place == "gone":
                assert name in stack.gone
                continue
            number = version.number if place == "it" else before
            assert stack.serves(name) == number, name
            if number is not None:
                assert stack.scores_as(name, number), f"{name} does not compute with version {number}"
        assert (version in stack.failures()) == (fault.version == "failed")
    stack.settle(stack.mint())
    if fault.version == "published":
        assert stack.state_of(version) == "retired"
        assert "superseded" in stack.reason(version)
    if fault.version == "failed":
        assert stack.state_of(version) == "failed"


def stands(fault: Fault, stack: Stack, version: VersionId, before: int | None) -> bool:
    """Whether version and workers came where the row says, with its words."""
    stack.check_alive()
    state = stack.state_of(version)
    assert state != "failed" or fault.version == "failed", stack.reason(version)
    if state != fault.version:
        return False
    if fault.version == "failed":
        said = stack.reason(version)
        assert all(part in said for part in fault.says), said
        return True
    for name, place in zip(fault.kind.names, fault.workers, strict=True):
        if place == "it" and stack.serves(name) != version.number:
            return False
        if place == "before":
            said = stack.reason(version, name)
            if not said:
                return False
            assert all(part in said for part in fault.says), f"{name}: {said}"
    return True


def test_the_page_is_up_to_date() -> None:
    made = "run PYTHONPATH=tests python tests/sync/fault_rows.py > docs/faults.md"
    assert (ROOT / "docs" / "faults.md").read_text() == page(), made
