"""Files on the page at `/`: as a person gives, reads, edits and saves them, in a real Chromium."""

from __future__ import annotations

import re
from pathlib import Path

import httpx
import pytest
from playwright.sync_api import Browser, Page, expect

from cluster.demo.samples import sample_path
from tests.e2e.conftest import Server, wait_until
from tests.support.browsers.page import drop, opened, text_of
from tests.support.browsers.transcribing import FORM, WAIT_MS, ask, downloaded, transcribe
from tests.support.programs import needs

pytestmark = [pytest.mark.slow, needs("chromium", "npm")]
WATCH_LIT = """() => {
    window.lit = [];
    new MutationObserver((changes) => changes.forEach(({ target }) => {
        if (target.classList.contains("lit")) window.lit.push(target.textContent);
    })).observe(document.querySelector("#transcript"),
        { subtree: true, attributes: true, attributeFilter: ["class"] });
}"""
WATCH_SENT = """() => {
    window.sent = [];
    const { send } = XMLHttpRequest.prototype;
    XMLHttpRequest.prototype.send = function (form) {
        window.sent.push([...form].map(([name, value]) => [name, value.name ?? value]));
        return send.call(this, form);
    };
}"""


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
    page.locator("#options").get_by_label("Language").select_option("en")
    page.get_by_text("More options").click()
    page.get_by_label("Decoding").select_option("sequential")
    page.get_by_label("Beams").fill("2")
    page.get_by_label("When done").select_option("vtt")
    page.evaluate(WATCH_SENT)
    with page.expect_request("**/v1/audio/transcriptions"), page.expect_download() as saved:
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
    refusal = re.sub("['\\[\\]]", "", refusal)  # a list as people write it
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
        page.get_by_label("Temperature").fill("")
        page.get_by_label("Task").select_option("translate")
        page.set_input_files("#file-input", sample_path("short"))
        expect(failed.last).to_contain_text("cannot translate", timeout=WAIT_MS)


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
    # One that lasts: where a word ends as it begins, its time is also the next one's.
    chosen = next(i for i, word in enumerate(words) if i > 6 and word["end"] > word["start"])
    page.locator(".word").nth(chosen).click()
    assert page.evaluate(at) == pytest.approx(words[chosen]["start"], abs=0.02)
    expect(page.locator(".lit")).to_have_text(words[chosen]["word"])
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


def test_edits_are_in_all_exported_files(page: Page, server: Server) -> None:
    transcribe(page, "medium")
    answer = ask(server, "medium")
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
