"""`syncline validate JOB`: the gateway climbs, this follows. What it shows is what `GET .../validation/N` shows."""

from __future__ import annotations

import signal
import time
from typing import TYPE_CHECKING, Any

import typer

from syncline.scheduler.cli_session import FAILURE, INTERRUPTED, Failure, note, reading, say, say_json

if TYPE_CHECKING:
    from syncline.contract.validation import Validation
    from syncline.scheduler.client import Client

LOOK = 0.5  # seconds between looks at how far it is


def of_job(context: typer.Context, job: str, levels: str | None, json: bool) -> None:
    """Climb, or follow the climb that runs already. Interrupted, it takes its own with it."""
    from syncline.contract.validation_words import told

    # a shell starts background jobs with SIGINT ignored
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with reading(context) as client:
        path, raw = _followed(client, f"/v1/jobs/{job}/validation", levels)
        view = _decoded(raw)
        if json:
            say_json(raw)
        elif view.state in ("holds", "fails"):
            say(told(view.recipe, view.model, view.results, view.diagnosis).rstrip())
            say(f"figures: {view.evidence}, {path}/report")
    if view.state not in ("holds", "fails"):
        raise Failure(f"validation {view.number} of {job} is {view.state}: {view.reason}")
    if view.state == "fails":
        raise typer.Exit(FAILURE)


def _followed(client: Client, path: str, levels: str | None) -> tuple[str, dict[str, Any]]:
    """Its path, and what it came to. Levels are told as they end."""
    from syncline.contract.validation_words import levels_of, line

    body = {} if levels is None else {"levels": levels_of(levels)}
    own = f"{path}/{client.post(path, body)['number']}"
    shown = 0
    try:
        while True:
            raw: dict[str, Any] = client.get(own)["validation"]
            results = _decoded(raw).results
            for result in results[shown:]:
                note(line(result))
            shown = len(results)
            if raw["state"] != "running":
                return own, raw
            time.sleep(LOOK)
    except KeyboardInterrupt:
        client.post(f"{own}/cancel")
        note("interrupted")
        raise typer.Exit(INTERRUPTED) from None


def _decoded(raw: dict[str, Any]) -> Validation:
    """The answer as the contract has it."""
    import msgspec

    from syncline.contract.validation import Validation, read

    return read(msgspec.json.encode(raw), Validation)
