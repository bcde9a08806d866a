"""The gateway's own web page at `/`: jobs, a job's run as it happens, its versions, and the token inspector.

One file without outside requests; its script reads the REST API like any other client. The page itself holds
nothing of a job, so it is served without a token and asks for one when the API does.
"""

from __future__ import annotations

import base64
import hashlib
from functools import cache

from fastapi import APIRouter, Response

from syncline.gateway.report import templates

router = APIRouter(include_in_schema=False)


@router.get("/")
def page() -> Response:
    """The page, with a policy that lets it run its own script and speak to its own gateway alone."""
    body, policy = _rendered()
    headers = {
        "content-security-policy": policy,
        "x-content-type-options": "nosniff",
        "referrer-policy": "no-referrer",
        "cache-control": "no-cache",
    }
    return Response(body, media_type="text/html", headers=headers)


@cache
def _rendered() -> tuple[str, str]:
    loader = templates()
    script = loader.get_template("page.js").render()
    body = loader.get_template("page.html.j2").render(script=script)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = (
        f"default-src 'none'; script-src 'sha256-{digest}'; style-src 'unsafe-inline'; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    return body, policy
