"""A certificate that is renewed while the gateway serves.

consumes      the mounted certificate and key
produces      what the next handshake shows
waits for     the files to change
unblocked by  whoever renews them (a kubelet that updates a mounted Secret, certbot), or the end of the process

Else a gateway that ran on would show an expired certificate, and every client and probe would be turned away at once.
"""

from __future__ import annotations

import logging
import ssl
import threading
from pathlib import Path

_LOG = logging.getLogger("syncline.gateway")
EVERY = 2.0  # seconds between two looks

Stamp = tuple[tuple[int, int, int], ...]


def keep_certificate(
    served: ssl.SSLContext, cert: Path, key: Path, stopping: threading.Event, every: float = EVERY
) -> None:
    """Give `served` what lies in the files whenever that has changed. Open connections go on with what they have.

    every   seconds between two looks
    Files that do not fit one another change nothing: the old certificate is shown until they do.
    """
    shown, refused = _stamp(cert, key), None
    while not stopping.wait(every):
        found = _stamp(cert, key)
        if found is None or found == shown:
            continue
        try:
            # apart first: a pair that is half written would take the key from what serves
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(cert, key)
            served.load_cert_chain(cert, key)
        except OSError as error:  # ssl's own errors are of it
            if found != refused:
                _LOG.warning(
                    "the certificate has changed and cannot be read, the old one is shown: %s", error
                )
            refused = found
            continue
        shown = found
        _LOG.info("shows the certificate that has come in %s", cert)


def _stamp(*paths: Path) -> Stamp | None:
    """What tells that files have changed, through links, too; None: one is not there now."""
    try:
        stats = [path.stat() for path in paths]
    except FileNotFoundError:
        return None
    return tuple((stat.st_mtime_ns, stat.st_size, stat.st_ino) for stat in stats)
