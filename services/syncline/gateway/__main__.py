"""`python -m syncline.gateway`: the gateway as a process."""

from __future__ import annotations

import json
import os
import socket
import sys

import uvicorn

from syncline.gateway.app import create_app
from syncline.gateway.certificate import keep_certificate
from syncline.gateway.ingest import spans_taken
from syncline.gateway.reporter import keep_reporting
from syncline.runtime.bus import Bus
from syncline.runtime.service import ServiceContext, run
from syncline.runtime.trace_prune import keep_pruned

DEFAULT_PORT = 8080
REDIS_SECONDS = 5.0  # a request does not wait longer for Redis; the client is told to come back


def main(context: ServiceContext) -> None:
    """Serve until told to stop."""
    settings = context.settings
    bus = Bus(settings.redis_url, deadline=REDIS_SECONDS)
    try:
        app = create_app(settings, bus)
    except ValueError as error:
        sys.exit(f"gateway: {error}")
    with (
        listening(settings.host, DEFAULT_PORT if settings.port is None else settings.port) as listener,
        spans_taken(context, app.state.gateway.numbers, listening),
    ):
        context.port = listener.getsockname()[1]
        scheme = "http" if settings.tls_cert is None else "https"
        url = f"{scheme}://{f'[{settings.host}]' if ':' in settings.host else settings.host}:{context.port}"
        _announce(context, url)
        config = uvicorn.Config(
            app,
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=5,
            ssl_certfile=settings.tls_cert,
            ssl_keyfile=settings.tls_key,
        )
        _keep_certificate(context, config)
        trackers = app.state.gateway.trackers
        context.thread("trackers", lambda: trackers.keep(context.bus, context.stopping))
        context.thread("reporter", lambda: keep_reporting(context.bus, settings, context.stopping))
        context.ready(True)
        context.log.info("serving %s", url)
        bounds = (settings.traces_days, settings.traces_mib)
        context.thread("pruner", lambda: keep_pruned(settings.traces, *bounds, context.stopping))
        uvicorn.Server(config).run(
            sockets=[listener]
        )  # takes SIGTERM and SIGINT while it serves, and passes them on at its end
    bus.close()


def _keep_certificate(context: ServiceContext, config: uvicorn.Config) -> None:
    """Where the gateway speaks TLS, show a renewed certificate without a restart."""
    cert, key = context.settings.tls_cert, context.settings.tls_key
    config.load()
    served = config.ssl
    if served is not None and cert is not None and key is not None:
        context.thread("certificate", lambda: keep_certificate(served, cert, key, context.stopping))


def listening(host: str, port: int) -> socket.socket:
    """A socket that listens. Leaves with the reason where there can be none."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # named by its protocol, or asyncio does not switch off Nagle's delay on what it accepts: 40 ms per answer
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        sys.exit(f"gateway: cannot listen on {host}:{port}: {error.strerror}")
    listener.listen(2048)  # from here on whoever reads where we answer gets an answer
    return listener


def _announce(context: ServiceContext, url: str) -> None:
    """`gateway.json` in the run root: where this gateway answers."""
    runs = context.settings.runs
    runs.mkdir(parents=True, exist_ok=True)
    part = runs / f"gateway.json.{os.getpid()}"
    part.write_text(json.dumps({"url": url, "pid": os.getpid()}))
    part.replace(runs / "gateway.json")


if __name__ == "__main__":
    run("gateway", main, own_port=True)
