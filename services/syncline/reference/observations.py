"""Ids of what an environment answers, to be put behind ids that were sampled.

The sampled ids stay as they are: a history made into text and tokenised again is another history. Only the new piece is
tokenised, by itself and without what a tokenizer puts in front of a text.
"""

from __future__ import annotations

from collections.abc import Sequence

from syncline.reference.model import TextCodec

_ASKED, _SAID = "zq1", "zq2"  # contents that no template writes itself


def observed_ids(
    codec: TextCodec, messages: Sequence[dict[str, str]], last: int, stops: Sequence[int]
) -> list[int]:
    """Ids from the end of the policy's turn to where its next one begins.

    last    the turn's last sampled id
    stops   ids that end a turn. A turn that was cut off gets its end here, as an observed id, if the template has one.

    With a chat template: what the template writes after the assistant's content when `messages` follow. Without one:
    the messages' contents. Raises `ValueError` for text that the tokenizer does not know, and for a template that
    cannot be continued so.
    """
    if not codec.has_template:
        text = "".join(message["content"] for message in messages)
        return codec.encode_piece(text) if text else []
    chat = [{"role": "user", "content": _ASKED}, {"role": "assistant", "content": _SAID}, *messages]
    before, found, piece = codec.render(chat).partition(_SAID)
    if not found or _SAID in piece or _ASKED not in before:
        raise ValueError(
            "the chat template does not show an assistant's message as it is: turns cannot follow"
        )
    ids = codec.encode_piece(piece)
    return ids[1:] if ids and last in stops and ids[0] == last else ids
