"""Serve the two pages for people: `GET /` to try the server, and `GET /docs` for its API.

The first is in `router/page/`. The second is the OpenAPI document as HTML without scripts, while
FastAPI's own page loads them from another host.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from html import escape
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.staticfiles import StaticFiles
from markdown_it import MarkdownIt
from starlette.exceptions import HTTPException
from starlette.types import Scope

from router.api.openapi import resolved, values_of

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
    "cache-control": "no-cache",  # a browser revalidates each time
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "microphone=(self), camera=(), geolocation=()",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
}


def add_page(app: FastAPI) -> None:
    """Add the page. Its links are relative, so that a proxy may serve it below a path."""
    files = PageFiles(directory=FOLDER)
    files.all_directories.append(SAMPLES)

    @app.api_route("/", methods=["GET", "HEAD"], include_in_schema=False)
    async def page(request: Request) -> Response:
        return await files.answer(SHELL, request.scope)

    app.mount("/page", files)


class PageFiles(StaticFiles):
    async def get_response(self, path: str, scope: Scope) -> Response:
        if path == SHELL or Path(path).suffix not in MEDIA_TYPES:
            raise HTTPException(404)
        return await self.answer(path, scope)

    async def answer(self, path: str, scope: Scope) -> Response:
        """Answer with any file of the folders. Raises HTTPException if there is none."""
        response = await super().get_response(path, scope)
        response.headers.update(HEADERS)
        if response.status_code == 200:
            response.headers["content-type"] = MEDIA_TYPES[Path(path).suffix]
        return response


# ---- the API

Schema = Mapping[str, Any]
Cells = tuple[str, str, str]  # of a row of a table

_MARKDOWN = MarkdownIt("commonmark", {"html": False}).enable("table")

STYLE = """
:root { color-scheme: light dark; }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
h2 { margin-top: 2.5rem; border-top: 1px solid #8884; padding-top: 1rem; }
code, pre { font: 14px/1.45 ui-monospace, monospace; }
pre { overflow-x: auto; padding: .75rem; border: 1px solid #8884; border-radius: 4px; }
table { border-collapse: collapse; width: 100%; }
th, td { text-align: left; vertical-align: top; padding: .3rem .6rem; border: 1px solid #8884; }
h2 code { font-size: 18px; }
"""
_STYLE_HASH = base64.b64encode(hashlib.sha256(STYLE.encode()).digest()).decode()
DOCS_HEADERS = {
    "content-security-policy": f"default-src 'none'; style-src 'sha256-{_STYLE_HASH}'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
}


def add_docs(app: FastAPI) -> None:
    @cache
    def page() -> str:
        return docs_page(app.openapi())

    @app.api_route("/docs", methods=["GET", "HEAD"], include_in_schema=False)
    async def docs() -> Response:
        return Response(page(), media_type="text/html", headers=DOCS_HEADERS)


def docs_page(document: Schema) -> str:
    info = document["info"]
    schemas = document.get("components", {}).get("schemas", {})
    operations = [
        (f"{method.upper()} {path}", operation)
        for path, methods in document["paths"].items()
        for method, operation in methods.items()
    ]
    title = f"{escape(info['title'])} {escape(info['version'])}"
    contents = "".join(
        f'<li><a href="#{_anchor(name)}"><code>{escape(name)}</code></a>: '
        f"{escape(operation.get('summary', ''))}</li>"
        for name, operation in operations
    )
    body = "".join(
        f'<h2 id="{_anchor(name)}"><code>{escape(name)}</code></h2>'
        + _MARKDOWN.render("\n\n".join(_operation(operation, schemas)))
        for name, operation in operations
    )
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{title}: API</title><style>{STYLE}</style></head><body>"
        f"<h1>{title}</h1>{_MARKDOWN.render(info.get('description', ''))}"
        '<p>Programs read the same as <a href="openapi.json">openapi.json</a>.</p>'
        f"<ul>{contents}</ul>{body}</body></html>"
    )


def _operation(operation: Schema, schemas: Schema) -> Iterator[str]:
    yield f"**{operation.get('summary', '')}**"
    yield operation.get("description", "")
    if parameters := operation.get("parameters"):
        rows = [
            _row(one["name"], {**one["schema"], **one}, one.get("required", False), schemas)
            for one in parameters
        ]
        yield _table("Parameters", ("name", "value", "what it does"), rows)
    for media_type, content in operation.get("requestBody", {}).get("content", {}).items():
        schema = resolved(content.get("schema", {}), schemas)
        needed = schema.get("required", ())
        fields = schema.get("properties", {}).items()
        rows = [_row(name, field, name in needed, schemas) for name, field in fields]
        yield _table(f"Body as {media_type}", ("name", "value", "what it does"), rows)
    answers = [
        (f"`{status}`", ", ".join(answer.get("content", {})), answer.get("description", ""))
        for status, answer in operation["responses"].items()
    ]
    yield _table("Answers", ("status", "type of the body", "what it is"), answers)


def _table(title: str, heads: Cells, rows: Iterable[Cells]) -> str:
    cells = [[cell.replace("|", r"\|").replace("\n", " ") for cell in row] for row in rows]
    lines = (" | ".join(row) for row in (heads, ("---",) * 3, *cells))
    return "\n".join((f"### {title}", "", *(f"| {line} |" for line in lines)))


def _row(name: str, schema: Schema, required: bool, schemas: Schema) -> Cells:
    shown = values_of(schema, schemas)
    if (default := schema.get("default")) not in (None, ""):
        shown += f"; default `{default if isinstance(default, str) else json.dumps(default)}`"
    about = resolved(schema, schemas).get("description", "")
    return f"`{name}`{' (required)' if required else ''}", shown, about


def _anchor(name: str) -> str:
    return escape(name.lower().translate({ord(" "): "", ord("/"): "-", ord("{"): "", ord("}"): ""}))
