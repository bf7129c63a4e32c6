"""The page at `/`: when it is there, what its answers forbid, and that it needs nobody else."""

from __future__ import annotations

import re
from typing import Any

import httpx
import pytest

from cluster.demo.samples import sample_path
from router.http.page import CONTENT_SECURITY_POLICY, FOLDER, MEDIA_TYPES
from router.http.routes import create_app
from tests.support.router_fakes import (
    FakeTranscriber,
    client_of,
    error_of,
    make_registry,
    make_settings,
)

KEY = {"authorization": "Bearer one"}
NAMES = sorted(
    file.relative_to(FOLDER).as_posix() for file in FOLDER.rglob("*") if file.suffix in MEDIA_TYPES
)
MODULES = [name for name in NAMES if name.endswith(".js")]


def client(**settings: Any) -> httpx.AsyncClient:
    return client_of(create_app(make_registry(FakeTranscriber()), make_settings(**settings)))


@pytest.mark.parametrize(
    ("setting", "with_keys", "shown"),
    [
        ("auto", False, True),
        ("auto", True, False),
        ("on", False, True),
        ("on", True, True),
        ("off", False, False),
        ("off", True, False),
    ],
)
async def test_the_setting_and_the_keys_say_whether_it_is_there(
    setting: Any, with_keys: bool, shown: bool
) -> None:
    keys = ("one",) if with_keys else ()
    assert make_settings(page=setting, api_key=keys).shows_page is shown
    async with client(page=setting, api_key=keys) as page:
        for path in ("/", "/page/main.js", "/page/style.css"):
            answer = await page.get(path, headers=KEY)
            assert answer.status_code == (200 if shown else 404)
            if not shown:
                assert error_of(answer)["code"] == "unknown_url"


async def test_the_shell_is_the_same_for_everyone_and_tells_nothing_of_the_server() -> None:
    shells = []
    for settings in ({}, {"page": "on", "api_key": ("a-secret",), "max_upload_bytes": 4711}):
        async with client(**settings) as page:
            shells.append((await page.get("/")).text)
    assert shells[0] == shells[1] == (FOLDER / "index.html").read_text()


@pytest.mark.parametrize("name", NAMES)
async def test_every_file_is_served_as_what_it_is_and_under_the_policy(name: str) -> None:
    types = {".html": "text/html", ".js": "text/javascript", ".css": "text/css", ".svg": "image/"}
    path = "/" if name == "index.html" else f"/page/{name}"
    async with client() as page:
        answer = await page.get(path)
        again = await page.get(path, headers={"if-none-match": answer.headers["etag"]})
        head = await page.head(path)
    assert answer.content == (FOLDER / name).read_bytes()
    assert answer.headers["content-type"].startswith(types[(FOLDER / name).suffix])
    assert answer.headers["content-security-policy"] == CONTENT_SECURITY_POLICY
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["referrer-policy"] == "no-referrer"
    assert (again.status_code, again.content) == (304, b"")
    assert (head.status_code, head.content) == (200, b"")
    assert head.headers["content-length"] == str(len(answer.content))


def test_the_policy_allows_the_own_host_alone() -> None:
    rules = dict(rule.split(" ", 1) for rule in CONTENT_SECURITY_POLICY.split("; "))
    assert rules["default-src"] == "'none'"
    assert rules["script-src"] == rules["style-src"] == rules["connect-src"] == "'self'"
    assert rules["media-src"] == "blob:"
    closed = ("base-uri", "form-action", "frame-ancestors", "trusted-types")
    assert {rules[name] for name in closed} == {"'none'"}
    assert "unsafe" not in CONTENT_SECURITY_POLICY


async def test_a_recording_of_the_package_is_there_for_everyone() -> None:
    async with client(page="on", api_key=("one",)) as page:
        answer = await page.get("/page/medium.flac")
        beside = await page.get("/page/medium.txt")
    assert answer.content == sample_path("medium").read_bytes()
    assert answer.headers["content-type"] == "audio/flac"
    assert answer.headers["content-security-policy"] == CONTENT_SECURITY_POLICY
    assert beside.status_code == 404


@pytest.mark.parametrize(
    "path", ["/page/", "/page/index.html", "/page/../routes.py", "/page/..%2fhttp/page.py"]
)
async def test_nothing_else_lies_beside_it(path: str) -> None:
    async with client() as page:
        assert error_of(await page.get(path))["code"] == "unknown_url"


@pytest.mark.parametrize("name", NAMES)
def test_a_file_names_no_other_host(name: str) -> None:
    text = (FOLDER / name).read_text().replace("http://www.w3.org/2000/svg", "")
    hosts = set(re.findall(r"(?:https?:)?//([\w.-]+\.\w+|localhost|127\.0\.0\.1)", text))
    assert hosts <= {"localhost", "127.0.0.1"}, "where the page says that it may be opened"


def test_what_the_page_names_is_there_and_all_of_it_is_named() -> None:
    shell = (FOLDER / "index.html").read_text()
    named = set(re.findall(r'(?:href|src)="page/([^"]+)"', shell))
    for module in MODULES:
        text = (FOLDER / module).read_text()
        named |= set(re.findall(r'from "\./([^"]+)"', text))
        named |= set(re.findall(r'place\("page/([^"]+)"\)', text))
    assert named | {"index.html"} == set(NAMES)


def test_every_element_that_a_module_asks_for_is_in_the_shell() -> None:
    ids = set(re.findall(r'\bid="([\w-]+)"', (FOLDER / "index.html").read_text()))
    asked = {one for module in MODULES for one in re.findall(r'byId\("([\w-]+)"\)', _text(module))}
    assert asked <= ids


@pytest.mark.parametrize("name", MODULES)
def test_no_module_makes_markup_of_text_or_keeps_anything(name: str) -> None:
    words = r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b|new Function"
    stores = r"localStorage|sessionStorage|indexedDB|document\.cookie|caches\."
    assert not re.findall(f"{words}|{stores}", _text(name))


def _text(name: str) -> str:
    return (FOLDER / name).read_text()
