"""The page at `GET /`, on which a person tries the server in a browser: which files, and how sent.

The files lie in `router/page/`, public and built by no tool. What the page shows it asks of the
API, with a key where keys are set. Every answer forbids the browser anything from elsewhere and any
markup made of text (the header `content-security-policy`).
"""

from __future__ import annotations

from pathlib import Path

from fastapi import FastAPI, Request, Response
from fastapi.staticfiles import StaticFiles
from starlette.exceptions import HTTPException
from starlette.types import Scope

FOLDER = Path(__file__).parents[1] / "page"
SAMPLES = Path(__file__).parents[2] / "cluster/demo/samples"
SHELL = "index.html"
MEDIA_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
    ".flac": "audio/flac",
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


def add_page(app: FastAPI) -> None:
    """The page names its files relative to itself, so that a proxy may put it below a path."""
    files = PageFiles(directory=FOLDER)
    files.all_directories.append(SAMPLES)

    @app.api_route("/", methods=["GET", "HEAD"], include_in_schema=False)
    async def page(request: Request) -> Response:
        return await files.answer(SHELL, request.scope)

    app.mount("/page", files)


class PageFiles(StaticFiles):
    """The files of the page but for the shell, with the headers of each."""

    async def get_response(self, path: str, scope: Scope) -> Response:
        if path == SHELL or Path(path).suffix not in MEDIA_TYPES:
            raise HTTPException(404)
        return await self.answer(path, scope)

    async def answer(self, path: str, scope: Scope) -> Response:
        """Any file of the folder. Raises HTTPException: there is none of that name."""
        response = await super().get_response(path, scope)
        response.headers.update(HEADERS)
        if response.status_code == 200:
            response.headers["content-type"] = MEDIA_TYPES[Path(path).suffix]
        return response
