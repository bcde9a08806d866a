"""Small faults planted in the machine. Each must be caught by a property, or the properties are too weak."""

from __future__ import annotations

from typing import NamedTuple


class Mutant(NamedTuple):
    """`old` occurs once in `file` and is replaced by `new`."""

    name: str
    file: str
    old: str
    new: str


MUTANTS = (
    # stances
    Mutant(
        "trainer awake while sampling",
        "stages",
        '"sample", rollout="awake", trainer="asleep"',
        '"sample", rollout="awake", trainer="awake"',
    ),
    Mutant(
        "rollout awake while training",
        "stages",
        '"train", rollout="asleep", trainer="awake"',
        '"train", rollout="awake", trainer="awake"',
    ),
    Mutant(
        "the gate stays open in drain",
        "stages",
        '"drain", rollout="awake", trainer="asleep", gate="shut"',
        '"drain", rollout="awake", trainer="asleep", gate="open"',
    ),
    Mutant(
        "rollout sleeps in drain",
        "stages",
        '"drain", rollout="awake"',
        '"drain", rollout="asleep"',
    ),
    Mutant(
        "rollout sleeps in sync",
        "stages",
        '"sync", rollout="awake", trainer="asleep", gate="shut"',
        '"sync", rollout="asleep", trainer="asleep", gate="shut"',
    ),
    Mutant(
        "trainer sleeps in flow",
        "stages",
        '"flow", rollout="awake", trainer="awake"',
        '"flow", rollout="awake", trainer="asleep"',
    ),
    # facts
    Mutant(
        "any acknowledgement ever counts",
        "stages",
        "state.engines[name].slept >= since",
        "state.engines[name].slept > 0",
    ),
    Mutant(
        "an order to sleep counts as sleep",
        "stages",
        'return ordered == "asleep" and state.engines[name].slept >= since',
        'return ordered == "asleep"',
    ),
    Mutant(
        "one sleeper is enough",
        "stages",
        "s.sleepers == rollouts(s)",
        "s.sleepers >= 1",
    ),
    Mutant(
        "one listener is enough",
        "stages",
        "state.hearers == rollouts(state)",
        "state.hearers >= 1",
    ),
    Mutant(
        "a sleeper counts twice",
        "stages",
        "old.slept < state.rollout_since <= new.slept",
        "state.rollout_since <= new.slept",
    ),
    Mutant(
        "what was acknowledged before counts for the new gate",
        "machine",
        "state.hearers if old.gate == new.gate else 0",
        "state.hearers",
    ),
    Mutant(
        "sleep under an older order counts",
        "machine",
        "state.sleepers if old.rollout == new.rollout else 0",
        "state.sleepers",
    ),
    Mutant(
        "a pause is not leaving",
        "stages",
        '"leaving": lambda s: s.paused or s.wanted != s.mode',
        '"leaving": lambda s: s.wanted != s.mode',
    ),
    Mutant(
        "another mode is not leaving",
        "stages",
        '"leaving": lambda s: s.paused or s.wanted != s.mode',
        '"leaving": lambda s: s.paused',
    ),
    Mutant(
        "a refused version is waited for",
        "stages",
        "state.refused >= state.minted",
        "state.refused > state.minted",
    ),
    # rows
    Mutant(
        "yield does not wait",
        "stages",
        'Row("yield", ("trainer asleep",), "hub")',
        'Row("yield", (), "hub")',
    ),
    Mutant(
        "sync does not wait",
        "stages",
        'Row("sync", ("newest active",), "hub")',
        'Row("sync", (), "hub")',
    ),
    Mutant(
        "drain does not wait for requests",
        "stages",
        '("drained", "trainer asleep"), "hub"',
        '("trainer asleep",), "hub"',
    ),
    Mutant(
        "drain does not wait for the trainer",
        "stages",
        '("drained", "trainer asleep"), "hub"',
        '("drained",), "hub"',
    ),
    Mutant(
        "clear does not wait",
        "stages",
        'Row("clear", ("rollouts asleep",), "train")',
        'Row("clear", (), "train")',
    ),
    Mutant(
        "join does not wait",
        "stages",
        'Row("join", ("newest active",), "flow")',
        'Row("join", (), "flow")',
    ),
    Mutant(
        "flow skips drain",
        "stages",
        'Row("flow", ("leaving",), "drain")',
        'Row("flow", ("leaving",), "hub")',
    ),
    Mutant(
        "sample skips drain",
        "stages",
        'Row("sample", ("batch",), "drain")',
        'Row("sample", ("batch",), "clear")',
    ),
    Mutant(
        "a short batch is not seen",
        "stages",
        '    Row("train", ("short",), "yield"),\n',
        "",
    ),
    Mutant(
        "nobody can resume",
        "stages",
        'Row("paused", ("resumed", "trainer asleep"), "hub")',
        'Row("paused", ("short",), "hub")',
    ),
    Mutant(
        "a pause does not hold",
        "stages",
        '    (("paused",), "paused"),\n',
        "",
    ),
    Mutant(
        "the hub forgets a waiting version",
        "stages",
        '    (("version waits",), "sync"),\n',
        "",
    ),
    Mutant(
        "the hub forgets a batch",
        "stages",
        '    (("batch",), "clear"),\n',
        "",
    ),
    Mutant(
        "the hub forgets that all is made",
        "stages",
        '    (("all made",), "clear"),\n',
        "",
    ),
    # stepping
    Mutant(
        "success without the newest version",
        "machine",
        '_hold(state, ("finished", "newest active"))',
        '_hold(state, ("finished",))',
    ),
    Mutant(
        "an ended job goes on",
        "machine",
        '    if state.stage == "done":\n        return state, ()\n',
        "",
    ),
    Mutant(
        "submission is never allowed",
        "machine",
        "commands.append(Allow(submit=opened))",
        "commands.append(Allow(submit=False))",
    ),
    Mutant(
        "the mode is never taken",
        "machine",
        "mode=state.wanted)",
        "mode=state.mode)",
    ),
    Mutant(
        "the mode is taken at once",
        "machine",
        "return change(state, wanted=mode)",
        "return change(state, wanted=mode, mode=mode)",
    ),
    Mutant(
        "old sleep of rollout counts",
        "machine",
        "rollout_since=state.rollout_since if old.rollout == new.rollout else seq",
        "rollout_since=state.rollout_since",
    ),
    Mutant(
        "old sleep of the trainer counts",
        "machine",
        "trainer_since=state.trainer_since if old.trainer == new.trainer else seq",
        "trainer_since=state.trainer_since",
    ),
    Mutant(
        "an old gate counts",
        "machine",
        "gate_since=state.gate_since if old.gate == new.gate else seq",
        "gate_since=state.gate_since",
    ),
    Mutant(
        "training has no base",
        "machine",
        'base=state.minted if stage == "train" else state.base',
        "base=None",
    ),
    Mutant(
        "a batch is trained for ever",
        "machine",
        'batch=state.batch and stage == "drain"',
        "batch=state.batch",
    ),
    Mutant(
        "short for ever",
        "machine",
        "        short=False,\n",
        "",
    ),
    Mutant(
        "drained for ever",
        "machine",
        'drained=state.drained and new.gate == "shut"',
        "drained=state.drained",
    ),
    # events
    Mutant(
        "an early drain is told",
        "observe",
        " and heard(state)",
        "",
    ),
    Mutant(
        "an old drain counts",
        "machine",
        'seen = state.stage == "drain" and seq >= state.gate_since',
        'seen = state.stage == "drain"',
    ),
    Mutant(
        "a drain elsewhere counts",
        "machine",
        'seen = state.stage == "drain" and seq >= state.gate_since',
        "seen = seq >= 0",
    ),
    Mutant(
        "versions fall",
        "machine",
        "version if known is None or known < version else known",
        "version",
    ),
    Mutant(
        "a resume is lost",
        "machine",
        "return change(state, paused=False)",
        "return state",
    ),
    # the pool
    Mutant(
        "an acknowledgement of who had the name before counts",
        "stages",
        "if max(slept, woke) < old.first:",
        "if max(slept, woke) < 0:",
    ),
    Mutant(
        "who was empty under an older order counts as empty",
        "machine",
        "case e.Emptied(who=who, seq=seq) if seq >= state.pool_since and",
        "case e.Emptied(who=who, seq=seq) if",
    ),
    Mutant(
        "nobody is told that he leaves",
        "machine",
        "if state.pool != before.pool:",
        "if state.pool < 0:",
    ),
    Mutant(
        "a colocated pool changes",
        "machine",
        'if workers >= 1 and state.mode == "disjoint":',
        "if workers >= 1:",
    ),
)
