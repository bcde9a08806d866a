"""A climb of the ladder in words for people: one level on one line, what failed, what to look at. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from syncline.contract.validation import LEVELS, TITLES, Check, Diagnosis, Level, Report, Result


def line(result: Result) -> str:
    """One level on one line, as it ends."""
    word = "holds" if result.holds else "FAILS"
    made = sum(check.applies for check in result.checks)
    absent = len(result.checks) - made
    rest = f", {absent} not applicable" if absent else ""
    return (
        f"{result.level}  {TITLES[result.level][0]:26} {word}  {made:2} checks{rest}  {result.seconds:.1f} s"
    )


def text(report: Report) -> str:
    """What failed and what to look at; one line if nothing did."""
    return told(report.recipe, report.model, report.results, report.diagnosis)


def told(recipe: str, model: str, results: Iterable[Result], diagnosis: Diagnosis | None) -> str:
    """`text` of the parts of a report."""
    results = list(results)
    if all(result.holds for result in results):
        levels = ", ".join(str(result.level) for result in results)
        return f"{recipe} on {model}: levels {levels} hold\n"
    out = []
    for result in results:
        if not result.holds:
            out.append(f"level {result.level} fails: {TITLES[result.level][1]}")
            out += [f"  {result.broke}"] if result.broke else []
            out += [f"  {words(check)}" for check in result.failed]
    if diagnosis is not None:
        out += [f"symptom   {diagnosis.symptom}", f"cause     {diagnosis.cause}"]
        out += [f"look at   {diagnosis.check_next}"]
    return "\n".join(out) + "\n"


def words(check: Check) -> str:
    """A check with its figures."""
    where = f", at {check.where}" if check.where else ""
    before = "" if check.baseline is None else f", {check.baseline:.3g} when it held"
    unit = f" {check.unit}" if check.unit else ""
    return f"{check.name}: {check.found:.3g}{unit}, at most {check.bound:.3g} ({check.source}){before}{where}"


def levels_of(given: str) -> tuple[Level, ...]:
    """`1-5` or `1,2,6` as levels in order. Raises `ValueError` naming what is wrong."""
    found: set[int] = set()
    for part in given.split(","):
        first, dash, last = part.partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()):
            raise ValueError(f"{part!r} is no level; write them as 1-5 or 1,2,6")
        found |= set(range(int(first), int(last or first) + 1))
    unknown = sorted(found - {*LEVELS})
    if unknown or not found:
        raise ValueError(f"there is no level {unknown[:1] or given}; there are 1 to {max(LEVELS)}")
    return tuple(level for level in LEVELS if level in found)


def boundary(level: Level) -> str:
    """The name by which a failing level is called."""
    return f"level {level} ({TITLES[level][0]})"


def refusal(results: Iterable[Result], diagnosis: Diagnosis | None, evidence: str) -> str:
    """Why a gate does not open, on one line: the boundary, what failed there, the diagnosis, where the figures are."""
    failed = next(result for result in results if not result.holds)
    first = failed.broke or words(failed.failed[0])
    said = "" if diagnosis is None else f"; likely {diagnosis.cause}; look at {diagnosis.check_next}"
    return f"{boundary(failed.level)} fails: {first}{said}; figures: {evidence}"
