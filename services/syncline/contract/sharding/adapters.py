"""LoRA rules, derived from the rules of the weights that they are added to.

W + s B A is cut as W is: where W's rows are cut, B's are and A is whole; where its columns are, A's are and B is whole.
Names: `X.weight`'s A and B are `X.lora_A.weight` and `X.lora_B.weight` on both sides. Megatron itself has no LoRA, so
the trainer's names here are this project's.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from syncline.contract.adapters import DOWN, UP
from syncline.contract.sharding.layout import Layout, Rule


def adapters(rule: Rule, layout: Layout) -> Iterator[Rule]:
    """The rules of A and B on the weight of `rule`; none for biases, norms and other vectors."""
    if rule.adapter == "none" or not all(source.endswith(".weight") for source in rule.sources):
        return
    if len(rule.sources) == 1:
        yield from _pair(rule)
    elif layout.engine == "sglang":
        yield from _stacked(rule)
    elif layout.adapters == "shared":
        down, up = _pair(rule)
        yield msgspec.structs.replace(down, join="shared")
        yield up
    else:
        for at, source in enumerate(rule.sources):
            projection = source.removesuffix(".weight").rsplit(".", 1)[-1]
            single = msgspec.structs.replace(
                rule,
                name=_within(rule.name, projection),
                sources=(source,),
                units=rule.units[at : at + 1],
                join="parts",
                replicate=False,
            )
            yield from _pair(single)


def _pair(rule: Rule) -> tuple[Rule, Rule]:
    """A and B as `rule` cuts its weight."""
    cut = rule.over and rule.adapter == "cut"
    down, up = (_renamed(rule, part) for part in (DOWN, UP))
    if cut and rule.axis == 1:
        return down, _uncut(up)
    return _uncut(down), up if cut else _uncut(up)


def _stacked(rule: Rule) -> Iterator[Rule]:
    """SGLang's: the A of all projections above one another, and so the B."""
    down, up = _pair(rule)
    yield msgspec.structs.replace(down, join="parts")
    yield up


def _uncut(rule: Rule) -> Rule:
    return msgspec.structs.replace(rule, over="", axis=0, units=(), join="parts", pad=False, replicate=False)


def _renamed(rule: Rule, part: str) -> Rule:
    sources = tuple(f"{source.removesuffix('.weight')}.{part}.weight" for source in rule.sources)
    return msgspec.structs.replace(rule, name=_within(rule.name, part), sources=sources)


def _within(name: str, part: str) -> str:
    """`name` of a weight with `part` in it: `fc1.weight3` is Transformer Engine's third expert."""
    for leaf in (".weight", "_weight"):
        head, found, tail = name.rpartition(leaf)
        if found and not tail.strip("{slot}"):
            return f"{head}.{part}{'.weight'}{tail}"
    raise AssertionError(f"rule {name} names no weight")
