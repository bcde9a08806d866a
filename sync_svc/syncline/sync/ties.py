"""Which output head is its embedding: from config.json and, where both are there, from what they hold."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

from syncline.sync.export import BadExport

EMBEDDINGS = ("embed_tokens.weight", "wte.weight", "word_embeddings.weight", "embed_in.weight")
HEADS = ("lm_head.weight", "embed_out.weight")


def tied(
    config: dict[str, Any], names: Collection[str], equal: Callable[[str, str], bool]
) -> tuple[tuple[str, str], ...]:
    """The ties among tensors `names`: (output head, embedding).

    equal   whether two of them are the same values

    `tie_word_embeddings` true: a head that equals the embedding is redundant and tied, a different one refused,
    an absent one tied. Not stated: an absent head is tied (config.json leaves out a class's default).
    False: no ties. Raises `BadExport`.
    """
    text = config.get("text_config")
    stated = config.get(
        "tie_word_embeddings", text.get("tie_word_embeddings") if isinstance(text, dict) else None
    )
    if stated not in (None, True, False):
        raise BadExport(f"config.json: tie_word_embeddings is {stated!r}")
    heads = sorted(name for name in names if _is(name, HEADS))
    if stated is False or (stated is None and heads):
        return ()
    embeddings = sorted(name for name in names if _is(name, EMBEDDINGS))
    if len(embeddings) != 1 or len(heads) > 1:
        if stated is None:
            return ()
        raise BadExport(
            f"tie_word_embeddings with embeddings {embeddings} and heads {heads}: one each expected"
        )
    embedding = embeddings[0]
    if not heads:
        return (("lm_head.weight", embedding),)
    head = heads[0]
    if not equal(head, embedding):
        raise BadExport(
            f"config.json ties {head} to {embedding}, and the export holds different values for them"
        )
    return ((head, embedding),)


def _is(name: str, suffixes: tuple[str, ...]) -> bool:
    return any(name == suffix or name.endswith("." + suffix) for suffix in suffixes)
