"""Commands on the token store: who may ask the gateway, as which tenant, and how much."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from syncline.scheduler.cli_session import note, say, say_json, settings, show_table

if TYPE_CHECKING:
    from syncline.runtime.tokens import TokenStore

token = typer.Typer(
    name="token",
    no_args_is_help=True,
    help="Tokens of tenants: made, listed, revoked; and what each tenant may use.",
)
Tenant = Annotated[str, typer.Option(help="a-z, 0-9 and -, at most 32")]


@token.command()
def add(
    tenant: Tenant,
    role: Annotated[
        Literal["member", "admin"], typer.Option(help="admin: sees all tenants' jobs")
    ] = "member",
) -> None:
    """Make a token and print it, once: only its digest is kept. The first one makes the gateway ask for tokens."""
    made, text = _store().add(tenant, role)
    note(f"token {made.id} of tenant {tenant} ({role}); it is shown this once:")
    say(text)


@token.command(name="list")
def list_tokens(json: Annotated[bool, typer.Option("--json", help="as JSON")] = False) -> None:
    """Tokens by id, and the limits of each tenant. No secret is shown: none is kept."""
    found = _store().read()
    if json:
        say_json(found)
        return
    rows = [
        [one.id, one.tenant, one.role, time.strftime("%Y-%m-%d %H:%M", time.localtime(one.made))]
        for one in found.tokens
    ]
    show_table(["id", "tenant", "role", "made"], rows)
    say()
    rows = [
        [
            name,
            str(of.running),
            str(of.stored),
            f"{of.rate:g}/s, {of.burst}",
            str(of.streams),
            ", ".join(of.hosts) or "none",
        ]
        for name, of in sorted(found.tenants.items())
    ]
    show_table(["tenant", "running", "stored", "requests", "streams", "hosts"], rows)


@token.command()
def revoke(id: Annotated[str, typer.Argument(help="the token's id, as listed")]) -> None:
    """Forget a token. The gateway refuses it from the next request on."""
    gone = _store().revoke(id)
    note(f"token {gone.id} of tenant {gone.tenant} is revoked")


@token.command()
def limits(
    tenant: Tenant,
    running: Annotated[int | None, typer.Option(help="jobs that are not over")] = None,
    stored: Annotated[int | None, typer.Option(help="jobs in history")] = None,
    rate: Annotated[float | None, typer.Option(help="requests per second, on average")] = None,
    burst: Annotated[int | None, typer.Option(help="requests at once")] = None,
    streams: Annotated[int | None, typer.Option(help="event streams at once")] = None,
    host: Annotated[
        list[str] | None, typer.Option(help="host that its specs may name; may be given often; '' for none")
    ] = None,
) -> None:
    """Change what a tenant may use; what is not given stays."""
    given = {"running": running, "stored": stored, "rate": rate, "burst": burst, "streams": streams}
    changed: dict[str, object] = {name: value for name, value in given.items() if value is not None}
    if host is not None:
        changed["hosts"] = tuple(name for name in host if name)
    say_json(_store().limit(tenant, **changed))


def _store() -> TokenStore:
    from syncline.runtime.tokens import TokenStore

    return TokenStore(settings().token_store)
