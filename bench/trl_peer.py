"""A race with TRL's GRPO trainer: seconds and CPU seconds until the mean reward of a step reaches a fixed value.

Ours is the whole system: a job submitted over REST to a stack that is up, whose processes start for it, with ledger,
signed versions and spans of every hop. TRL is one process that trains (`trl_peer_run.py`, the peers' environment). Both
are counted twice. From the order: our submission, behind which four processes start, import and load, and the start of
TRL's process, which imports and loads. From the first sample: our first sampled token, and `trainer.train()`.

Both get the same weights, prompts in the same order, samples per step, response limit, reward, PPO clip, advantages
by group, mean over all tokens, entropy bonus, AdamW and warm-up; each runs on one thread per process. They differ:
ours samples from the BF16 values of FP32 masters, TRL from FP32; ours trains at lag 1 at most (disjoint) and takes
ratios to the behaviour policy, TRL is on policy; ours has processes on all cores, TRL one process (`--threads`).
TRL adds 1e-4 to a group's standard deviation, ours 1e-6. Random numbers differ, so seeds are compared as a set.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
import time
import tomllib
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import cpu
import msgspec
from queue_peers import PEERS, run
from record import read
from rows import MODELS, ROOT, Row, Say, note, table
from stack import Stack, stack

from syncline.contract.job import ModelSpec
from syncline.contract.token_path import SAMPLED
from syncline.environments.characters import Characters, Options
from syncline.reference.model import load_model

COMMAND = "python bench/trl_peer.py"
RUN = Path(__file__).with_name("trl_peer_run.py")
WINDOW = 5  # steps over which the mean reward is taken
PATIENCE = 600.0  # seconds that one job may take


class Case(msgspec.Struct, frozen=True):
    """A task and a model. `shape`: what differs from the model folder's config."""

    name: str
    model: str
    length: int  # symbols of the right answer
    max_tokens: int
    steps: int
    goal: float = 0.8
    lr: float = 5e-3
    shape: dict[str, Any] = {}


CASES = (
    Case("quickstart", "tiny-moe", 6, 6, 60),
    Case("deep", "tiny-moe", 24, 128, 60, goal=0.4, shape={"num_hidden_layers": 8}),
    Case("long", "tiny-moe", 64, 128, 60, goal=0.3, lr=2e-3, shape={"num_hidden_layers": 8}),
    # lengths as a policy has them by nature: it ends where it likes, some early and a few very late
    Case("tail", "tiny-moe", 48, 512, 60, goal=0.3, lr=2e-3, shape={"num_hidden_layers": 4}),
)


class Race(msgspec.Struct, frozen=True):
    """One side's way: when each step had ended, CPU used by then, its mean reward. Seconds from the order."""

    seconds: list[float]
    cpu: list[float]
    rewards: list[float]
    late: float  # seconds from the order to the first sample; CPU before it is counted for ours alone

    def reached(self, goal: float) -> int | None:
        """The step at which the mean of the last `WINDOW` rewards is at least `goal` for the first time."""
        for at in range(WINDOW, len(self.rewards) + 1):
            if fmean(self.rewards[at - WINDOW : at]) >= goal:
                return at - 1
        return None

    def best(self) -> float:
        """The highest mean of `WINDOW` rewards."""
        return max(fmean(self.rewards[at - WINDOW : at]) for at in range(WINDOW, len(self.rewards) + 1))


def measure(
    cases: Sequence[Case] = CASES,
    seeds: int = 3,
    mode: str = "disjoint",
    threads: Sequence[int] = (1,),
    environment: Path = PEERS,
) -> list[Row]:
    """The rows of this part; none without the peers' environment. Sides take turns, seed by seed."""
    say = Say("trl", f"{COMMAND} --mode {mode}")
    python = environment / "bin" / "python"
    if not python.exists():
        note(f"trl: no {environment.name} (make peers-venv): TRL is left out")
        return say.rows
    for case in cases:
        ours: list[Race] = []
        theirs: dict[int, list[Race]] = {count: [] for count in threads}
        with tempfile.TemporaryDirectory(prefix="sl-bench-") as folder:
            root = models(Path(folder) / "models", case)
            with stack({"SYNCLINE_MODELS": str(root)}) as running:
                for seed in range(seeds):
                    note(f"trl: {case.name}, seed {seed + 1} of {seeds}")
                    ours.append(by_us(running, case, mode, seed))
                    for count in threads:
                        race, name = by_trl(python, root, Path(folder), case, seed, count)
                        theirs[count].append(race)
        for count in threads:
            rows(say, case, mode, ours, theirs[count], f"{name}, {count} thread{'s' * (count > 1)}")
    return say.rows


def rows(say: Say, case: Case, mode: str, ours: list[Race], theirs: list[Race], against: str) -> None:
    """Ratios where both sides reached the goal; what was reached anyway."""
    what = f"{case.name} {case.model}, {mode}"
    pairs = list(zip(ours, theirs, strict=True))
    ends = [(o.reached(case.goal), t.reached(case.goal)) for o, t in pairs]
    both = [
        (o, t, i, j) for (o, t), (i, j) in zip(pairs, ends, strict=True) if i is not None and j is not None
    ]
    to = f"to reward {case.goal:g}"
    if both:
        whole = [o.seconds[i] / t.seconds[j] for o, t, i, j in both]
        say.ratio(what, f"seconds {to} from the order, ours over TRL", whole, against)
        after = [(o.seconds[i] - o.late) / (t.seconds[j] - t.late) for o, t, i, j in both]
        say.ratio(what, f"seconds {to} from the first sample, ours over TRL", after, against)
        say.ratio(what, f"CPU {to}, ours over TRL", [o.cpu[i] / t.cpu[j] for o, t, i, j in both], against)
        say.ratio(what, f"steps {to}, ours over TRL", [(i + 1) / (j + 1) for _, _, i, j in both], against)
    say.ratio(what, "seconds per step, ours over TRL", [pace(o) / pace(t) for o, t in pairs], against)
    say.ratio(what, "CPU per step, ours over TRL", [price(o) / price(t) for o, t in pairs], against)
    for who, races, reached in (
        ("ours", ours, [i for i, _ in ends]),
        (against, theirs, [j for _, j in ends]),
    ):
        say.count(what, f"seeds that reached {case.goal:g}, {who}", sum(i is not None for i in reached), "")
        say.time(what, f"highest mean reward, {who}", [race.best() for race in races], "")
        say.time(what, f"seconds per step, {who}", [pace(race) for race in races], "s")
        say.time(what, f"CPU per step, {who}", [price(race) for race in races], "s")
        there = [race.seconds[i] for race, i in zip(races, reached, strict=True) if i is not None]
        if there:
            say.time(what, f"seconds {to}, {who}", there, "s")
        say.time(what, f"seconds to the first sample, {who}", [race.late for race in races], "s")


def pace(race: Race) -> float:
    """Seconds per step, without the first."""
    return (race.seconds[-1] - race.seconds[0]) / (len(race.seconds) - 1)


def price(race: Race) -> float:
    """CPU seconds per step, without the first."""
    return (race.cpu[-1] - race.cpu[0]) / (len(race.cpu) - 1)


def models(root: Path, case: Case) -> Path:
    """A model root with the case's model."""
    shutil.copytree(MODELS / case.model, root / case.model)
    file = root / case.model / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | case.shape))
    return root


# ---- ours --------------------------------------------------------------------------------------------------------
def spec(case: Case, mode: str, seed: int) -> dict[str, Any]:
    """The quickstart without switches and checkpoints, for this case."""
    given = tomllib.loads((ROOT / "examples" / "quickstart.toml").read_text())
    given["name"] = f"trl-{case.name}"
    given["model"] = {"name": case.model}
    given["task"]["options"]["length"] = case.length
    given["sampling"]["max_tokens"] = case.max_tokens
    given["optimizer"]["lr"] = case.lr
    given["schedule"] = {"mode": mode, "updates": case.steps, "max_lag": 1}
    given["checkpoint"]["every"] = case.steps
    given["seeds"] = {"model": seed, "data": seed, "sampling": seed}
    given["rollout"]["workers"] = 1  # beside the trainer, on two cores
    return dict(given)


def by_us(running: Stack, case: Case, mode: str, seed: int) -> Race:
    """One job, from its submission on."""
    before, submitted = sum(cpu.read(running.runs).values()), time.time()
    job, readings = running.run(spec(case, mode, seed), PATIENCE)
    record = read(running, job)
    metrics = sorted(record.metrics, key=lambda m: int(m["update"]))
    spent = [(r.update, sum(r.seconds.values()) - before) for r in readings]
    used = [
        next((seconds for update, seconds in spent if update >= m["update"]), spent[-1][1]) for m in metrics
    ]
    return Race(
        seconds=[m["at"] - submitted for m in metrics],
        cpu=used,
        rewards=[m["reward"] for m in metrics],
        late=min(span.start for span in record.of(SAMPLED)) - submitted,
    )


# ---- TRL ---------------------------------------------------------------------------------------------------------
def by_trl(python: Path, root: Path, folder: Path, case: Case, seed: int, threads: int) -> tuple[Race, str]:
    """One run of TRL, and its name with its version."""
    order = order_of(saved(root, folder / "trl", case.model, seed), folder, case.steps, threads, seed)
    given = spec(case, "colocated", seed)
    count, size = given["batch"]["groups"], given["batch"]["group_size"]
    game = Characters(msgspec.convert(given["task"]["options"], Options), seed)
    order |= {
        "prompts": [game.prompt(i).text for i in range(count * case.steps)],
        "length": case.length,
        "max_tokens": case.max_tokens,
        "rows": count * size,
        "micro": count * size,
        "group_size": size,
        "entropy": given["loss"]["entropy"],
        "lr": case.lr,
        "warmup": given["optimizer"]["warmup"],
    }
    file = folder / "order.json"
    file.write_text(json.dumps(order))
    launched = time.time()
    told = run(python, "race", file, script=RUN)
    seconds, spent, rewards = ([step[key] for step in told["steps"]] for key in ("seconds", "cpu", "reward"))
    late = told["began"] - launched
    found = Race(seconds=[late + one for one in seconds], cpu=spent, rewards=rewards, late=late)
    return found, str(told["version"])


def saved(root: Path, folder: Path, model: str, seed: int) -> Path:
    """A folder as `transformers` reads it, with the weights that a job of this seed begins with."""
    loaded = load_model(root, ModelSpec(name=model), seed)
    shutil.rmtree(folder, ignore_errors=True)
    loaded.model.save_pretrained(folder)
    for file in loaded.folder.path.glob("tokenizer*"):
        shutil.copy(file, folder)
    return folder


def order_of(model: Path, scratch: Path, steps: int, threads: int, seed: int) -> dict[str, Any]:
    """What every order says."""
    known = json.loads((model / "config.json").read_text())
    return {
        "model": str(model),
        "scratch": str(scratch / "scratch"),
        "steps": steps,
        "threads": threads,
        "seed": seed,
        "experts": "num_experts_per_tok" in known,  # how many there are has a name for each family
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--case", choices=[case.name for case in CASES], help="this case alone")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, help="so many steps, though none may reach the goal")
    parser.add_argument("--mode", choices=("colocated", "disjoint"), default="disjoint")
    parser.add_argument("--threads", type=int, nargs="+", default=[1], help="of TRL's process; several: each")
    parser.add_argument("--peers", type=Path, default=PEERS, help="the peers' environment")
    parser.add_argument("--json", type=Path, help="write all rows there")
    asked = parser.parse_args()
    chosen = [case for case in CASES if asked.case in (None, case.name)]
    if asked.steps is not None:
        chosen = [msgspec.structs.replace(case, steps=asked.steps) for case in chosen]
    found = measure(chosen, asked.seeds, asked.mode, asked.threads, asked.peers)
    print(table(found))
    if asked.json is not None:
        asked.json.write_bytes(msgspec.json.encode(found))
