"""What must hold of every state of the machine, and of every step it takes.

Safety only, and only what one state or one step shows. What needs the engines themselves (that two of them
are never awake on one device, that each switch ends) is held by the property tests with a model of them.
"""

from __future__ import annotations

from collections.abc import Mapping

from syncline.contract import events as e
from syncline.scheduler.machine import Allow, Command, Order
from syncline.scheduler.stages import STANCES, End, State, number, rollouts, version_waits


class BrokenInvariant(Exception):
    """The machine reached a state that its theory excludes. The message names the rule and the state."""


def check(state: State) -> None:
    """Raise `BrokenInvariant` unless `state` is one that the machine may be in."""
    stance = STANCES[state.stage]
    disjoint, opened = state.mode == "disjoint", stance.gate == "open"
    both = stance.rollout == stance.trainer == "awake"
    done, result = state.stage == "done", state.result
    sinces = (state.rollout_since, state.trainer_since, state.gate_since, state.pool_since)
    rules = {
        "colocated engines are not ordered awake together": disjoint or not both,
        "an open gate needs an awake rollout": not opened or stance.rollout == "awake",
        "an open gate needs an active version": not opened or state.active is not None,
        "work is in flight only while rollout is awake": state.drained or done or stance.rollout == "awake",
        "behind an open gate nothing counts as drained": not opened or not state.drained,
        "joining and flowing are disjoint": disjoint or state.stage not in ("join", "flow"),
        "sampling and clearing are colocated": not disjoint or state.stage not in ("sample", "clear"),
        "a wanted pause or mode shuts the gate": not opened
        or (state.wanted == state.mode and not state.paused),
        "an ended job has a result": done == (result is not None),
        "success means that the newest version is active": result is None
        or result.state != "succeeded"
        or (state.finished and not version_waits(state)),
        "orders are numbered": min(sinces) >= 1 and max(sinces) <= state.seq,
        "every worker that is wanted is waited for": rollouts(state) >= state.pool,
        "only workers that leave have emptied": all(number(name) >= state.pool for name in state.emptied),
        "no more have acknowledged than there are": max(state.sleepers, state.hearers) <= rollouts(state),
    }
    _hold(rules, state)


def check_step(before: State, event: e.Event, after: State, commands: tuple[Command, ...]) -> None:
    """Raise `BrokenInvariant` unless `event` may lead from `before` to `after` with these commands."""
    orders = [command for command in commands if isinstance(command, Order)]
    allows = [command.submit for command in commands if isinstance(command, Allow)]
    ends = [command for command in commands if isinstance(command, End)]
    was, now = (STANCES[state.stage].gate == "open" for state in (before, after))
    empty = before.drained or isinstance(event, e.Drained)
    over = before.stage == "done"
    minted, active = before.minted, before.active
    rules = {
        "order numbers rise by one": [before.seq, *(order.seq for order in orders)]
        == list(range(before.seq, after.seq + 1)),
        "the last order is what the stage says": not orders or orders[-1].phase == STANCES[after.stage].phase,
        "another stage is another order": before.stage == after.stage or bool(orders),
        "the mode changes with nothing in flight": before.mode == after.mode or empty,
        "no order to sleep while work is in flight": empty
        or all(order.rollout == "awake" or order.phase == "done" for order in orders),
        "the pool changes by request, in disjoint jobs": before.pool == after.pool
        or (isinstance(event, e.ScaleTo) and before.mode == "disjoint"),
        "a worker leaves once it is not wanted": len(after.engines) >= len(before.engines)
        or (isinstance(event, e.WorkerLeft) and number(event.who) >= before.pool),
        "minted versions never fall": minted is None or (after.minted is not None and after.minted >= minted),
        "active versions never fall": active is None or (after.active is not None and after.active >= active),
        "submission follows the gate": allows == ([now] if was != now else []),
        "a job ends once": len(ends) == (after.stage == "done" and not over),
        "an ended job stays ended": not over or after is before,
        "no one acknowledged an order that was not given": not isinstance(event, e.Slept | e.Woke)
        or event.who not in after.engines
        or after.engines[event.who].newest <= before.seq,
    }
    _hold(rules, before, event, after, commands)


def _hold(rules: Mapping[str, bool], *where: object) -> None:
    for rule, holds in rules.items():
        if not holds:
            raise BrokenInvariant(f"{rule}: {' '.join(map(str, where))}")
