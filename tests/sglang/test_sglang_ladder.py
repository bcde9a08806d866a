"""The validation ladder against real SGLang servers: clean, and with defects that it must find at their own level.

Servers are those of the session: one takes every version of a climb in turn, the other is the cold one of level 6.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import msgspec
import pytest
from conformance.forge import MODELS
from fleet import PYTHON, Fleet
from safetensors.torch import load_file, save_file
from test_sglang_precision import LORA
from torch import Tensor

from syncline.contract.job import JobSpec
from syncline.contract.precision import PrecisionContract
from syncline.contract.recipes import RECIPES
from syncline.contract.validation import Level, Report
from syncline.lab.ladder.climb import climb
from syncline.lab.ladder.rollouts import Servers
from syncline.lab.pair import JOB, KEY, one_thread
from syncline.reference.model import TextCodec
from syncline.rollout.engine import Score
from syncline.rollout.engines.sglang import checkpoint, engine
from syncline.rollout.engines.sglang.client import Server
from syncline.rollout.engines.sglang.engine import SGLangEngine
from syncline.rollout.engines.sglang.loader import Loader

BF16 = RECIPES["bf16"]
OWN: tuple[Level, ...] = (1, 2, 4, 6)
"""The levels that a server shows."""


class Shared(Servers):
    """The session's servers in place of new ones."""

    def __init__(self, fleet: Fleet, folder: Path, cold: int = 1) -> None:
        super().__init__(PYTHON, folder)
        self._fleet, self._cold = fleet, cold

    def _engine(self, spec: JobSpec, models: Path) -> SGLangEngine:
        number = len(self._made)
        made = self._fleet.engine(
            models / spec.model.name,
            self._folder / f"versions-{number}",
            JOB,
            KEY,
            spec.rollout.max_running,
            contract=spec.contract(),
            number=min(number, self._cold),
        )
        self._made.append(made)
        return made


def spec_of(contract: PrecisionContract = BF16, seed: int = 0, temperature: float = 1.0) -> JobSpec:
    spec: dict[str, Any] = {
        "name": "ladder",
        "model": {"name": "tiny-moe"},
        "precision": {"custom": json.loads(msgspec.json.encode(contract))},
        "task": {"options": {"game": "kind", "length": 4, "alphabet": "ab12"}},
        "sampling": {"temperature": temperature},
        "schedule": {"in_flight": "drain", "mode": "colocated", "max_lag": 0},
        "seeds": {"model": seed},
    }
    return JobSpec.model_validate_json(json.dumps(spec))


@pytest.fixture
def climbed(fleet: Fleet, tmp_path: Path) -> Callable[..., Report]:
    def climbed(spec: JobSpec, levels: tuple[Level, ...] = OWN, cold: int = 1) -> Report:
        one_thread()
        return climb(spec, MODELS, tmp_path / "climb", levels, rollouts=Shared(fleet, tmp_path, cold))

    return climbed


def story(report: Report) -> str:
    return "; ".join(
        f"level {result.level}: {result.broke or [(c.name, c.found, c.bound, c.where) for c in result.failed]}"
        for result in report.results
        if not result.holds
    )


@pytest.mark.timeout(900)
def test_a_clean_server_climbs_and_says_what_it_cannot_show(climbed: Callable[..., Report]) -> None:
    report = climbed(spec_of(), (1, 2, 3, 4, 5, 6, 7))
    assert report.failed_at is None, story(report)
    told = {check.name: check for result in report.results for check in result.checks}
    made = {name for name, check in told.items() if check.applies}
    assert {"prompt ids", "matched numerics", "decode against prefill"} <= made
    assert {
        "the active version is the manifest's",
        "warm equals cold",
        "scores move as the trainer says",
    } <= made
    assert not told["one operator"].applies
    assert "server" in told["one operator"].source


def test_a_recipe_that_the_server_only_emulates_is_no_such_recipe(climbed: Callable[..., Report]) -> None:
    report = climbed(spec_of(RECIPES["mxfp8"]), (1, 2))
    assert report.failed_at == 1
    assert "activations wide" in story(report)


def test_adapters_climb_too(climbed: Callable[..., Report]) -> None:
    """On one server: its cold engine is one that has loaded base and adapter anew."""
    report = climbed(spec_of(LORA, seed=len(DEFECTS)), OWN, cold=0)
    assert report.failed_at is None, story(report)


# ---- defects
Change = Callable[[], AbstractContextManager[Any]]


def _around(owner: Any, name: str, change: Callable[..., Any]) -> Change:
    """`owner.name` replaced by `change(original, *args)`."""
    original = getattr(owner, name)

    def changed(*args: Any, **kwargs: Any) -> Any:
        return change(original, *args, **kwargs)

    return lambda: patch.object(owner, name, changed)


LIVE = 2
"""The first version that level 6 publishes."""
STALE = "model.layers.1.self_attn.o_proj.weight"


def _number(name: str) -> int:
    """Of a version's folder, such as 0.2-0123456789ab, or of an adapter's."""
    return int(name.partition("0.")[2].partition("-")[0].partition("@")[0])


def _misnamed(from_version: int) -> Change:
    """The server is given one tensor under a name that it skips with success."""

    def wrote(original: Callable[..., None], file: Path, tensors: Mapping[str, Tensor], entries: Any) -> None:
        original(file, tensors, entries)
        if _number(file.parent.name) >= from_version:
            held = load_file(file)
            held[STALE.replace("o_proj", "out_proj")] = held.pop(STALE)
            save_file(held, file, metadata={"format": "pt"})

    return _around(checkpoint, "write_tensors", wrote)


def _unread(original: Callable[..., None], self: Loader, server: Server, prepared: Any) -> None:
    """No read-back: what the server calls a success is one."""


def _relabelled(original: Callable[..., None], self: Loader, server: Server, prepared: Any) -> None:
    """The server takes over the version's label, and keeps its weights."""
    if prepared.version.number < LIVE:
        original(self, server, prepared)
    else:
        label = {"new_version": prepared.label, "abort_all_requests": False}
        server._call("POST", "/update_weight_version", label)


def _of_before(chosen: str) -> Change:
    """From the third version on, the adapter's tensors that hold `chosen` in their name are those of the second."""
    kept: dict[str, Tensor] = {}

    def read(original: Callable[..., dict[str, Tensor]], file: Path) -> dict[str, Tensor]:
        found = original(file)
        if _number(file.parent.name) >= LIVE:
            return {name: kept[name] if chosen in name else tensor for name, tensor in found.items()}
        kept.update(found)
        return found

    return _around(checkpoint, "read_tensors", read)


def _shifted(
    original: Callable[..., Score], server: Any, serving: Any, ids: Any, at: Any, *rest: Any
) -> Score:
    return original(server, serving, ids, [i - 1 for i in at], *rest)


def _at_one(original: Callable[..., Score], *args: Any) -> Score:
    """Log-probs of the server's own temperature."""
    return original(*args[:4], 1.0, *args[5:])


def _alpha_lost(original: Callable[..., None], self: Server, name: str, config: Any, tensors: str) -> None:
    original(self, name, {**config, "lora_alpha": config["r"]}, tensors)


def _all(*changes: Change) -> Change:
    @contextmanager
    def broken() -> Iterator[None]:
        with ExitStack() as stack:
            for change in changes:
                stack.enter_context(change())
            yield

    return broken


DEFECTS: dict[str, tuple[Level, Change, PrecisionContract, str]] = {
    "misnamed tensor": (2, _misnamed(0), BF16, f"tensor {STALE} reads back"),
    "token shift": (4, _around(engine, "score", _shifted), BF16, "matched numerics"),
    "temperature mismatch": (4, _around(engine, "score", _at_one), BF16, "matched numerics"),
    "BOS twice": (
        4,
        _around(TextCodec, "encode", lambda original, self, text: [1, *original(self, text)]),
        BF16,
        "prompt ids",
    ),
    "alpha lost": (4, _around(Server, "load_adapter", _alpha_lost), LORA, "matched numerics"),
    "one tensor of the version before, unread": (
        6,
        _all(_misnamed(LIVE), _around(Loader, "verify", _unread)),
        BF16,
        "scores move as the trainer says",
    ),
    "a version that is a label alone": (
        6,
        _around(Loader, "load", _relabelled),
        BF16,
        "scores move as the trainer says",
    ),
    "adapter installed and not read": (6, _of_before(".lora_"), LORA, "scores move as the trainer says"),
    "mixed adapter version": (6, _of_before("layers.0."), LORA, "scores move as the trainer says"),
}
"""Defect -> the level that must fail, how it is made, the job's contract, and words of what is said."""


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", DEFECTS)
def test_a_defect_on_the_server_is_found_at_its_own_level(name: str, climbed: Callable[..., Report]) -> None:
    level, broken, contract, words = DEFECTS[name]
    # adapters of other climbs lie on the same server, under names that hold a digest: none is met twice
    seed = list(DEFECTS).index(name)
    with broken():
        report = climbed(spec_of(contract, seed, temperature=0.7), OWN, cold=0)
    assert report.failed_at == level, story(report)
    assert words in story(report)
    assert report.diagnosis is not None
