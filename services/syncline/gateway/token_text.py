"""The text of a single token, by the job's own tokenizer. Knows the tokenizer file and no model."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from pathlib import Path

from tokenizers import Tokenizer

from syncline.gateway import model_root

TokenText = Callable[[int], tuple[str | None, str | None]]
"""Token id -> (text as decoded alone, the vocabulary's own piece); (None, None) when nothing can tell."""


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


@lru_cache(maxsize=4)
def _loaded(path: Path, mtime_ns: int) -> Tokenizer:
    """Kept while the file is unchanged: `mtime_ns` is part of the key."""
    return Tokenizer.from_file(str(path))
