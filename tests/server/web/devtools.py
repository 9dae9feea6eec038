"""A headless browser, driven through DevTools as a person would use it."""

import asyncio
import base64
import itertools
import json
import re
import subprocess
from pathlib import Path
from typing import Any, Self

import aiohttp

from tests.server.browser import headless

WAIT_S = 60
KEYS = {"Enter": 13, "Escape": 27, "Tab": 9, " ": 32, "ArrowLeft": 37, "ArrowRight": 39, "ArrowDown": 40}
MODIFIERS = {"ctrl": 2, "shift": 8}


class Tab:
    """One page, with its network requests and complaints recorded."""

    def __init__(self, profile: Path) -> None:
        self.command = [*headless(profile), "--remote-debugging-port=0", "about:blank"]
        self.requests: list[str] = []
        """Addresses that the page has requested."""
        self.complaints: list[str] = []
        """Exceptions, and requests that were refused or not found."""
        self._numbers = itertools.count(1)

    def __enter__(self) -> Self:
        self._process = subprocess.Popen(self.command, stderr=subprocess.PIPE, text=True)
        self._loop = asyncio.new_event_loop()
        self._run(self._connect())
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")
        return self

    def __exit__(self, *_: object) -> None:
        self._run(self._session.close())
        self._loop.close()
        self._process.terminate()
        self._process.communicate(timeout=WAIT_S)

    def call(self, method: str, **params: Any) -> Any:
        """Send a command and wait for its result."""
        return self._run(self._call(method, params))

    def open(self, url: str) -> None:
        """Open a page, and wait until it is ready."""
        self.call("Page.navigate", url=url)
        self.wait("document.body?.dataset.ready")

    def reload(self) -> None:
        """Reload the page, and wait until it is ready."""
        self.look("delete document.body.dataset.ready")
        self.call("Page.reload")
        self.wait("document.body?.dataset.ready")

    def forget(self) -> None:
        """Clear the storage of the current page, and leave it."""
        origin = self.look("location.origin")
        if origin != "null":
            # A page may still store something while it is left; navigation within its origin comes after
            # that.
            self.call("Page.navigate", url=f"{origin}/health")
            self.wait("document.readyState === 'complete' && !document.body?.dataset.ready")
            if self.look("location.origin") == origin:  # otherwise that server is gone
                self.look("localStorage.clear(), sessionStorage.clear()")
        self.call("Page.navigate", url="about:blank")
        self.wait("location.href === 'about:blank'")

    def look(self, expression: str) -> Any:
        """Return the value of an expression in the page."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def wait(self, expression: str) -> Any:
        """Wait until an expression is true."""

        async def come_true() -> Any:
            wanted = {"expression": expression, "returnByValue": True}
            while True:
                found = (await self._call("Runtime.evaluate", wanted))["result"].get("value")
                if found:
                    return found
                await asyncio.sleep(0.02)

        return self._run(come_true(), f"{expression} never came true")

    def press(self, key: str, *held: str) -> None:
        """Press a key while holding others."""
        modifiers = sum(MODIFIERS[own] for own in held)
        code = {"key": key, "windowsVirtualKeyCode": KEYS[key], "modifiers": modifiers}
        text = {"Enter": "\r", " ": " "}.get(key) if "ctrl" not in held else None
        self.call("Input.dispatchKeyEvent", type="keyDown", **code, **({"text": text} if text else {}))
        self.call("Input.dispatchKeyEvent", type="keyUp", **code)

    def write(self, element: str, text: str) -> None:
        """Replace an input's text."""
        self.look(f"(e => {{ e.focus(); e.select(); }})(document.getElementById({json.dumps(element)}))")
        self.call("Input.insertText", text=text)

    def click(self, element: str) -> None:
        """Click the middle of an element."""
        at = self.look(
            f"(e => {{ e.scrollIntoView({{block: 'center'}}); const r = e.getBoundingClientRect();"
            f" return [r.x + r.width / 2, r.y + r.height / 2]; }})(document.getElementById('{element}'))"
        )
        where = {"x": at[0], "y": at[1], "button": "left", "clickCount": 1}
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, **where)

    def show(self, width: int, height: int = 900, *, scheme: str = "light") -> None:
        """Set the page's size and the system's theme."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self.call("Emulation.setDeviceMetricsOverride", **size)
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.call("Emulation.setEmulatedMedia", features=features)

    def picture(self, path: Path) -> None:
        """Save a screenshot of the whole page."""
        shot = self.call("Page.captureScreenshot", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(shot["data"]))

    def _run(self, work: Any, late: str = "the browser does not answer") -> Any:
        async def bounded() -> Any:
            try:
                async with asyncio.timeout(WAIT_S):
                    return await work
            except TimeoutError:
                raise AssertionError(late) from None

        return self._loop.run_until_complete(bounded())

    async def _connect(self) -> None:
        assert self._process.stderr
        lines = iter(self._process.stderr.readline, "")
        port = next(found[1] for line in lines if (found := re.search(r"ws://[\d.]+:(\d+)/", line)))
        self._session = aiohttp.ClientSession()
        async with self._session.get(f"http://127.0.0.1:{port}/json/list") as answer:
            pages = [target for target in await answer.json() if target["type"] == "page"]
        self._socket = await self._session.ws_connect(pages[0]["webSocketDebuggerUrl"], max_msg_size=0)

    async def _call(self, method: str, params: dict[str, Any]) -> Any:
        number = next(self._numbers)
        await self._socket.send_json({"id": number, "method": method, "params": params})
        while True:
            message = await self._socket.receive_json()
            if message.get("id") == number:
                assert "error" not in message, (method, message["error"])
                return message["result"]
            self._note(message)

    def _note(self, message: dict[str, Any]) -> None:
        own = message.get("params", {})
        match message.get("method"):
            case "Network.requestWillBeSent":
                self.requests.append(own["request"]["url"])
            case "Runtime.exceptionThrown":
                self.complaints.append(str(own["exceptionDetails"]))
            case "Log.entryAdded":
                self.complaints.append(own["entry"]["text"])
