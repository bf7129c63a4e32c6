"""What the page at `/` keeps out: keys that stay nowhere, and texts and names that stay text."""

from __future__ import annotations

import re

import httpx
import pytest
from playwright.sync_api import Browser, Page, expect

from cluster.demo.samples import sample_path
from router.http.routes import create_app
from tests.e2e.conftest import Server, wait_until
from tests.support.browsers.page import drop, opened, text_of
from tests.support.browsers.transcribing import WAIT_MS, answered_with, downloaded
from tests.support.programs import needs
from tests.support.router_fakes import FakeTranscriber, make_registry, make_settings, running_server

pytestmark = [pytest.mark.slow, needs("chromium", "npm")]
KEY = "a-key(of)this@test!"  # with characters that no header of a WebSocket may have
WATCH_POLICY = """() => {
    window.blocked = [];
    addEventListener("securitypolicyviolation",
        (event) => window.blocked.push(event.effectiveDirective));
}"""
HOSTILE = ' <img src=x onerror="window.hit=1"><script>window.hit=1</script> & </p> &lt;b&gt;'


def test_a_key_opens_the_api_and_is_kept_nowhere(browser: Browser) -> None:
    settings = make_settings(api_key=(KEY,), page="on", max_upload_bytes=26_214_400)
    app = create_app(make_registry(FakeTranscriber()), settings)
    refused = ("status of 401", "status of 503")  # the first answer of /health may be early
    with running_server(app) as url, opened(browser, url, expected=refused) as page:
        assert httpx.get(f"{url}/v1/models").status_code == 401
        dialog = page.get_by_role("dialog")
        expect(dialog).to_be_visible()
        dialog.get_by_label("API key").fill("another")
        dialog.get_by_role("button", name="Use this key").click()
        expect(dialog.get_by_role("alert")).to_have_text("This key was not accepted.")
        expect(dialog.get_by_label("API key")).to_have_attribute("aria-invalid", "true")
        expect(dialog.get_by_label("API key")).to_be_focused()
        expect(page.locator("#options").get_by_label("Model")).to_have_value("whisper-1")
        dialog.get_by_role("button", name="Not now").click()
        page.set_input_files("#file-input", sample_path("short"))
        failed = page.locator("[data-state=failed]")
        expect(failed).to_contain_text(re.compile("API key"))
        dialog.get_by_label("API key").fill(KEY)
        page.keyboard.press("Enter")
        expect(page.locator("[data-state=done]")).to_have_count(1, timeout=WAIT_MS)
        assert text_of(page.locator("#transcript .words")) == "Hello there. General."
        kept = page.evaluate("[localStorage.length, sessionStorage.length, document.cookie]")
        assert kept == [0, 0, ""]
        assert KEY not in page.content()
        page.reload()
        expect(dialog).to_be_visible()


def test_markup_and_scripts_in_texts_and_names_stay_text(page: Page) -> None:
    page.route("**/v1/audio/transcriptions", answered_with(HOSTILE))
    name = '<img src=x onerror="window.hit=1">.flac'
    drop(page, name, sample_path("short").read_bytes())
    expect(page.locator("[data-state=done]")).to_have_count(1)
    assert text_of(page.locator("#transcript .words")) == HOSTILE.strip()
    expect(page.locator("#reader-title")).to_have_text(name)
    assert page.locator("main img, main script, .words b").count() == 0
    press = page.get_by_role("button", name="Export as txt").click
    assert downloaded(page, press).strip() == HOSTILE.strip()
    assert page.evaluate("window.hit") is None


def test_speakers_have_a_colour_each(page: Page) -> None:
    speakers = ("A", "B", "A")
    page.route("**/v1/audio/transcriptions", answered_with(" yes it is", 3, speakers))
    drop(page, "talk.flac", sample_path("short").read_bytes())
    expect(page.locator("[data-state=done]")).to_have_count(1)
    assert page.locator(".speaker").all_inner_texts() == list(speakers)
    colour = "(tags) => tags.map((tag) => getComputedStyle(tag).borderLeftColor)"
    first, second, third = page.locator(".speaker").evaluate_all(colour)
    assert first == third != second
    page.locator(".speaker").nth(2).click()
    page.keyboard.press("ControlOrMeta+A")
    page.keyboard.type("Ann & <i>Co</i>")
    page.keyboard.press("Enter")
    expect(page.locator(".speaker")).to_have_text(["Ann & <i>Co</i>", "B", "Ann & <i>Co</i>"])
    assert page.locator(".speaker").evaluate_all(colour) == [first, second, third]
    page.locator(".time").nth(1).focus()
    page.keyboard.press("n")
    page.keyboard.type("X")
    page.keyboard.press("Escape")
    expect(page.locator(".speaker").nth(1)).to_have_text("B")
    text = downloaded(page, page.get_by_role("button", name="Export as txt").click)
    assert text.splitlines()[0] == "Ann & <i>Co</i>: yes it is"
    cues = downloaded(page, page.get_by_role("button", name="Export as vtt").click)
    assert "<v Ann &amp; &lt;i&gt;Co&lt;/i&gt;>yes it is" in cues


def test_the_policy_stops_what_would_come_from_elsewhere(browser: Browser, server: Server) -> None:
    refused = ("Content Security Policy", "TrustedHTML", "Refused")
    with opened(browser, server.url, expected=refused) as page:
        page.evaluate(WATCH_POLICY)
        assert (
            page.evaluate("() => { try { document.body.innerHTML = '<b>x</b>' } catch {} }") is None
        )
        page.evaluate("() => fetch('http://127.0.0.1:7999/').catch(() => null)")
        blocked = {"require-trusted-types-for", "connect-src"}
        wait_until(lambda: set(page.evaluate("window.blocked")) == blocked, 20, "both were blocked")
        assert page.locator("main").count() == 1, "nothing became markup"
        loaded = "performance.getEntriesByType('resource').map((entry) => entry.name)"
        others = [name for name in page.evaluate(loaded) if not name.startswith(server.url)]
        assert [name for name in others if ":7999/" not in name] == []
