"""How the page at `/` looks. PAGE_IMAGES=configs/images makes the shipped pictures anew."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, expect

from cluster.demo.samples import sample_path
from cluster.serve.distribution import package_root
from tests.e2e.conftest import Server
from tests.support.audio.recordings import delayed
from tests.support.browsers.page import drop, opened, shifts, violations, watch_shifts, webp
from tests.support.browsers.transcribing import WAIT_MS, answered_with, transcribe
from tests.support.programs import needs

pytestmark = [pytest.mark.slow, needs("chromium", "npm")]
IMAGES = package_root() / "configs/images"
PICTURES = {"page.webp": "light", "page-dark.webp": "dark"}
MAX_IMAGES_BYTES = 150_000


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


def test_no_ring_of_the_keyboards_focus_covers_letters(page: Page) -> None:
    """Of what Tab reaches: the ring's inner edge is at `outline-offset` from the element's."""
    transcribe(page, "short")
    covered = """() => {
        const ringed = document.activeElement, style = getComputedStyle(ringed);
        const offset = parseFloat(style.outlineOffset), box = ringed.getBoundingClientRect();
        const letters = document.createRange();
        letters.selectNodeContents(ringed);
        const covers = style.outlineStyle !== "none" && [...letters.getClientRects()].some((own) =>
            own.left < box.left - offset || own.right > box.right + offset ||
            own.top < box.top - offset || own.bottom > box.bottom + offset);
        return covers ? ringed.outerHTML.slice(0, 200) : "";
    }"""
    found = set()
    for _ in range(60):
        page.keyboard.press("Tab")
        found.add(page.evaluate(covered))
    assert found == {""}


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


def transcribe_new(page: Page, n_samples: int, *names: str) -> None:
    for i, name in enumerate(names, 1):
        audio = delayed(name, n_samples)
        file: Any = {"name": f"{name}.wav", "mimeType": "audio/wav", "buffer": audio}
        page.set_input_files("#file-input", file)
        expect(page.locator("[data-state=done]")).to_have_count(i, timeout=WAIT_MS)
    page.locator(".queue-open").first.click()


def test_the_pictures_that_are_shown_are_of_this_page(
    browser: Browser, server: Server, tmp_path: Path
) -> None:
    folder = Path(os.environ.get("PAGE_IMAGES", tmp_path))
    sizes = 0
    for i, (name, scheme) in enumerate(PICTURES.items()):
        size = {"width": 1240, "height": 780}
        with opened(browser, server.url, color_scheme=scheme, viewport=size) as page:
            transcribe_new(page, 800, "medium")  # a server's first requests are slower
            page.reload()
            transcribe_new(page, 1600 + 160 * i, "long", "medium", "short")
            page.locator(".word").nth(28).click()
            page.mouse.move(0, 0)
            picture = webp(page.screenshot())
            (folder / name).write_bytes(picture)
            sizes += len(picture)
            shown = (IMAGES / name).read_bytes()
            assert shown[8:12] == b"WEBP"
    assert sizes < MAX_IMAGES_BYTES
