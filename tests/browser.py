"""A headless Chromium, spoken to by its DevTools protocol."""

from __future__ import annotations

import asyncio
import itertools
import shutil
import subprocess
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import aiohttp
import numpy as np
import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")

needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium here")


class Browser:
    """One page of a browser of its own."""

    def __init__(self, profile: Path) -> None:
        assert CHROMIUM
        self._loop = asyncio.new_event_loop()
        self._numbers = itertools.count(1)
        self.events: list[dict[str, Any]] = []
        self._process = subprocess.Popen(
            [
                CHROMIUM,
                "--headless",
                "--no-sandbox",
                "--disable-gpu",
                "--disable-dev-shm-usage",
                "--disable-background-networking",
                "--disable-component-update",
                "--no-first-run",
                "--remote-debugging-port=0",
                f"--user-data-dir={profile}",
                "about:blank",
            ],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        self._loop.run_until_complete(self._connect(profile / "DevToolsActivePort"))
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    async def _connect(self, port_file: Path) -> None:
        end = time.monotonic() + 60
        while not (port_file.exists() and port_file.read_text().count("\n") == 1):
            assert self._process.poll() is None, "Chromium did not start"
            assert time.monotonic() < end, "Chromium does not answer"
            await asyncio.sleep(0.05)
        port = port_file.read_text().split()[0]
        self._session = aiohttp.ClientSession()
        async with self._session.get(f"http://127.0.0.1:{port}/json/list") as answer:
            pages = [target for target in await answer.json() if target["type"] == "page"]
        self._socket = await self._session.ws_connect(
            pages[0]["webSocketDebuggerUrl"], max_msg_size=0
        )

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Call a method of the protocol; events that come meanwhile are kept."""
        return self._loop.run_until_complete(self._call(method, parameters))

    async def _call(self, method: str, parameters: dict[str, Any]) -> dict[str, Any]:
        number = next(self._numbers)
        await self._socket.send_json({"id": number, "method": method, "params": parameters})
        while True:
            message = await self._socket.receive_json(timeout=60)
            if message.get("id") == number:
                assert "error" not in message, message
                answer: dict[str, Any] = message["result"]
                return answer
            self.events.append(message)

    def open(self, page: Path | str, width: int = 1280, scheme: str = "light") -> None:
        """Open a page from a file or an address, and wait until it is loaded."""
        self.call("Emulation.setEmulatedMedia", features=[
            {"name": "prefers-color-scheme", "value": scheme}
        ])  # fmt: skip
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width, height=844, deviceScaleFactor=1, mobile=width < 600,
        )  # fmt: skip
        self.events.clear()
        self.call("Page.navigate", url=page if isinstance(page, str) else page.absolute().as_uri())
        self.run(
            "document.readyState == 'complete' || new Promise((r) => addEventListener('load', r))"
        )

    def run(self, script: str) -> Any:
        """The value of an expression on the page."""
        answer = self.call(
            "Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    @property
    def complaints(self) -> list[dict[str, Any]]:
        """What it has said of the page."""
        kinds = ("Log.entryAdded", "Runtime.exceptionThrown", "Runtime.consoleAPICalled")
        return [event for event in self.events if event["method"] in kinds]

    def press(self, key: str, code: int) -> None:
        """Press a key."""
        text = {"Enter": "\r"}.get(key)
        for kind in ("keyDown", "keyUp"):
            more = {"text": text} if text and kind == "keyDown" else {}
            self.call(
                "Input.dispatchKeyEvent", type=kind, key=key, windowsVirtualKeyCode=code, **more
            )

    def drag(self, begin: tuple[float, float], end: tuple[float, float]) -> None:
        """Drag with the mouse from one place of the page to another, in steps."""
        path = [(1 - k / 4) * np.array(begin) + k / 4 * np.array(end) for k in range(5)]
        self._mouse("mousePressed", path[0])
        for place in path:
            self._mouse("mouseMoved", place)
        self._mouse("mouseReleased", path[-1])

    def _mouse(self, kind: str, place: Any) -> None:
        x, y = map(float, place)
        about = {"button": "left", "buttons": 1, "clickCount": 1}
        self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, **about)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self._loop.run_until_complete(self._socket.close())
        self._loop.run_until_complete(self._session.close())
        self._loop.close()
        self._process.terminate()
        self._process.wait(30)
