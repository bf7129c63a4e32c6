"""The page at `GET /`, on which a person tries the server in a browser: which files, and how sent.

The files lie in `router/page/`, plain HTML, style sheets and modules that no tool has built. They
are public, so they hold nothing of the server: what the page shows it asks of the API, with a key
where keys are set. Every answer forbids the browser anything from elsewhere and any markup made
of text (the header `content-security-policy`). Knows nothing of what the page does.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from fastapi import FastAPI, Request, Response
from starlette.exceptions import HTTPException

FOLDER = Path(__file__).parents[1] / "page"
SHELL = "index.html"
MEDIA_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
CONTENT_SECURITY_POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "connect-src 'self'",
        "media-src blob:",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    )
)
HEADERS = {
    "content-security-policy": CONTENT_SECURITY_POLICY,
    "cache-control": "no-cache",  # a browser asks each time, and is told that nothing has changed
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "microphone=(self), camera=(), geolocation=()",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
}


@dataclass(frozen=True, slots=True)
class Asset:
    """One file of the page, in memory. etag: changes when its content does."""

    content: bytes
    media_type: str
    etag: str


def load_page(folder: Path = FOLDER) -> dict[str, Asset]:
    """Every file of the page, by its path below `folder`."""
    return {
        file.relative_to(folder).as_posix(): _asset(file)
        for file in sorted(folder.rglob("*"))
        if file.suffix in MEDIA_TYPES
    }


def add_page(app: FastAPI, assets: Mapping[str, Asset] | None = None) -> None:
    """Serve the shell at `/` and what it loads at `/page/...`, to everyone.

    The page names its files relative to itself, so that a proxy may put it below a path.
    """
    files = load_page() if assets is None else assets

    @app.api_route("/", methods=["GET", "HEAD"], include_in_schema=False)
    async def page(request: Request) -> Response:
        return _answer(request, files[SHELL])

    @app.api_route("/page/{name:path}", methods=["GET", "HEAD"], include_in_schema=False)
    async def file_of_page(request: Request, name: str) -> Response:
        if name not in files or name == SHELL:
            raise HTTPException(404)
        return _answer(request, files[name])


def _answer(request: Request, asset: Asset) -> Response:
    headers = {**HEADERS, "etag": asset.etag}
    if asset.etag in request.headers.get("if-none-match", ""):
        return Response(status_code=304, headers=headers)
    content = b"" if request.method == "HEAD" else asset.content
    headers["content-length"] = str(len(asset.content))
    return Response(content, media_type=asset.media_type, headers=headers)


def _asset(file: Path) -> Asset:
    content = file.read_bytes()
    digest = hashlib.sha256(content).hexdigest()[:20]
    return Asset(content, MEDIA_TYPES[file.suffix], f'"{digest}"')
