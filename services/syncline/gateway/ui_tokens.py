"""All tokens of a trajectory in pages, each with what the record says of it: what the token inspector shows.

Texts come from a stream of the whole record through the tokenizer, since a token decoded alone may lose a space or
half a letter: joined they are the text. A token that ends no letter has the text "".
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Annotated, Literal

import msgspec
from fastapi import APIRouter, Depends, Query, Response

from syncline.contract.version_path import VersionId
from syncline.gateway.access import Here, Limit, TheJob, only_known_parameters
from syncline.gateway.answers import describe, reply
from syncline.gateway.gathering import Gathered, gather
from syncline.gateway.token_text import token_texts
from syncline.gateway.trajectories import Tid

router = APIRouter(
    prefix="/v1/jobs/{job}/trajectories", tags=["trajectories"], dependencies=[Depends(only_known_parameters)]
)


class TokenRow(msgspec.Struct, frozen=True, kw_only=True):
    """One token. All that follows `text` is None of a prompt's or a tool's token, which nobody sampled."""

    position: int  # counts all tokens of the record
    kind: Literal["prompt", "sampled", "observed"]
    id: int
    text: str | None  # None: the model's tokenizer is not at hand
    index: int | None = None  # counts sampled tokens
    span: int | None = None  # place of its span in the trajectory's `spans`
    version: VersionId | None = None
    behaviour_logprob: float | None = None
    trainer_logprob: float | None = None  # None, too, until an update has scored the trajectory
    ratio: float | None = None  # exp(trainer minus behaviour)
    lag: int | None = None  # version updated minus this token's version; None until claimed
    loss_mask: int | None = None


class TokenRows(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens by position. `next`: give it as `after` for the next page; None: this was the last."""

    total: int  # tokens of the record
    items: list[TokenRow]
    next: int | None


_EXAMPLE = TokenRows(
    total=3,
    items=[
        TokenRow(position=0, kind="prompt", id=1, text="?"),
        TokenRow(
            position=1,
            kind="sampled",
            id=5,
            text="a",
            index=0,
            span=0,
            version=VersionId(0, 12),
            behaviour_logprob=-0.5,
            trainer_logprob=-0.5,
            ratio=1.0,
            lag=0,
            loss_mask=1,
        ),
    ],
    next=1,
)


@router.get("/{trajectory}/tokens", responses=describe(TokenRows, _EXAMPLE))
def list_tokens(
    record: TheJob,
    here: Here,
    trajectory: Tid,
    limit: Limit = 500,
    after: Annotated[int | None, Query(ge=0, le=2**31 - 1, description="`next` of the last page")] = None,
) -> Response:
    """Every token of the trajectory, the prompt's and the tools' too, with log-probs, ratio, version and lag."""
    found = gather(here.bus, record, trajectory)
    texts = token_texts(here.settings.models, record.spec.model.name, found.record.tokens)
    start = 0 if after is None else after + 1
    end = min(start + limit, len(found.record.tokens))
    items = [row for row in _rows(found, texts) if start <= row.position < end]
    following = end - 1 if end < len(found.record.tokens) and items else None
    return reply(TokenRows(total=len(found.record.tokens), items=items, next=following))


def _rows(found: Gathered, texts: list[str] | None) -> Iterator[TokenRow]:
    record, index, place = found.record, 0, 0
    for segment in record.segments:
        for position in range(segment.start, segment.end):
            text = None if texts is None else texts[position]
            row = TokenRow(position=position, kind=segment.kind, id=record.tokens[position], text=text)
            if segment.kind != "sampled":
                yield row
                continue
            while index >= record.spans[place].end:
                place += 1
            yield _sampled(found, row, index, place)
            index += 1


def _sampled(found: Gathered, row: TokenRow, index: int, place: int) -> TokenRow:
    record, version = found.record, found.record.spans[place].version
    behaviour = record.logprobs[index]
    trainer = None if found.score is None else found.score.logprobs[index]
    return msgspec.structs.replace(
        row,
        index=index,
        span=place,
        version=version,
        behaviour_logprob=behaviour,
        trainer_logprob=trainer,
        ratio=None if trainer is None else ratio(trainer, behaviour),
        lag=None if found.update is None else found.update - 1 - version.number,
        loss_mask=record.loss_mask[index],
    )


def ratio(trainer: float, behaviour: float) -> float:
    """exp(trainer - behaviour); infinite where a float cannot hold it."""
    try:
        return math.exp(trainer - behaviour)
    except OverflowError:
        return math.inf
