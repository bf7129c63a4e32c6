"""The page at `/` in a real Chromium, against a real server: as a person uses it.

To make the shipped pictures anew, set PAGE_IMAGES=configs/images for a run of these tests.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from base64 import b64decode
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from cluster.demo.samples import sample_path
from cluster.serve.distribution import package_root
from router.api.subtitles import srt, txt, vtt
from router.http.routes import create_app
from router.transcript import Segment
from tests.e2e.conftest import Server, wait_until
from tests.e2e.http.test_node_sdk import OFFLINE
from tests.support.audio.recordings import lengthened
from tests.support.programs import needs
from tests.support.router_fakes import (
    FakeTranscriber,
    make_registry,
    make_settings,
    running_server,
)

playwright = pytest.importorskip("playwright.sync_api")
from playwright.sync_api import Browser, Page, Route, WebSocketRoute, expect  # noqa: E402

from tests.support.browsers.page import (  # noqa: E402
    ELSEWHERE,
    drop,
    opened,
    running_browser,
    shifts,
    text_of,
    violations,
    watch_shifts,
    webp,
)

pytestmark = [pytest.mark.slow, needs("chromium", "npm")]
AXE = Path(__file__).with_name("browser")
IMAGES = package_root() / "configs/images"
PICTURES = {"page.webp": "light", "page-dark.webp": "dark"}
MAX_IMAGES_BYTES = 150_000
KEY = "a-key of this-test!"  # with characters that no header of a WebSocket may have
WAIT_MS = 30_000
FORM = {
    "model": "whisper-1",
    "response_format": "verbose_json",
    "timestamp_granularities[]": ["word", "segment"],
}
WATCH_LIT = """() => {
    window.lit = [];
    new MutationObserver((changes) => changes.forEach(({ target }) => {
        if (target.classList.contains("lit")) window.lit.push(target.textContent);
    })).observe(document.querySelector("#transcript"),
        { subtree: true, attributes: true, attributeFilter: ["class"] });
}"""
WATCH_POLICY = """() => {
    window.blocked = [];
    addEventListener("securitypolicyviolation",
        (event) => window.blocked.push(event.effectiveDirective));
}"""
WATCH_SENT = """() => {
    window.sent = [];
    const { send } = XMLHttpRequest.prototype;
    XMLHttpRequest.prototype.send = function (form) {
        window.sent.push([...form].map(([name, value]) => [name, value.name ?? value]));
        return send.call(this, form);
    };
}"""
HOSTILE = ' <img src=x onerror="window.hit=1"><script>window.hit=1</script> & </p> &lt;b&gt;'


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    spoken = tmp_path_factory.mktemp("spoken") / "short.wav"
    spoken.write_bytes(lengthened("short", 24_000))
    with running_browser(spoken) as browser:
        yield browser


@pytest.fixture(scope="module")
def axe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """axe-core, as `browser/package-lock.json` pins it."""
    folder = tmp_path_factory.mktemp("axe")
    for name in ("package.json", "package-lock.json"):
        shutil.copy(AXE / name, folder)
    install = ["npm", "ci", "--no-audit", "--no-fund"]
    run = subprocess.run(install, cwd=folder, capture_output=True, text=True, timeout=120)
    if any(code in run.stderr for code in OFFLINE):
        pytest.skip("npm cannot reach its registry")
    assert run.returncode == 0, run.stderr
    return folder / "node_modules/axe-core/axe.min.js"


@pytest.fixture
def page(browser: Browser, server: Server) -> Iterator[Page]:
    with opened(browser, server.url) as page:
        yield page


def ask(server: Server, name: str) -> dict[str, Any]:
    """What the API itself says of a sample, streamed, as the page asks for it."""
    files = {"file": (f"{name}.flac", sample_path(name).read_bytes())}
    url = f"{server.url}/v1/audio/transcriptions"
    stream = httpx.post(url, data={**FORM, "stream": "true"}, files=files, timeout=120).text
    events = [line for line in stream.splitlines() if line.startswith("data: {")]
    done: dict[str, Any] = json.loads(events[-1].removeprefix("data: "))
    assert done["type"] == "transcript.text.done"
    return done


def transcribe(page: Page, *names: str) -> None:
    """Choose samples, and wait until they are done."""
    page.set_input_files("#file-input", [sample_path(name) for name in names])
    expect(page.locator("[data-state=done]")).to_have_count(len(names), timeout=WAIT_MS)


def downloaded(page: Page, press: Callable[[], None]) -> str:
    with page.expect_download() as download:
        press()
    return Path(download.value.path()).read_text()


# ----------------------------------------------------------------------------------- files, reader


def test_a_dropped_file_becomes_words_with_times_and_stages(page: Page, server: Server) -> None:
    expect(page.locator("#server-state")).to_have_text("Ready")
    drop(page, "medium.flac", sample_path("medium").read_bytes())
    expect(page.locator("[data-state=done]")).to_have_count(1, timeout=WAIT_MS)
    answer = ask(server, "medium")
    assert text_of(page.locator("#transcript .words")) == answer["text"]
    assert page.locator("#transcript .word").all_inner_texts() == [
        word["word"] for word in answer["words"]
    ]
    doubtful = [word["word"] for word in answer["words"] if word["probability"] < 0.5]
    assert page.locator("#transcript .doubtful").all_inner_texts() == doubtful
    told = page.locator("#timing .stages").get_attribute("aria-label") or ""
    for stage in ("Upload", "Audio", "Queue", "Encode", "KV transfer", "Decode"):
        assert re.search(rf"{stage} [\d.]+ m?s", told), told
    assert page.locator("#timing .stage").count() == 6
    for name in ("Encoders", "Decoders"):
        pool = page.locator(".pool", has_text=name)
        expect(pool).to_contain_text("2 workers")
        expect(pool).to_contain_text(re.compile(r"\d of \d+"))


def test_several_files_are_transcribed_side_by_side_and_read_one_by_one(
    page: Page, server: Server
) -> None:
    names = ("short", "medium", "long")
    transcribe(page, *names)
    for name in names:
        page.get_by_role("button", name=f"{name}.flac").first.click()
        expect(page.locator("#reader-title")).to_have_text(f"{name}.flac")
        assert text_of(page.locator("#transcript .words")) == ask(server, name)["text"]
    page.get_by_role("button", name="Remove long.flac").click()
    expect(page.locator(".queue-item")).to_have_count(2)
    expect(page.locator("#reader-title")).to_have_text("medium.flac")


def test_the_options_are_the_request_s(page: Page, server: Server) -> None:
    page.get_by_label("Task").select_option("translate")
    page.get_by_label("Language").select_option("en")
    page.get_by_text("More options").click()
    page.get_by_label("Decoding").select_option("sequential")
    page.get_by_label("Beams").fill("2")
    page.get_by_label("When done").select_option("vtt")
    page.evaluate(WATCH_SENT)
    with page.expect_request("**/v1/audio/translations"), page.expect_download() as saved:
        page.set_input_files("#file-input", sample_path("short"))
    ((*fields, name),) = page.evaluate("window.sent")
    assert name == ["file", "short.flac"]
    wanted = [["language", "en"], ["decoding", "sequential"], ["beam_size", "2"]]
    assert [field for field in wanted if field not in fields] == []
    assert Path(saved.value.path()).read_text().startswith("WEBVTT\n\n")
    assert saved.value.suggested_filename == "short.vtt"
    expect(page.locator(".segment").first).to_be_visible()


def test_what_is_refused_says_so_in_the_api_s_words(browser: Browser, server: Server) -> None:
    files = {"file": ("notes.txt", b"no audio")}
    url = f"{server.url}/v1/audio/transcriptions"
    refusal = httpx.post(url, data=FORM, files=files).json()["error"]["message"]
    with opened(browser, server.url, expected=("status of 4", "ERR_CONNECTION")) as page:
        drop(page, "notes.txt", b"no audio", "text/plain")
        failed = page.locator("[data-state=failed]")
        expect(failed).to_contain_text(refusal, timeout=WAIT_MS)
        expect(page.locator("#reader-note")).to_have_text(refusal)
        page.get_by_text("More options").click()
        page.get_by_label("Temperature").fill("7")
        page.set_input_files("#file-input", sample_path("short"))
        expect(failed).to_have_count(2, timeout=WAIT_MS)
        expect(failed.last).to_contain_text("temperature")
        page.get_by_role("button", name="Remove notes.txt").click()
        expect(failed).to_have_count(1)


def test_a_file_over_the_limit_is_refused_before_it_is_sent_and_by_the_server(
    browser: Browser, server: Server, tmp_path: Path
) -> None:
    large = tmp_path / "large.wav"
    large.write_bytes(bytes(40_000_000))
    failed = "[data-state=failed]"
    with opened(browser, server.url, expected=("status of 413",)) as page:
        expect(page.locator("#server-state")).to_have_text("Ready")
        page.set_input_files("#file-input", large)
        expect(page.locator(failed)).to_contain_text("has 40.0 MB, and this server takes at most")
        page.route("**/health", lambda route: route.fulfill(json={"status": "ready"}))
        page.reload()
        expect(page.locator("#server-state")).to_have_text("Ready")
        page.set_input_files("#file-input", large)
        refusal = "Maximum content size limit (26214400) exceeded"
        expect(page.locator(failed)).to_contain_text(refusal, timeout=WAIT_MS)
    wait_until(server.is_idle, 30, "nothing of the upload is left")


def test_a_stopped_file_is_cancelled_and_tried_again(page: Page, server: Server) -> None:
    page.set_input_files("#file-input", sample_path("long"))
    page.get_by_role("button", name="Stop long.flac").click()
    expect(page.locator("[data-state=stopped]")).to_have_count(1)
    wait_until(server.is_idle, 30, "every window of the request is gone")
    page.get_by_role("button", name="Try long.flac again").click()
    expect(page.locator("[data-state=done]")).to_have_count(1, timeout=WAIT_MS)
    assert text_of(page.locator("#transcript .words")) == ask(server, "long")["text"]


def test_a_click_on_a_word_seeks_and_playing_lights_the_words(page: Page, server: Server) -> None:
    transcribe(page, "medium")
    words = ask(server, "medium")["words"]
    at = "document.querySelector('#audio').currentTime"
    page.evaluate(WATCH_LIT)
    page.locator(".word").nth(7).click()
    assert page.evaluate(at) == pytest.approx(words[7]["start"], abs=0.02)
    expect(page.locator(".lit")).to_have_text(words[7]["word"])
    page.get_by_role("button", name="Play", exact=True).click()
    expect(page.get_by_role("button", name="Pause")).to_be_visible()
    expect(page.locator(".segment").nth(2)).to_have_class(re.compile("playing"), timeout=WAIT_MS)
    assert page.locator(".lit").count() == 1
    page.get_by_role("button", name="Pause").click()
    lit = page.evaluate("window.lit")
    order = [word["word"] for word in words]
    assert len(lit) > 2
    assert " ".join(lit) in " ".join(order), "one after another"
    page.get_by_label("Position").fill("0")
    assert page.evaluate(at) == 0


def test_files_are_the_api_s_and_edits_are_in_all_of_them(page: Page, server: Server) -> None:
    transcribe(page, "medium")
    answer = ask(server, "medium")
    segments = [Segment(**segment) for segment in answer["segments"]]
    for name, written in (("txt", txt(segments)), ("srt", srt(segments)), ("vtt", vtt(segments))):
        press = page.get_by_role("button", name=f"Export as {name}").click
        assert downloaded(page, press) == written
    as_json = json.loads(downloaded(page, page.get_by_role("button", name="Export as json").click))
    for name in ("text", "language", "duration", "words"):
        assert as_json[name] == answer[name]

    first = answer["segments"][0]["text"].split()
    page.locator(".segment .words").first.dblclick()
    box = page.get_by_role("textbox", name="Text at")
    box.fill(f"{first[0]} <b>truly</b> {' '.join(first[1:])}")
    box.press("Enter")
    for name in ("txt", "srt", "vtt", "json"):
        press = page.get_by_role("button", name=f"Export as {name}").click
        assert f"{first[0]} <b>truly</b> {first[1]}" in downloaded(page, press)
    assert page.locator("#transcript b").count() == 0
    assert page.locator(".word").nth(2).inner_text() == first[1]
    page.locator(".word").nth(2).click()
    found = page.evaluate("document.querySelector('#audio').currentTime")
    assert found == pytest.approx(answer["words"][1]["start"], abs=0.02), "its time has stayed"


def test_copy_puts_the_text_onto_the_clipboard(browser: Browser, server: Server) -> None:
    with opened(browser, server.url) as page:
        page.context.grant_permissions(["clipboard-read", "clipboard-write"], origin=server.url)
        transcribe(page, "short")
        page.get_by_role("button", name="Copy").first.click()
        expect(page.locator("#copy")).to_have_text("Copied")
        copied = page.evaluate("navigator.clipboard.readText()")
        assert " ".join(copied.split()) == ask(server, "short")["text"]


def test_the_keyboard_alone_suffices(page: Page, server: Server) -> None:
    press = page.keyboard.press
    press("Tab")
    expect(page.get_by_text("Skip to the content")).to_be_focused()
    for place in ("#tab-files", "#choose"):
        press("Tab")
        expect(page.locator(place)).to_be_focused()
    with page.expect_file_chooser() as chooser:
        press("Enter")
    chooser.value.set_files(sample_path("medium"))
    expect(page.locator("[data-state=done]")).to_have_count(1, timeout=WAIT_MS)
    words = ask(server, "medium")["words"]
    for _ in range(40):
        press("Tab")
        if page.evaluate("document.activeElement.closest('#transcript') !== null"):
            break
    times = page.locator("#transcript .time")
    expect(times.first).to_be_focused()
    press("ArrowDown")
    expect(times.nth(1)).to_be_focused()
    press("ArrowUp")
    at = "document.querySelector('#audio').currentTime"
    for word in words[:3]:
        press("ArrowRight")
        assert page.evaluate(at) == pytest.approx(word["start"], abs=0.02)
    press("e")
    page.keyboard.type("Changed ")
    press("Escape")
    expect(page.locator(".segment .words").first).not_to_contain_text("Changed")
    expect(times.first).to_be_focused()
    press(" ")
    expect(page.get_by_role("button", name="Pause")).to_be_visible()
    press(" ")
    page.locator("#tab-files").focus()
    press("ArrowRight")
    expect(page.locator("#view-live")).to_be_visible()
    press("Tab")
    expect(page.locator("#live-button")).to_be_focused()


# ------------------------------------------------------------------------------ keys, hostile text


def test_a_key_opens_the_api_and_is_kept_nowhere(browser: Browser, tmp_path: Path) -> None:
    """On the router alone, whose transcriber answers at once: keys go no further than there."""
    settings = make_settings(api_key=(KEY,), page="on", max_upload_bytes=26_214_400)
    app = create_app(make_registry(FakeTranscriber()), settings, spool_dir=tmp_path)
    with running_server(app) as url, opened(browser, url, expected=("status of 401",)) as page:
        assert httpx.get(f"{url}/v1/models").status_code == 401
        dialog = page.get_by_role("dialog")
        expect(dialog).to_be_visible()
        dialog.get_by_label("API key").fill("another")
        dialog.get_by_role("button", name="Use this key").click()
        expect(dialog).to_be_visible()
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


def answered_with(
    text: str, n_segments: int = 1, speakers: tuple[str, ...] = ()
) -> Callable[[Route], None]:
    """An answer as the server streams it, with this text in each segment."""
    n_words = len(text.split())
    step = 2.9 / n_words
    segments = [
        {"id": i, "start": 3.0 * i, "end": 3.0 * i + 2.9, "text": text} for i in range(n_segments)
    ]
    for segment, speaker in zip(segments, speakers, strict=False):
        segment["speaker"] = speaker
    words = [
        {"word": word, "start": start, "end": start + step, "probability": 0.9}
        for i in range(n_segments)
        for word, start in zip(text.split(), 3.0 * i + step * np.arange(n_words), strict=True)
    ]
    whole = {
        "type": "transcript.text.done",
        "task": "transcribe",
        "language": text,
        "duration": 3.0 * n_segments,
        "text": text,
        "segments": segments,
        "words": words,
        "server_timing": f'encode;dur=1.0;desc="{text}", total;dur=2.0',
    }
    delta = {"type": "transcript.text.delta", "delta": text, "segments": segments}
    body = "".join(f"data: {json.dumps(event)}\n\n" for event in (delta, whole))

    def answer(route: Route) -> None:
        route.fulfill(content_type="text/event-stream", body=f"{body}data: [DONE]\n\n")

    return answer


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


# ------------------------------------------------------------------------------- looks and access


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing_serious(
    browser: Browser, server: Server, axe: Path, scheme: Any
) -> None:
    refused = ("status of 4",)
    with opened(browser, server.url, color_scheme=scheme, expected=refused) as page:
        expect(page.locator(".pool")).to_have_count(2)
        assert violations(page, axe) == []
        page.get_by_text("More options").click()
        transcribe(page, "medium")
        drop(page, "notes.txt", b"no audio", "text/plain")
        expect(page.locator("[data-state=failed]")).to_have_count(1)
        assert violations(page, axe) == []
        page.get_by_role("button", name="medium.flac").first.click()
        page.locator(".word").nth(3).click()
        assert violations(page, axe) == []
        page.locator(".segment .words").first.dblclick()
        assert violations(page, axe) == []
        page.keyboard.press("Escape")
        page.evaluate("document.querySelector('#key-dialog').showModal()")
        assert violations(page, axe) == []
        page.keyboard.press("Escape")
        page.get_by_role("tab", name="Live").click()
        assert violations(page, axe) == []


@pytest.mark.parametrize("width", [360, 700, 1024, 1920])
def test_nothing_sticks_out_and_nothing_moves_while_text_arrives(
    browser: Browser, server: Server, width: int
) -> None:
    with opened(browser, server.url, viewport={"width": width, "height": 800}) as page:
        expect(page.locator(".pool")).to_have_count(2)
        page.set_input_files("#file-input", sample_path("long"))
        expect(page.locator("[data-state=working]")).to_have_count(1, timeout=WAIT_MS)
        page.locator("#reader").scroll_into_view_if_needed()
        watch_shifts(page)
        expect(page.locator("[data-state=done]")).to_have_count(1, timeout=WAIT_MS)
        expect(page.locator(".word").first).to_be_visible()
        assert shifts(page) == []
        over = "document.documentElement.scrollWidth - innerWidth"
        assert page.evaluate(over) <= 0
        page.get_by_role("tab", name="Live").click()
        assert page.evaluate(over) <= 0


def test_of_two_hours_only_what_is_on_the_screen_is_drawn(page: Page) -> None:
    text = " one two three four five six seven eight nine ten"
    page.route("**/v1/audio/transcriptions", answered_with(text, 2000))
    drop(page, "long.flac", sample_path("short").read_bytes())
    expect(page.locator("#reader-meta")).to_contain_text("20,000 words", timeout=WAIT_MS)
    drawn = """[...document.querySelectorAll(".segment")].filter(
        (item) => item.firstChild.checkVisibility({ contentVisibilityAuto: true })).length"""
    assert 5 < page.evaluate(drawn) < 200
    page.locator(".segment .time").first.focus()
    page.keyboard.press("End")
    expect(page.locator(".segment").last).to_be_in_viewport()
    assert 5 < page.evaluate(drawn) < 200
    page.keyboard.press("Home")
    expect(page.locator(".segment").first).to_be_in_viewport()


# ------------------------------------------------------------------------------------- microphone


def shared_words(text: str) -> float:
    """The share of the spoken recording's words that are in a text."""
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
    """OpenAI's realtime protocol, as far as the page speaks it: answers by a script.

    It sends from within Playwright's handlers only; elsewhere its synchronous calls never return.
    """

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


# --------------------------------------------------------------------------------------- pictures


def test_the_pictures_that_are_shown_are_of_this_page(
    browser: Browser, server: Server, tmp_path: Path
) -> None:
    folder = Path(os.environ.get("PAGE_IMAGES", tmp_path))
    sizes = 0
    for name, scheme in PICTURES.items():
        size = {"width": 1240, "height": 780}
        with opened(browser, server.url, color_scheme=scheme, viewport=size) as page:
            transcribe(page, "long", "medium", "short")
            page.locator(".word").nth(28).click()
            page.mouse.move(0, 0)
            picture = webp(page.screenshot())
            (folder / name).write_bytes(picture)
            sizes += len(picture)
            shown = (IMAGES / name).read_bytes()
            assert shown[8:12] == b"WEBP"
    assert sizes < MAX_IMAGES_BYTES
