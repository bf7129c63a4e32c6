"""What the page at `/` shows when it is not all well or not all there, on the router alone."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from playwright.sync_api import Browser, Locator, Page, expect

from cluster.common.errors import InvalidAudioError
from cluster.demo.samples import sample_path
from router.http.routes import create_app
from tests.e2e.conftest import wait_until
from tests.support.browsers.page import drop, opened
from tests.support.browsers.transcribing import WAIT_MS, answered_with
from tests.support.programs import needs
from tests.support.router_fakes import FakeTranscriber, make_registry, make_settings, running_server

pytestmark = [pytest.mark.slow, needs("chromium", "npm")]
AUDIO = sample_path("short").read_bytes()
STREAM = "**/v1/audio/transcriptions"
WIDE: dict[str, Any] = {}
PHONE = {"viewport": {"width": 390, "height": 800}, "has_touch": True, "is_mobile": True}
TIMING = 'upload;dur=10, queue;dur=3000, encode;dur=0.0;desc="3 windows", transfer;dur=121, total;'


@pytest.fixture(scope="module")
def transcriber() -> FakeTranscriber:
    return FakeTranscriber()


@pytest.fixture(scope="module")
def url(transcriber: FakeTranscriber) -> Iterator[str]:
    settings = make_settings(max_upload_bytes=26_214_400)
    with running_server(create_app(make_registry(transcriber), settings)) as url:
        wait_until(lambda: httpx.get(f"{url}/health").is_success, 20, "the pools have answered")
        yield url


@pytest.fixture
def page(browser: Browser, url: str) -> Iterator[Page]:
    with opened(browser, url) as page:
        yield page


def box(place: Locator) -> dict[str, float]:
    found = place.bounding_box()
    assert found is not None
    return dict(found)


@pytest.mark.parametrize("device", [WIDE, PHONE], ids=["wide", "phone"])
def test_an_error_stands_beside_its_buttons_and_lists_as_people_do(
    browser: Browser,
    url: str,
    transcriber: FakeTranscriber,
    monkeypatch: pytest.MonkeyPatch,
    device: dict[str, Any],
) -> None:
    formats = ["flac", "m4a", "mp3", "mp4", "mpeg", "mpga", "oga", "ogg", "opus", "wav", "webm"]
    refusal = InvalidAudioError(f"Invalid file format. Supported formats: {formats}")
    monkeypatch.setattr(transcriber, "error", refusal)
    with opened(browser, url, expected=("status of 400",), **device) as page:
        drop(page, "notes.txt", b"no audio", "text/plain")
        failed = page.locator("[data-state=failed]")
        expect(failed).to_contain_text("formats: flac, m4a", timeout=WAIT_MS)
        note, buttons = box(failed.locator(".queue-note")), box(failed.locator(".queue-buttons"))
        assert note["x"] + note["width"] <= buttons["x"]
        over = failed.locator(".queue-open").evaluate("(tag) => tag.scrollWidth - tag.clientWidth")
        assert over <= 0
        assert 30 < note["height"] < 45, "two lines; the reader has the whole"


def test_hours_that_are_used_up_are_told_and_not_waited_for(browser: Browser, url: str) -> None:
    told = "This API key has used its 2 hours of audio of today."
    error = {"message": told, "code": "insufficient_quota", "type": "insufficient_quota"}
    with opened(browser, url, expected=("status of 429",)) as page:
        page.route(
            STREAM,
            lambda route: route.fulfill(
                status=429, headers={"retry-after": "51342"}, json={"error": error}
            ),
        )
        drop(page, "talk.flac", AUDIO)
        expect(page.locator("[data-state=failed]")).to_contain_text(told, timeout=WAIT_MS)


@pytest.mark.parametrize("device", [WIDE, PHONE], ids=["wide", "phone"])
def test_nothing_sticks_out_beside_errors(
    browser: Browser, url: str, device: dict[str, Any]
) -> None:
    def fits() -> bool:
        return bool(page.evaluate("document.documentElement.scrollWidth <= innerWidth"))

    refused = ("status of 400", "status of 401", "ERR_FAILED")
    with opened(browser, url, expected=refused, **device) as page:
        page.route(STREAM, answered_with(" one two three", 20))
        drop(page, "a recording with quite a long name of its own.flac", AUDIO)
        expect(page.locator("[data-state=done]")).to_have_count(1, timeout=WAIT_MS)
        page.unroute(STREAM)
        page.get_by_text("More options").click()
        page.get_by_label("Temperature").fill("7")
        drop(page, "bad.flac", AUDIO)
        expect(page.locator("[data-state=failed]")).to_have_count(1, timeout=WAIT_MS)
        assert fits(), "failed"
        page.get_by_role("tab", name="Live").click()
        assert fits(), "live"
        page.route("**/v1/models", lambda route: route.fulfill(status=401, json={"error": {}}))
        page.reload()
        expect(page.locator("#key-dialog")).to_be_visible()
        page.locator("#key-dialog input").first.fill("wrong")
        page.keyboard.press("Enter")
        expect(page.locator("#key-dialog")).to_contain_text("not accepted")
        assert fits(), "key"
        page.unroute("**/v1/models")
        page.route("**/health", lambda route: route.abort())
        page.reload()
        expect(page.locator("#server-state")).to_have_text("The server does not answer.")
        assert fits(), "gone"


def test_the_transcript_is_in_view_however_many_files_there_are(page: Page) -> None:
    page.route(STREAM, answered_with(" one two three", 60))
    for i in range(6):
        drop(page, f"{i}.flac", AUDIO)
    expect(page.locator("[data-state=done]")).to_have_count(6, timeout=WAIT_MS)
    page.get_by_role("button", name="5.flac").first.click()
    expect(page.locator(".segment").first).to_be_in_viewport()
    assert box(page.locator("#reader"))["y"] >= 56, "below the bar at the top"
    page.locator(".segment .time").first.focus()
    page.keyboard.press("End")
    expect(page.locator(".segment").last).to_be_in_viewport()
    expect(page.locator("#play")).to_be_in_viewport()
    page.get_by_role("button", name="4.flac").first.click()
    expect(page.locator(".segment").first).to_be_in_viewport()


def test_a_phone_leads_back_to_the_files_and_offers_no_dropping(browser: Browser, url: str) -> None:
    with opened(browser, url, expected=("status of 400",), **PHONE) as page:
        expect(page.get_by_text("Drop audio")).to_be_hidden()
        drop(page, "good.flac", AUDIO)
        expect(page.locator("[data-state=done]")).to_have_count(1, timeout=WAIT_MS)
        page.get_by_text("More options").click()
        page.get_by_label("Temperature").fill("7")
        drop(page, "bad.flac", AUDIO)
        expect(page.locator("#to-queue")).to_have_text("2 files, 1 failed", timeout=WAIT_MS)
        page.locator("#to-queue").click()
        expect(page.locator("#queue-title")).to_be_in_viewport()
        expect(page.locator("[data-state=failed]")).to_be_in_viewport()


@pytest.mark.parametrize("device", [WIDE, PHONE], ids=["wide", "phone"])
def test_stages_stand_on_a_line_each_and_say_why_they_sum_to_more(
    browser: Browser, url: str, device: dict[str, Any]
) -> None:
    with opened(browser, url, **device) as page:
        page.route(STREAM, answered_with(" one two", timing=f"{TIMING}dur=800"))
        drop(page, "one.flac", AUDIO)
        stages = page.locator(".legend li")
        expect(stages.nth(3)).to_have_text("Encode found", timeout=WAIT_MS)
        expect(stages.nth(4)).to_have_text("KV transfer 121 ms")
        expect(page.locator(".overlap")).to_have_text("Summed over windows that overlap.")
        assert {round(box(stage)["height"]) for stage in stages.all()} == {18}
        fits = "(all) => all.every((li) => li.scrollWidth <= li.clientWidth)"
        for width in (*range(1200, 1300, 20), 390) if device is WIDE else ():
            page.set_viewport_size({"width": width, "height": 800})
            assert stages.evaluate_all(fits), width
        assert stages.evaluate_all(fits)
        page.unroute(STREAM)
        page.route(STREAM, answered_with(" one two", timing=f"{TIMING}dur=9000"))
        page.locator("[data-state=done] .queue-buttons button").last.click()
        drop(page, "two.flac", AUDIO)
        expect(page.locator("#reader-title")).to_have_text("two.flac")
        expect(page.locator("[data-state=done]")).to_have_count(1)
        expect(page.locator(".overlap")).to_have_text("")


def test_a_toy_model_says_so_and_offers_a_sample(page: Page, transcriber: FakeTranscriber) -> None:
    expect(page.locator("#server-state")).to_have_text("Ready")
    expect(page.get_by_role("button", name="Try a sample")).to_be_hidden()
    models = [{"id": "real"}, {"id": "demo", "description": "Knows <b>553</b> words."}]
    page.route("**/v1/models", lambda route: route.fulfill(json={"data": models}))
    page.reload()
    for form in ("#options", "#live-options"):
        model = page.locator(f"{form} [name=model]")
        expect(model).to_have_value("real")
        expect(page.locator(f"{form} .about")).to_be_hidden()
        model.select_option("demo")
        expect(page.locator(f"{form} .about p")).to_have_text("Knows <b>553</b> words.")
        page.get_by_role("tab", name="Live").click()
    page.get_by_role("tab", name="Files").click()
    page.get_by_role("button", name="Try a sample").click()
    expect(page.locator("[data-state=done]")).to_contain_text("medium.flac", timeout=WAIT_MS)
    assert transcriber.uploads[-1] == sample_path("medium").read_bytes()
    assert transcriber.params[-1].model == "demo"


def test_pools_of_a_server_that_is_gone_are_not_shown(browser: Browser, url: str) -> None:
    with opened(browser, url, expected=("ERR_FAILED",)) as page:
        expect(page.locator(".pool")).to_have_count(2)
        page.route("**/health", lambda route: route.abort())
        expect(page.locator("#server-state")).to_have_text("The server does not answer.")
        expect(page.locator(".pool")).to_have_count(0)
        page.unroute("**/health")
        expect(page.locator(".pool")).to_have_count(2)
