"""What a group's end means for the prompts to come. Pure: folds `Outcome`s, in their order, into `Drawn`."""

from __future__ import annotations

from syncline.contract.drawn import Lost, Tally
from syncline.runtime.ledger_shapes import Outcome
from syncline.scheduler.prompts import Draw, Drawn, Rates, Sequences

RECENT = 32  # groups whose rewards make the newest mean of a data set
NAMED = 100  # given-up prompts that are named; all are counted
AT_END = ("job ended", "cancelled")  # reasons with which an ended job's open groups expire


def fold(
    drawn: Drawn, outcome: Outcome, sequences: Sequences, rates: Rates, left: bool = False
) -> str | None:
    """Take one outcome in. Returns the key in `rates` that it changed, if any.

    left   the job has ended and its open groups with it: what was not trained was of no use, and says nothing
    """
    which = sequences.source_of(outcome.prompt)
    tally = drawn.tallies[which]
    epoch = drawn.epochs.pop(outcome.group, None)
    if outcome.how != "trained" and (left or outcome.reason in AT_END):
        tally.unused += 1
        return None
    match outcome.how:
        case "trained":
            tally.trained += 1
            drawn.barren = 0
        case "filtered":
            reason = _reason(outcome)
            tally.filtered[reason] = tally.filtered.get(reason, 0) + 1
            drawn.barren += 1
        case "expired" | "failed":
            if outcome.how == "failed":
                tally.failed += 1
            else:
                tally.expired += 1
            _again(drawn, outcome, sequences, tally, tally.epoch if epoch is None else epoch)
    if outcome.how in ("trained", "filtered"):
        drawn.tries.pop(outcome.prompt, None)
    return _measured(outcome, sequences, rates, tally, epoch)


def in_vain(drawn: Drawn, sequences: Sequences, batch: int) -> str | None:
    """Why nothing more will come of the job's prompts; None: something may, or nobody asked for filtering."""
    most = sequences.prompts.give_up * batch
    if drawn.barren < most or sequences.prompts.zero_variance == "train":
        return None
    reasons: dict[str, int] = {}
    for tally in drawn.tallies:
        for reason, groups in tally.filtered.items():
            reasons[reason] = reasons.get(reason, 0) + groups
    told = ", ".join(f"{reason}: {groups}" for reason, groups in sorted(reasons.items()))
    return (
        f"{drawn.barren} groups in a row were filtered and none was trained (prompts.give_up is "
        f"{sequences.prompts.give_up} batches): {told}"
    )


def _reason(outcome: Outcome) -> str:
    """Few and short, for counting; the ledger's lines keep the whole."""
    if outcome.scored >= 2 and outcome.low == outcome.high:
        return f"all {outcome.low:g}" if outcome.low in (0.0, 1.0) else "all equal"
    if outcome.reason in ("incomplete", "fewer than two scored members"):
        return outcome.reason
    return "by the trainer"


def _again(drawn: Drawn, outcome: Outcome, sequences: Sequences, tally: Tally, epoch: int) -> None:
    tries = drawn.tries.get(outcome.prompt, 0)
    if tries < sequences.prompts.retries:
        drawn.tries[outcome.prompt] = tries + 1
        drawn.again.append(Draw(outcome.group, outcome.prompt, epoch))
        return
    drawn.tries.pop(outcome.prompt, None)
    tally.given_up += 1
    reason = f"{outcome.how}: {outcome.reason}"[:300]
    drawn.lost = [*drawn.lost, Lost(tally.name, outcome.prompt, tries, reason)][-NAMED:]


def _measured(
    outcome: Outcome, sequences: Sequences, rates: Rates, tally: Tally, epoch: int | None
) -> str | None:
    if outcome.scored == 0:
        return None
    tally.scored += 1
    tally.reward += outcome.mean
    tally.recent = [*tally.recent, outcome.mean][-RECENT:]
    if epoch is None:
        return None
    key = sequences.item_of(outcome.prompt)
    if key in rates and rates[key][0] > epoch:
        return None
    rates[key] = (epoch, outcome.mean)
    return key
