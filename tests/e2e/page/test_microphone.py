"""The microphone on the page at `/`: recordings and live words, in a real Chromium."""

from __future__ import annotations

import re

import pytest
from playwright.sync_api import Browser, Page, expect

from cluster.demo.samples import sample_path
from tests.e2e.conftest import Server, wait_until
from tests.support.browsers.page import ELSEWHERE, opened, text_of
from tests.support.browsers.transcribing import WAIT_MS, downloaded, transcribe
from tests.support.programs import needs

pytestmark = [pytest.mark.slow, needs("chromium", "npm")]


def shared_words(text: str) -> float:
    said = set(re.findall(r"\w+", sample_path("short").with_suffix(".txt").read_text().lower()))
    return len(said & set(re.findall(r"\w+", text.lower()))) / len(said)


def test_a_recording_of_the_microphone_is_transcribed(page: Page) -> None:
    page.get_by_role("button", name="Record").click()
    noted = page.locator("#record-note")
    expect(noted).to_have_text(re.compile(r"0:(09|[1-5]\d)"), timeout=2 * WAIT_MS)
    page.get_by_role("button", name="Stop", exact=True).click()
    expect(page.locator("[data-state=done]")).to_have_count(1, timeout=WAIT_MS)
    expect(page.locator("#reader-title")).to_contain_text("Recording")
    assert shared_words(text_of(page.locator("#transcript .words"))) > 0.5
    expect(page.locator("#length")).to_have_text(re.compile(r"0:(09|[1-5]\d)"))
    page.locator(".word").last.click()
    expect(page.locator(".lit")).to_have_count(1)


def test_live_words_of_the_microphone_come_from_the_server(page: Page, server: Server) -> None:
    page.get_by_role("tab", name="Live").click()
    page.get_by_role("button", name="Start").click()
    expect(page.locator("#live-state")).to_have_text("Listening", timeout=WAIT_MS)
    expect(page.locator("#level")).not_to_have_attribute("aria-valuenow", "0")
    said = page.locator(".turn:not(.open) .words")
    expect(said.nth(1)).to_have_text(re.compile(r"\w+ \w+"), timeout=2 * WAIT_MS)
    page.get_by_role("button", name="Stop").click()
    expect(page.locator("#live-state")).to_have_text("Press to speak", timeout=WAIT_MS)
    expect(page.locator(".turn.open")).to_have_count(0)
    text = text_of(page.locator(".turn .words"))
    assert shared_words(text) > 0.5
    exported = downloaded(page, page.get_by_role("button", name="Export txt").click)
    assert exported.split() == text.split()
    wait_until(server.is_idle, 30, "nothing of the session is left")


def test_a_refused_microphone_says_what_to_do(browser: Browser, server: Server) -> None:
    with opened(browser, server.url, microphone=False) as page:
        page.get_by_role("tab", name="Live").click()
        page.get_by_role("button", name="Start").click()
        expect(page.locator("#live-note")).to_contain_text("refused the microphone. Allow it")
        page.get_by_role("tab", name="Files").click()
        page.get_by_role("button", name="Record").click()
        expect(page.locator("#record-note")).to_contain_text("refused the microphone. Allow it")


def test_away_from_localhost_without_https_the_page_says_so(
    browser: Browser, server: Server
) -> None:
    url = server.url.replace("127.0.0.1", ELSEWHERE)
    # Chromium tells that it ignores this header there.
    ignored = ("Cross-Origin-Opener-Policy",)
    with opened(browser, url, microphone=False, expected=ignored) as page:
        transcribe(page, "short")
        page.get_by_role("tab", name="Live").click()
        page.get_by_role("button", name="Start").click()
        expect(page.locator("#live-note")).to_contain_text("only to pages on HTTPS or on localhost")
