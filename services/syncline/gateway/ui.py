"""The gateway's own page at `/ui`: jobs, a job's run as it happens, its versions, and the token inspector.

Plain files from the package's `static` folder; the page holds nothing of a job and reads the REST API like any other
client, so it is served without a token and asks for one when the API does. The files lie under a path that names
their content, which a browser may keep for good; the page itself is looked up anew each time.
"""

from __future__ import annotations

import hashlib
from functools import cache
from importlib.resources import files

import msgspec
from fastapi import APIRouter, Request, Response
from fastapi.responses import RedirectResponse

from syncline.gateway.errors import Refusal

router = APIRouter(include_in_schema=False)

OPEN_PREFIX = "/ui/"  # of what is served without a token, besides the page itself
_KINDS = {".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
)
_GUARDED = {
    "content-security-policy": _POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
}


class Page(msgspec.Struct, frozen=True, kw_only=True):
    """All that is served. `digest` names the content of `parts`; `html` refers to them by it."""

    digest: str
    html: bytes
    parts: dict[str, tuple[bytes, str]]  # name -> bytes and media type


@router.get("/")
def root() -> Response:
    """The page has a place of its own; a browser that is given the bare address finds it."""
    return RedirectResponse("ui", status_code=307, headers={"cache-control": "no-cache"})


@router.get("/ui")
def index(request: Request) -> Response:
    """The page, with a policy that lets it run its own files and speak to its own gateway alone."""
    page = served()
    tag = f'"{page.digest}"'
    headers = {**_GUARDED, "cache-control": "no-cache", "etag": tag}
    if tag in request.headers.get("if-none-match", ""):
        return Response(status_code=304, headers=headers)
    return Response(page.html, media_type="text/html", headers=headers)


@router.get("/ui/{digest}/{name}")
def part(digest: str, name: str) -> Response:
    """A file of the page. 404 for another gateway's digest, so that pages never mix two releases."""
    page = served()
    if digest != page.digest or name not in page.parts:
        raise Refusal(404, "not-found", "there is no such file of the page")
    body, kind = page.parts[name]
    headers = {**_GUARDED, "cache-control": "public, max-age=31536000, immutable"}
    return Response(body, media_type=kind, headers=headers)


@cache
def served() -> Page:
    """The page as it lies in the package. `base.css` is the report's own style, so that both look alike."""
    here = files("syncline.gateway")
    found = {entry.name: entry.read_bytes() for entry in (here / "static").iterdir() if entry.is_file()}
    found["base.css"] = (here / "templates" / "style.css").read_bytes()
    html = found.pop("index.html")
    digest = hashlib.sha256()
    for name, body in sorted([*found.items(), ("index.html", html)]):
        digest.update(b"%b %d\n%b" % (name.encode(), len(body), body))
    named = digest.hexdigest()[:16]
    parts = {name: (body, _KINDS[name[name.rindex(".") :]]) for name, body in found.items()}
    return Page(digest=named, html=html.replace(b"{digest}", named.encode()), parts=parts)
