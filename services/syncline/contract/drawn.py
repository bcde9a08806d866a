"""What became of a job's prompts, as people are told: by data set, in groups."""

from __future__ import annotations

import msgspec


class Tally(msgspec.Struct, kw_only=True):
    """What became of the draws of one data set. Kept by the scheduler. All counts but `rested` are of groups."""

    name: str
    drawn: int = 0  # draws again included
    again: int = 0  # draws of a prompt whose group had failed or expired
    trained: int = 0
    filtered: dict[str, int] = {}  # by reason
    failed: int = 0
    expired: int = 0
    unused: int = 0  # left when the job ended
    given_up: int = 0  # prompts that were not drawn again any more
    rested: int = 0  # items left out of an epoch, too easy or too hard
    epoch: int = 0  # of the newest draw
    scored: int = 0  # groups with rewards, trained or filtered
    reward: float = 0.0  # sum of their mean rewards
    recent: list[float] = []  # mean rewards of the newest such groups, oldest first


class Lost(msgspec.Struct, frozen=True):
    """A prompt that is not drawn again, though its group failed or expired."""

    source: str
    prompt: int
    tries: int
    reason: str


class SourceTold(msgspec.Struct, frozen=True, kw_only=True):
    """One data set. Counts of groups, as in `Tally`: drawn = open + trained + filtered + failed + expired + unused."""

    name: str
    epoch: int
    drawn: int
    again: int
    open: int
    trained: int
    filtered: dict[str, int]
    failed: int
    expired: int
    unused: int
    given_up: int
    rested: int
    reward: (
        float | None
    )  # mean over groups of the group's mean reward, filtered ones included; None: none is scored
    recent_reward: float | None  # the same of the newest groups


class PromptAccount(msgspec.Struct, frozen=True, kw_only=True):
    """Every data set of the job, and the newest of the prompts that were given up."""

    sources: tuple[SourceTold, ...] = ()
    lost: tuple[Lost, ...] = ()


def told(tally: Tally) -> SourceTold:
    """A tally for people."""
    filtered = sum(tally.filtered.values())
    ended = tally.trained + filtered + tally.failed + tally.expired + tally.unused
    return SourceTold(
        name=tally.name,
        epoch=tally.epoch,
        drawn=tally.drawn,
        again=tally.again,
        open=tally.drawn - ended,
        trained=tally.trained,
        filtered=tally.filtered,
        failed=tally.failed,
        expired=tally.expired,
        unused=tally.unused,
        given_up=tally.given_up,
        rested=tally.rested,
        reward=tally.reward / tally.scored if tally.scored else None,
        recent_reward=sum(tally.recent) / len(tally.recent) if tally.recent else None,
    )


def in_words(source: SourceTold) -> str:
    """One line of what is not zero: "30 drawn, 24 trained, 6 filtered (all 0: 6), reward 0.41"."""
    filtered = sum(source.filtered.values())
    why = ", ".join(f"{reason}: {groups}" for reason, groups in sorted(source.filtered.items()))
    parts = [f"{source.drawn} drawn", f"{source.trained} trained"]
    parts += [f"{filtered} filtered ({why})"] if filtered else []
    for name in ("failed", "expired", "again", "given_up", "rested", "unused", "open"):
        count = msgspec.structs.asdict(source)[name]
        parts += [f"{count} {_WORDS.get(name, name)}"] if count else []
    parts += [] if source.reward is None else [f"reward {source.reward:.3g}"]
    return ", ".join(parts)


_WORDS = {"again": "drawn again", "given_up": "given up", "unused": "left when the job ended"}
