"""Tokens per second of the reference rollout engine, next to the two ways in which `transformers` generates.

All three run in this process, one after the other, repetition by repetition: the same model, the same weights, the
same 64 prompts of mixed length, the same number of sampled tokens of each, one thread.

`generate` takes the prompts as one left-padded batch and goes on until the longest response is done. Continuous
batching (`init_continuous_batching`) gets a cache sized for the load, since what it chooses by itself takes half a
minute to fill with zeros. Both are asked for tokens alone; the engine also gives the log-prob of each token.

Ratios are of CPU seconds of the whole process, which a busy machine stretches less than wall-clock seconds.
"""

from __future__ import annotations

import argparse
import random
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import msgspec
import torch
from rows import MODELS, Row, Say, note, table
from transformers import GenerationConfig
from transformers.generation.configuration_utils import ContinuousBatchingConfig

from syncline.contract.job import ModelSpec
from syncline.contract.version_path import TensorEntry, VersionId, VersionManifest, sign
from syncline.reference.model import LoadedModel, export_state, load_model, round_to_bf16
from syncline.rollout.engine import CommitPolicy, Request, Sampling
from syncline.rollout.engines.reference import ReferenceEngine
from syncline.runtime.store import BlobStore

JOB, KEY = "j00000bench", b"a key for the bench"
PAGE, BATCH_TOKENS = 32, 256  # of continuous batching: the best of those tried
NEVER = 1 << 30  # no token has this id: nothing but its length ends a response
COMMAND = "python bench/engine.py"


class Load(msgspec.Struct, frozen=True):
    """What is to be sampled: prompts and the length of each response."""

    prompts: tuple[tuple[int, ...], ...]
    lengths: tuple[int, ...]

    @property
    def tokens(self) -> int:
        return sum(self.lengths)


class Cost(msgspec.Struct, frozen=True):
    """One run."""

    wall: float
    cpu: float


def load(requests: int, vocab: int) -> Load:
    """Prompts of 3 to 40 tokens; responses of log-normal length, median 40, at most 200."""
    drawn = random.Random(0)
    return Load(
        prompts=tuple(
            (1, *(drawn.randrange(4, vocab) for _ in range(drawn.choice([2, 5, 11, 23, 39]))))
            for _ in range(requests)
        ),
        lengths=tuple(max(2, min(200, round(drawn.lognormvariate(3.7, 0.8)))) for _ in range(requests)),
    )


def measure(requests: int, repetitions: int) -> list[Row]:
    """The rows of this part."""
    torch.set_num_threads(1)
    loaded = load_model(MODELS, ModelSpec(name="tiny-moe"), 0)
    round_to_bf16(loaded.model)
    todo = load(requests, loaded.vocab)
    costs: dict[str, list[Cost]] = {"engine": [], "experts": [], "generate": [], "continuous": []}
    with tempfile.TemporaryDirectory(prefix="sl-bench-") as folder, torch.inference_mode():
        engine = serving(loaded, Path(folder), requests)
        warm = Load(todo.prompts[:4], (4,) * min(4, requests))
        gap = worst_gap(loaded, sample(engine, warm, experts=False), warm)
        for repetition in range(repetitions):
            note(f"engine: repetition {repetition + 1} of {repetitions}")
            costs["engine"].append(timed(partial(sample, engine, todo, experts=False)))
            costs["experts"].append(timed(partial(sample, engine, todo, experts=True)))
            costs["generate"].append(timed(partial(generate, loaded.model, todo)))
            with continuous(loaded.model, todo) as manager:
                serve(manager, warm, "warm")
                costs["continuous"].append(timed(partial(serve, manager, todo, "run")))
    return rows(todo, costs, gap)


def rows(todo: Load, costs: dict[str, list[Cost]], gap: float) -> list[Row]:
    """Ratios first."""
    say = Say("engine", COMMAND)
    case = f"tiny-moe, {len(todo.prompts)} requests"
    name = f"transformers {version('transformers')}"
    peers = {"generate": f"{name} generate, left-padded", "continuous": f"{name} continuous batching"}
    for peer, against in peers.items():
        ratios = [p.cpu / e.cpu for p, e in zip(costs[peer], costs["engine"], strict=True)]
        say.ratio(case, f"tokens per CPU second, engine over {peer}", ratios, against)
    with_experts = [x.cpu / e.cpu for x, e in zip(costs["experts"], costs["engine"], strict=True)]
    say.ratio(case, "CPU seconds with expert ids over without", with_experts, "the engine itself")
    say.count(case, "tokens sampled", todo.tokens, "tokens")
    say.count(case, "largest log-prob difference to a plain forward pass", gap, "nats")
    for who, several in costs.items():
        say.time(case, f"tokens per second, {who}", [todo.tokens / cost.wall for cost in several], "tokens/s")
        say.time(
            case, f"tokens per CPU second, {who}", [todo.tokens / cost.cpu for cost in several], "tokens/s"
        )
    return say.rows


def timed(run: Callable[[], object]) -> Cost:
    """Wall-clock and CPU seconds of this process, all its threads."""
    wall, cpu = time.perf_counter(), time.process_time()
    run()
    return Cost(time.perf_counter() - wall, time.process_time() - cpu)


# ---- the engine --------------------------------------------------------------------------------------------
def serving(loaded: LoadedModel, folder: Path, limit: int) -> ReferenceEngine:
    """An engine that serves the weights of `loaded`, installed as any version is."""
    store = BlobStore(folder / "store")
    entries = []
    for name, tensor in export_state(loaded.model, loaded.plan):
        raw = tensor.to(torch.bfloat16).reshape(-1).view(torch.uint8).numpy()
        entry = TensorEntry(
            name=name, dtype="BF16", shape=tuple(tensor.shape), nbytes=raw.nbytes, digest=store.put(raw.data)
        )
        entries.append(entry)
    manifest = VersionManifest(
        job=JOB,
        version=VersionId(0, 0),
        parent=None,
        optimizer_step=0,
        contract="c" * 64,
        representation="bf16",
        model=loaded.folder.config_digest,
        tensors=tuple(sorted(entries, key=lambda entry: entry.name)),
    )
    engine = ReferenceEngine(MODELS, ModelSpec(name=loaded.folder.path.name), JOB, KEY, limit)
    engine.stage(sign(manifest, KEY), store)
    engine.commit(CommitPolicy(kind="drain"))
    return engine


def sample(engine: ReferenceEngine, todo: Load, experts: bool) -> list[tuple[list[int], list[float]]]:
    """Tokens and log-probs of each request, in order."""
    found: dict[str, tuple[list[int], list[float]]] = {}
    for i, (prompt, length) in enumerate(zip(todo.prompts, todo.lengths, strict=True)):
        fixed = Sampling(max_tokens=length, min_tokens=length)
        name = f"{JOB}-{i}-0"
        found[name] = ([], [])
        engine.submit(Request(trajectory=name, prompt=prompt, seed=(0, i), sampling=fixed, experts=experts))
    while engine.running:
        for chunk in engine.step():
            tokens, logprobs = found[chunk.trajectory]
            tokens += chunk.tokens
            logprobs += chunk.logprobs
    check([len(tokens) for tokens, _ in found.values()], todo, "the engine")
    return list(found.values())


def worst_gap(loaded: LoadedModel, sampled: list[tuple[list[int], list[float]]], todo: Load) -> float:
    """Largest difference of the engine's log-probs to those of one plain forward pass per request."""
    worst = 0.0
    for (tokens, logprobs), prompt in zip(sampled, todo.prompts, strict=True):
        ids_1T = torch.tensor([[*prompt, *tokens]])
        plain_TV = torch.log_softmax(loaded.model(input_ids=ids_1T).logits[0], dim=-1)
        plain_S = plain_TV[len(prompt) - 1 : -1].gather(-1, ids_1T[0, len(prompt) :, None])[:, 0]
        worst = max(worst, float((plain_S - torch.tensor(logprobs)).abs().max()))
    return worst


# ---- transformers ------------------------------------------------------------------------------------------
def generate(model: Any, todo: Load) -> None:
    """One left-padded batch, until the longest response is done; what the others get beyond theirs is wasted."""
    longest = max(map(len, todo.prompts))
    ids_RP = torch.tensor([[0] * (longest - len(prompt)) + list(prompt) for prompt in todo.prompts])
    mask_RP = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in todo.prompts])
    out_RT = model.generate(
        input_ids=ids_RP, attention_mask=mask_RP, generation_config=configured(max(todo.lengths))
    )
    made = out_RT.shape[1] - longest
    check([min(made, length) for length in todo.lengths], todo, "generate")


@contextmanager
def continuous(model: Any, todo: Load) -> Iterator[Any]:
    """A running manager with room for all of `todo` at once."""
    pages = sum(
        -(-(len(prompt) + length) // PAGE) for prompt, length in zip(todo.prompts, todo.lengths, strict=True)
    )
    sized = ContinuousBatchingConfig(page_size=PAGE, num_blocks=pages + 8, max_batch_tokens=BATCH_TOKENS)
    before = model.config._attn_implementation
    manager = model.init_continuous_batching(
        generation_config=configured(1), continuous_batching_config=sized
    )
    manager.start()
    try:
        yield manager
    finally:
        manager.stop(block=True)
        model.set_attn_implementation(before)  # it puts a paged one in its place


def serve(manager: Any, todo: Load, label: str) -> None:
    """Every request joins at once and leaves when its own length is reached."""
    for i, (prompt, length) in enumerate(zip(todo.prompts, todo.lengths, strict=True)):
        manager.add_request(list(prompt), request_id=f"{label}{i}", max_new_tokens=length, eos_token_id=NEVER)
    made = dict.fromkeys(range(len(todo.prompts)), 0)
    left = len(made)
    while left:
        result = manager.get_result(timeout=60)
        if result is None or result.error:
            raise RuntimeError(f"continuous batching: {result.error if result else 'no result within 60 s'}")
        if result.is_finished():
            made[int(result.request_id.removeprefix(label))] = len(result.generated_tokens)
            left -= 1
    check(list(made.values()), todo, "continuous batching")


def configured(tokens: int) -> GenerationConfig:
    """Plain sampling from the model's own distribution, as the engine does it; no token ends a response."""
    return GenerationConfig(  # type: ignore[no-untyped-call]
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        eos_token_id=NEVER,
        pad_token_id=0,
        max_new_tokens=tokens,
    )


def check(made: Sequence[int], todo: Load, who: str) -> None:
    """Raises `RuntimeError` unless exactly the tokens asked for were sampled."""
    if list(made) != list(todo.lengths):
        raise RuntimeError(f"{who} made {sum(made)} tokens of {todo.tokens}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--repetitions", type=int, default=3)
    given = parser.parse_args()
    print(table(measure(given.requests, given.repetitions)))
