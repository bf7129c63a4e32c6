"""The microphone on the page at `/`: recordings and live words, in a real Chromium."""

from __future__ import annotations

import json
import re
from base64 import b64decode
from typing import Any

import numpy as np
import pytest
from playwright.sync_api import Browser, Page, WebSocketRoute, expect

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


ITEM = "conversation.item.input_audio_transcription"
TURN = (  # what the server says once it has had so many bytes of audio
    (4_800, {"type": "input_audio_buffer.speech_started", "item_id": "one", "audio_start_ms": 100}),
    (48_000, {"type": f"{ITEM}.delta", "item_id": "one", "delta": "Hello <b>"}),
    (96_000, {"type": f"{ITEM}.delta", "item_id": "one", "delta": "there</b>"}),
    (144_000, {"type": "input_audio_buffer.speech_stopped", "item_id": "one"}),
    (144_000, {"type": f"{ITEM}.completed", "item_id": "one", "transcript": "Hello <b>there</b>"}),
)
LAST_TURN = (
    {"type": "input_audio_buffer.committed", "item_id": "two"},
    {"type": f"{ITEM}.delta", "item_id": "two", "delta": "General."},
    {"type": f"{ITEM}.completed", "item_id": "two", "transcript": "General."},
)


class ScriptedSession:
    """Sends from within Playwright's handlers; elsewhere its synchronous calls never return."""

    def __init__(self) -> None:
        self.sent: list[dict[str, Any]] = []
        self.pcm = b""
        self._next = 0

    def handle(self, socket: WebSocketRoute) -> None:
        socket.on_message(lambda message: self._take(socket, json.loads(message)))
        socket.send(json.dumps({"type": "session.created"}))

    def _take(self, socket: WebSocketRoute, event: dict[str, Any]) -> None:
        match event["type"]:
            case "input_audio_buffer.append":
                self.pcm += b64decode(event["audio"])
                while self._next < len(TURN) and len(self.pcm) >= TURN[self._next][0]:
                    socket.send(json.dumps(TURN[self._next][1]))
                    self._next += 1
                return
            case "session.update":
                socket.send(json.dumps({"type": "session.updated"}))
            case "input_audio_buffer.commit":
                for told in LAST_TURN:
                    socket.send(json.dumps(told))
        self.sent.append(event)


def test_live_words_appear_while_they_are_said_and_stay(page: Page) -> None:
    script = ScriptedSession()
    page.route_web_socket(re.compile("/v1/realtime"), script.handle)
    page.reload()  # which puts the script in the server's place
    page.get_by_role("tab", name="Live").click()
    page.get_by_role("button", name="Start").click()
    expect(page.locator(".turn:not(.open) .words")).to_have_text(
        "Hello <b>there</b>", timeout=WAIT_MS
    )
    expect(page.locator("#level")).not_to_have_attribute("aria-valuenow", "0")
    expect(page.locator("#live-state")).to_have_text("Listening")
    page.get_by_role("button", name="Stop").click()
    expect(page.locator("#live-state")).to_have_text("Press to speak", timeout=WAIT_MS)
    update, commit, *_ = script.sent
    told = update["session"]["audio"]["input"]
    assert update["session"]["type"] == "transcription"
    assert told["format"] == {"type": "audio/pcm", "rate": 24_000}
    assert told["turn_detection"]["type"] == "server_vad"
    assert told["transcription"]["model"]
    assert commit["type"] == "input_audio_buffer.commit"
    text = downloaded(page, page.get_by_role("button", name="Export txt").click)
    assert text == "Hello <b>there</b>\nGeneral.\n"
    heard = np.abs(np.frombuffer(script.pcm, np.int16))
    assert heard.max() > 1000, "the recording was heard"


def test_live_words_of_the_microphone_come_from_the_server(page: Page, server: Server) -> None:
    page.get_by_role("tab", name="Live").click()
    page.get_by_role("button", name="Start").click()
    said = page.locator(".turn:not(.open) .words")
    expect(said.nth(1)).to_have_text(re.compile(r"\w+ \w+"), timeout=2 * WAIT_MS)
    page.get_by_role("button", name="Stop").click()
    expect(page.locator("#live-state")).to_have_text("Press to speak", timeout=WAIT_MS)
    expect(page.locator(".turn.open")).to_have_count(0)
    assert shared_words(text_of(page.locator(".turn .words"))) > 0.5
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
