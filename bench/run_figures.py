"""The loop's own figures: real jobs on a stack of their own, read back from the gateway and the span store.

tokens per second   sampled tokens over the time in which a worker samples (union of its `sampled` hops)
idle share          of a phase in which a side is ordered awake: the time it neither samples (rollout) nor
                    steps or mints (trainer); of rollout the mean over workers
sync pause          `version.active` pause_ms: no token is sampled because of the swap
hand-over           colocated: see handover.py
"""

from __future__ import annotations

import argparse
from collections import Counter, defaultdict
from collections.abc import Sequence
from itertools import pairwise
from statistics import mean
from typing import Any

import cpu
import handover
from record import Record, read
from rows import Row, Say, note, table
from stack import stack
from timeline import length, overlap

from syncline.contract.token_path import SAMPLED, SCORED, TRAINED
from syncline.contract.version_path import ACTIVE, MINTED

COMMAND = "python bench/run_figures.py"
MODELS = ("tiny-moe", "tiny-dense")
MODES = ("colocated", "disjoint")
SWITCHING = "switching"  # colocated, then disjoint: what the short form runs
CASES = tuple((model, mode) for model in MODELS for mode in MODES)
PATIENCE = 300.0  # seconds that one job may take


def spec(model: str, mode: str, updates: int) -> dict[str, Any]:
    """64 trajectories per update, of log-normal length, on two workers. "switching": half in each mode."""
    schedule: dict[str, Any] = {"mode": mode}
    if mode == SWITCHING:
        schedule = {"mode": "colocated", "switches": [{"at_update": updates // 2, "mode": "disjoint"}]}
    return {
        "name": f"{model}-{mode}",
        "model": {"name": model},
        "task": {"environment": "characters", "options": {"game": "kind", "length": 6, "alphabet": "ab12"}},
        "sampling": {"max_tokens": 64, "length": "lognormal", "length_median": 16, "length_sigma": 0.8},
        "batch": {"groups": 8, "group_size": 8},
        "optimizer": {"lr": 5e-3},
        "schedule": {"updates": updates, "max_lag": 1, **schedule},
        "rollout": {"workers": 2},
        "checkpoint": {"every": 10},
    }


def measure(cases: Sequence[tuple[str, str]], updates: int) -> list[Row]:
    """The rows of this part, one job per case."""
    say = Say("run", f"{COMMAND} --updates {updates}")
    with stack() as running:
        for model, mode in cases:
            case = f"{model} {mode}"
            note(f"run: {case}")
            job, readings = running.run(spec(model, mode, updates), PATIENCE)
            record = read(running, job)
            sampling(say, case, record)
            training(say, case, record)
            syncing(say, case, record)
            idling(say, case, record)
            if mode != "disjoint":
                handing_over(say, case, record)
            charging(say, case, cpu.per_update(readings))
    return say.rows


def sampling(say: Say, case: str, record: Record) -> None:
    """Tokens per second of each worker and of all together."""
    tokens: Counter[str] = Counter()
    for span in record.of(SAMPLED):
        tokens[str(span.attributes["worker"])] += int(str(span.attributes["end"])) - int(
            str(span.attributes["start"])
        )
    say.count(case, "tokens sampled", tokens.total(), "tokens")
    for worker in record.workers:
        seconds = length(record.times(SAMPLED, worker=worker))
        say.time(case, f"tokens per second, {worker}", [tokens[worker] / seconds], "tokens/s")
    together = length(record.times(SAMPLED))
    say.time(case, "tokens per second, all workers", [tokens.total() / together], "tokens/s")


def training(say: Say, case: str, record: Record) -> None:
    """Steps, and what came of them."""
    say.count(case, "updates", len(record.metrics), "updates")
    say.count(case, "trajectories trained", len(record.of(TRAINED)), "trajectories")
    say.count(case, "largest lag", max(m["lag_max"] for m in record.metrics), "updates")
    steps = [m["seconds"] for m in record.metrics]
    say.time(case, "step", steps, "s")
    say.time(
        case, "tokens per second of a step", [m["tokens"] / m["seconds"] for m in record.metrics], "tokens/s"
    )
    began = min(phase.start for phase in record.phases if phase.name in ("sample", "flow"))
    ended = max(m["at"] for m in record.metrics)
    say.time(case, "trajectories per second", [len(record.of(TRAINED)) / (ended - began)], "trajectories/s")
    made = sorted(m["at"] for m in record.metrics)
    say.time(case, "seconds per update", [after - before for before, after in pairwise(made)], "s")


def syncing(say: Say, case: str, record: Record) -> None:
    """Pauses, and the way of a version; version 0 apart, which nobody waits for."""
    swaps = [span for span in record.of(ACTIVE) if not str(span.attributes["version"]).endswith(".0")]
    pauses = [float(str(span.attributes["pause_ms"])) for span in swaps]
    say.time(case, "sync pause, mean", [mean(pauses)], "ms")
    say.time(case, "sync pause, longest", [max(pauses)], "ms")
    ways = [
        version["active"] - version["minted"]
        for version in record.versions
        if not version["version"].endswith(".0") and version["active"] is not None
    ]
    say.time(case, "minted to active", ways, "s")


def idling(say: Say, case: str, record: Record) -> None:
    """Idle share of both sides in each phase in which they are ordered awake."""
    busy = {worker: record.times(SAMPLED, worker=worker) for worker in record.workers}
    train = [*record.times(SCORED), *record.times(MINTED)]
    first = min(phase.start for phase in record.phases if phase.name in ("sample", "flow"))
    for name in dict.fromkeys(phase.name for phase in record.phases):
        phases = [phase for phase in record.phases if phase.name == name and phase.start >= first]
        for side, engines in (("rollout", list(busy.values())), ("trainer", [train])):
            awake = record.awake(phases, side)
            if length(awake) > 0:
                worked = mean(overlap(awake, engine) for engine in engines) / length(awake)
                say.share(case, f"idle share of {side} in {name}", 1 - worked, "the phase")


def charging(say: Say, case: str, spent: dict[str, float]) -> None:
    """CPU seconds per update, by process: on two cores they are what there is to share."""
    for name, seconds in sorted(spent.items(), key=lambda item: -item[1]):
        say.share(case, f"share of CPU, {name}", seconds / sum(spent.values()), "all processes")
        say.time(case, f"CPU per update, {name}", [seconds * 1000], "ms")


def handing_over(say: Say, case: str, record: Record) -> None:
    """What the hand-over is spent on."""
    cycles = handover.hand_overs(record)
    totals = [sum(cycle.values()) for cycle in cycles]
    samples = record.ordered("sample")
    whole = [after.start - before.start for before, after in pairwise(samples)][1:]
    say.share(case, "share of cycle, hand-over", sum(totals) / sum(whole), "the cycle")
    spent: dict[str, float] = defaultdict(float)
    for cycle in cycles:
        for label, seconds in cycle.items():
            spent[label] += seconds
    ordered = sorted(spent.items(), key=lambda item: -item[1])
    for label, seconds in ordered:
        say.share(case, f"share of hand-over, {label}", seconds / sum(totals), "the hand-over")
    say.time(case, "cycle", whole, "s")
    say.time(case, "hand-over", totals, "s", middle=mean)
    for label, _ in ordered:
        spent_ms = [cycle.get(label, 0.0) * 1000 for cycle in cycles]
        say.time(case, f"hand-over, {label}", spent_ms, "ms", middle=mean)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--updates", type=int, default=12, help="updates of each job (default: 12)")
    parser.add_argument("--model", choices=MODELS, help="only this model")
    parser.add_argument("--mode", choices=(*MODES, SWITCHING), help="only this mode")
    given = parser.parse_args()
    models = [given.model] if given.model else MODELS
    modes = [given.mode] if given.mode else MODES
    print(table(measure([(model, mode) for model in models for mode in modes], given.updates)))
