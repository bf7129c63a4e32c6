"""Debian's Chromium, by Playwright, with a microphone that plays a recording again and again."""

from __future__ import annotations

import io
import json
from base64 import b64encode
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import av
from playwright.sync_api import Browser, BrowserContext, Locator, Page, sync_playwright

from tests.support.programs import require

ELSEWHERE = "splitscribe.test"  # a name of this machine that is not a secure context
FLAGS = (
    "--no-sandbox",
    "--disable-gpu",
    "--hide-scrollbars",
    "--use-fake-device-for-media-stream",
    f"--host-resolver-rules=MAP {ELSEWHERE} 127.0.0.1",
)
DROP = """([name, type, content]) => {
    const bytes = Uint8Array.from(atob(content), (char) => char.charCodeAt(0));
    const carried = new DataTransfer();
    carried.items.add(new File([bytes], name, { type }));
    for (const kind of ["dragenter", "dragover", "drop"]) {
        const how = { dataTransfer: carried, bubbles: true, cancelable: true };
        document.querySelector("#drop").dispatchEvent(new DragEvent(kind, how));
    }
}"""
WATCH_SHIFTS = """() => {
    window.shifts = [];
    new PerformanceObserver((list) => list.getEntries().forEach((entry) => window.shifts.push({
        value: entry.value,
        of: entry.sources.map(({ node }) => node?.id || node?.className || node?.nodeName),
    }))).observe({ type: "layout-shift" });
}"""


@contextmanager
def running_browser(spoken: Path | None = None) -> Iterator[Browser]:
    flags = [*FLAGS, *([f"--use-file-for-fake-audio-capture={spoken}"] if spoken else [])]
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=require("chromium"), args=flags)
        try:
            yield browser
        finally:
            browser.close()


@contextmanager
def opened(browser: Browser, url: str, **options: Any) -> Iterator[Page]:
    """Open a tab in a new profile; errors on its console fail the test.

    expected: parts of messages that may come.
    """
    expected = options.pop("expected", ())
    microphone = options.pop("microphone", True)
    settings = {"viewport": {"width": 1280, "height": 800}, "reduced_motion": "reduce"}
    context: BrowserContext = browser.new_context(**{**settings, **options})
    if microphone:
        context.grant_permissions(["microphone"], origin=url)
    page = context.new_page()
    page.set_default_timeout(60_000)
    wrong: list[str] = []
    page.on("console", lambda said: wrong.append(said.text) if said.type == "error" else None)
    page.on("pageerror", lambda error: wrong.append(str(error)))
    try:
        page.goto(url)
        yield page
        assert not [text for text in wrong if not any(part in text for part in expected)], wrong
    finally:
        context.close()


def drop(page: Page, name: str, content: bytes, kind: str = "audio/flac") -> None:
    page.evaluate(DROP, [name, kind, b64encode(content).decode()])


def violations(page: Page, axe: Path) -> list[str]:
    page.evaluate(axe.read_text())
    found = page.evaluate("axe.run(document, { resultTypes: ['violations'] })")
    return [
        json.dumps([one["id"], one["help"], [node["html"][:160] for node in one["nodes"][:3]]])
        for one in found["violations"]
        if one["impact"] in ("serious", "critical")
    ]


def watch_shifts(page: Page) -> None:
    page.evaluate(WATCH_SHIFTS)


def shifts(page: Page) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = page.evaluate("window.shifts")
    return found


def webp(png: bytes) -> bytes:
    with av.open(io.BytesIO(png)) as source:
        frame = next(source.decode(video=0))
    written = io.BytesIO()
    with av.open(written, "w", format="webp") as target:
        stream = target.add_stream("libwebp", options={"lossless": "1"})
        stream.width, stream.height, stream.pix_fmt = frame.width, frame.height, "bgra"
        target.mux(stream.encode(frame.reformat(format="bgra")))
        target.mux(stream.encode(None))
    return written.getvalue()


def text_of(place: Locator) -> str:
    return " ".join(" ".join(text.split()) for text in place.all_inner_texts())
