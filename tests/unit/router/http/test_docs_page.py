"""The page at `/docs`: it has all that /openapi.json has, and needs no other host and no script."""

from __future__ import annotations

import base64
import hashlib
import re

import httpx

from router.http.page import docs_page
from router.http.routes import create_app
from tests.support.router_fakes import FakeTranscriber, client_of, make_registry, make_settings


def client() -> httpx.AsyncClient:
    settings = make_settings(asr_webservice=True)
    return client_of(create_app(make_registry(FakeTranscriber()), settings))


async def test_the_page_loads_nothing() -> None:
    async with client() as asked:
        answer = await asked.get("/docs")
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    policy = answer.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert not re.search(r"<(script|link|img|iframe)\b|\bsrc=|@import|url\(", answer.text)
    assert set(re.findall(r'href="([^#"][^"]*)"', answer.text)) == {"openapi.json"}
    (style,) = re.findall(r"<style>(.*?)</style>", answer.text, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    assert f"style-src 'sha256-{digest}'" in policy, "or a browser shows the page without it"


async def test_what_a_field_takes_is_told_in_the_words_of_the_reference() -> None:
    async with client() as asked:
        page = (await asked.get("/docs")).text
    assert "whole number from 1 to 16" in page
    assert "list of: number from 0 to 604800" in page
    assert "object of <code>data</code> (text): base64 of the file; <code>format</code>" in page


def test_text_of_the_document_is_never_markup() -> None:
    operation = {
        "summary": "<b>one</b>",
        "description": "<script>two</script>",
        "parameters": [{"name": "<i>", "schema": {"type": "string", "default": "<u>"}}],
        "responses": {"200": {"description": "<img src=x>"}},
    }
    page = docs_page(
        {"info": {"title": "<a>", "version": "1"}, "paths": {"/<p>": {"get": operation}}}
    )
    assert not re.search(r"<(b|script|i|u|img|a)>|<img", page)
