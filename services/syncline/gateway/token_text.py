"""The text of tokens, one by one or in a row, by the job's own tokenizer. Knows the tokenizer file and no model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path

from tokenizers import Tokenizer

from syncline.gateway import model_root

TokenText = Callable[[int], tuple[str | None, str | None]]
"""Token id -> (text as decoded alone, the vocabulary's own piece); (None, None) when nothing can tell."""

_HALF = "\ufffd"  # how the beginning of a letter decodes
_LETTER = 8  # tokens after which a letter counts as broken


def token_text(models: Path, name: str) -> TokenText:
    """How the tokens of model `name` read."""
    path = models / name / "tokenizer.json"
    if not model_root.inside(models, path):
        return lambda _: (None, None)
    tokenizer = _loaded(path, path.stat().st_mtime_ns)

    def told(token: int) -> tuple[str | None, str | None]:
        piece = tokenizer.id_to_token(token)
        return (
            (None, None) if piece is None else (tokenizer.decode([token], skip_special_tokens=False), piece)
        )

    return told


def token_texts(models: Path, name: str, tokens: Sequence[int]) -> list[str] | None:
    """What each of `tokens` adds to the text of those before it; None when nothing can tell.

    A letter of several tokens is the last one's; the others add "".
    """
    path = models / name / "tokenizer.json"
    if not model_root.inside(models, path):
        return None
    tokenizer = _loaded(path, path.stat().st_mtime_ns)
    told: list[str] = []
    ids, prefix, read = (
        list(tokens),
        0,
        0,
    )  # what lies before `prefix` no longer changes how the next token reads
    for end in range(1, len(ids) + 1):
        before = tokenizer.decode(ids[prefix:read], skip_special_tokens=False)
        now = tokenizer.decode(ids[prefix:end], skip_special_tokens=False)
        half = now.endswith(_HALF) and end < len(ids) and end - read < _LETTER
        told.append("" if half else now[len(before) :])
        if not half:
            prefix, read = read, end
    return told


@lru_cache(maxsize=4)
def _loaded(path: Path, mtime_ns: int) -> Tokenizer:
    """Kept while the file is unchanged: `mtime_ns` is part of the key."""
    return Tokenizer.from_file(str(path))
