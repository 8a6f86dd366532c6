"""A headless Chromium for tests, spoken to over a pipe in its DevTools protocol: no driver, no port, no package."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Any

FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
    "--disable-background-networking", "--disable-component-update", "--disable-dev-shm-usage", "--hide-scrollbars",
    "--remote-debugging-pipe",
)  # fmt: skip


def find() -> str | None:
    """The browser's path, or None: scripts/install-chromium.sh installs one. PFEDGATE_CHROMIUM goes before."""
    names = (os.environ.get("PFEDGATE_CHROMIUM") or "", "chromium", "chromium-browser", "google-chrome")
    return next((path for name in names if name and (path := shutil.which(name))), None)


def centre(browser: Browser, selector: str) -> tuple[float, float]:
    """Scroll to the first element of a selector; where its middle is then."""
    # Scrolling hides a tooltip: let the frame that tells of it pass before the mouse moves.
    script = f"""(async () => {{
        const node = document.querySelector({selector!r});
        node.scrollIntoView({{block: "center", behavior: "instant"}});
        for (let frame = 0; frame < 2; frame++) await new Promise(requestAnimationFrame);
        const box = node.getBoundingClientRect();
        return [box.left + box.width / 2, box.top + box.height / 2];
    }})()"""
    x, y = browser.run(script)
    return x, y


class Browser:
    """One page; everything it says on the console and everything it asks of a network is kept."""

    def __init__(self, path: str) -> None:
        self._profile = tempfile.mkdtemp(prefix="pfedgate-chromium-")
        down, self._write = os.pipe()
        self._read, up = os.pipe()

        def plumb() -> None:  # the protocol wants file descriptors 3 (in) and 4 (out)
            a, b = os.dup(down), os.dup(up)
            os.dup2(a, 3)
            os.dup2(b, 4)

        self._process = subprocess.Popen(
            [path, *FLAGS, f"--user-data-dir={self._profile}", "about:blank"],
            preexec_fn=plumb,
            close_fds=False,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(down)
        os.close(up)
        self._buffer, self._number = b"", 0
        self.console: list[str] = []
        self.requests: list[str] = []
        target = self._ask("Target.createTarget", {"url": "about:blank"})["targetId"]
        attached = self._ask("Target.attachToTarget", {"targetId": target, "flatten": True})
        self._session: str | None = attached["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self._ask(f"{domain}.enable")

    def __enter__(self) -> Browser:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.terminate()
        self._process.wait(20)
        os.close(self._write)
        os.close(self._read)
        shutil.rmtree(self._profile, ignore_errors=True)

    # -- what a test does
    def open(
        self,
        path: Path,
        *,
        width: int = 1280,
        height: int = 900,
        theme: str = "light",
        ready: str = "document.documentElement?.dataset.ready === 'true'",
    ) -> None:
        self.console.clear()
        self.requests.clear()
        self.resize(width, height, theme)
        self._ask("Page.navigate", {"url": path.resolve().as_uri()})
        self.wait(ready)

    def resize(self, width: int, height: int, theme: str) -> None:
        phone = width < 600
        screen = {"width": width, "height": height, "deviceScaleFactor": 2 if phone else 1, "mobile": phone}
        self._ask("Emulation.setDeviceMetricsOverride", screen)
        self._ask("Emulation.setTouchEmulationEnabled", {"enabled": phone})
        self._ask("Emulation.setEmulatedMedia", {"features": [{"name": "prefers-color-scheme", "value": theme}]})

    def run(self, script: str) -> Any:
        asked = {"expression": script, "returnByValue": True, "awaitPromise": True, "userGesture": True}
        answer = self._ask("Runtime.evaluate", asked)
        if "exceptionDetails" in answer:
            raise AssertionError(answer["exceptionDetails"]["exception"].get("description", str(answer)))
        return answer["result"].get("value")

    def wait(self, condition: str, seconds: float = 20) -> None:
        until = time.monotonic() + seconds
        while not self.run(condition):
            assert time.monotonic() < until, f"waited in vain for: {condition}; console: {self.console}"
            time.sleep(0.05)

    def move(self, x: float, y: float) -> None:
        self._ask("Input.dispatchMouseEvent", {"type": "mouseMoved", "x": x, "y": y})

    def click(self, x: float, y: float) -> None:
        for kind in ("mousePressed", "mouseReleased"):
            event = {"type": kind, "x": x, "y": y, "button": "left", "clickCount": 1}
            self._ask("Input.dispatchMouseEvent", event)

    def touch(self, x: float, y: float) -> None:
        """A finger comes down and is lifted again."""
        self._ask("Input.dispatchTouchEvent", {"type": "touchStart", "touchPoints": [{"x": x, "y": y}]})
        self._ask("Input.dispatchTouchEvent", {"type": "touchEnd", "touchPoints": []})

    def screenshot(self, path: Path, *, whole: bool = True) -> None:
        # The compositor of a page that is only as high as the window loses what lies below.
        if whole:
            size = self._ask("Page.getLayoutMetrics")["cssContentSize"]
            clip = {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}
            asked: dict[str, Any] = {"captureBeyondViewport": True, "clip": clip}
        else:
            asked = {}
        picture = self._ask("Page.captureScreenshot", {"format": "png", **asked})
        path.write_bytes(base64.b64decode(picture["data"]))

    # -- the protocol: JSON messages that end with a zero byte
    def _ask(self, method: str, params: dict[str, Any] | None = None) -> dict[str, Any]:
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": params or {}}
        if getattr(self, "_session", None):
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive()
            if answer.get("id") == self._number:
                assert "error" not in answer, f"{method}: {answer['error']}"
                result: dict[str, Any] = answer["result"]
                return result
            self._hear(answer)

    def _receive(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            chunk = os.read(self._read, 1 << 20)
            if not chunk:
                raise RuntimeError("the browser has gone")
            self._buffer += chunk
        first, _, self._buffer = self._buffer.partition(b"\0")
        found: dict[str, Any] = json.loads(first)
        return found

    def _hear(self, event: dict[str, Any]) -> None:
        method, told = event.get("method", ""), event.get("params", {})
        if method == "Runtime.consoleAPICalled":
            words = " ".join(str(arg.get("value", arg.get("description"))) for arg in told["args"])
            self.console.append(f"{told['type']}: {words}")
        elif method == "Runtime.exceptionThrown":
            details = told["exceptionDetails"]
            self.console.append(details.get("exception", {}).get("description", details["text"]))
        elif method == "Log.entryAdded":
            self.console.append(f"{told['entry']['level']}: {told['entry']['text']}")
        elif method == "Network.requestWillBeSent":
            self.requests.append(told["request"]["url"])
