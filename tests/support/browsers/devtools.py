"""A headless Chromium, driven by its DevTools protocol: open, wait for words, take a picture."""

from __future__ import annotations

import asyncio
import base64
import itertools
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp

FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
    "--remote-debugging-port=0",
)
START_S = 60.0
POLL_S = 0.2


class Page:
    """One tab."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._ids = itertools.count(1)

    async def call(self, method: str, **params: Any) -> dict[str, Any]:
        """One command of the protocol; events in between are passed over."""
        number = next(self._ids)
        await self._socket.send_json({"id": number, "method": method, "params": params})
        while True:
            answer = await self._socket.receive_json()
            if answer.get("id") == number:
                assert "error" not in answer, answer
                result: dict[str, Any] = answer["result"]
                return result

    async def text(self) -> str:
        found = await self.call("Runtime.evaluate", expression="document.body.innerText")
        return str(found["result"].get("value", ""))

    async def show(self, url: str, *words: str, timeout_s: float = 60.0) -> None:
        """Open `url` and wait until all `words` are on it.

        Raises:
            AssertionError: with what was there instead.
        """
        await self.call("Page.navigate", url="about:blank")
        await self.call("Page.navigate", url=url)
        deadline = asyncio.get_running_loop().time() + timeout_s
        while missing := [word for word in words if word not in await self.text()]:
            assert asyncio.get_running_loop().time() < deadline, (missing, await self.text())
            await asyncio.sleep(POLL_S)

    async def run(self, script: str) -> None:
        """Run JavaScript on the page."""
        await self.call("Runtime.evaluate", expression=script)

    async def picture(self) -> bytes:
        """A PNG of what is seen."""
        await asyncio.sleep(1.0)  # for what fades in
        taken = await self.call("Page.captureScreenshot", format="png", optimizeForSpeed=False)
        return base64.b64decode(taken["data"])


@asynccontextmanager
async def open_page(
    chromium: str, profile: Path, headers: dict[str, str], size: tuple[int, int] = (1800, 1150)
) -> AsyncIterator[Page]:
    """A tab of a new Chromium that sends `headers` with each request."""
    process = await asyncio.create_subprocess_exec(
        chromium,
        *FLAGS,
        f"--user-data-dir={profile}",
        f"--window-size={size[0]},{size[1]}",
        "about:blank",
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        assert process.stderr is not None
        port = ""
        async with asyncio.timeout(START_S):
            while not port:
                line = await process.stderr.readline()
                assert line, "chromium ended at its start"
                if found := re.search(rb"listening on ws://127.0.0.1:(\d+)/", line):
                    port = found[1].decode()
        draining = asyncio.ensure_future(process.stderr.read())
        async with aiohttp.ClientSession() as session:
            async with session.get(f"http://127.0.0.1:{port}/json/list") as answer:
                targets = await answer.json()
            (tab,) = [target for target in targets if target["type"] == "page"]
            async with session.ws_connect(
                tab["webSocketDebuggerUrl"], max_msg_size=1 << 28
            ) as socket:
                page = Page(socket)
                await page.call("Network.enable")
                await page.call("Network.setExtraHTTPHeaders", headers=headers)
                yield page
        draining.cancel()
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()
