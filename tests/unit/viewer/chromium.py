"""A headless Chromium that is spoken to through two pipes (`--remote-debugging-pipe`), for the test of a page."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

EXECUTABLE = shutil.which("chromium") or shutil.which("google-chrome")
MODIFIERS = {"?": 8}


class Browser:
    """One tab. What its pages complain about and what they ask the network for is kept."""

    def __init__(self, to_browser: int, from_browser: int) -> None:
        self._out, self._in, self._last = to_browser, os.fdopen(from_browser, "rb"), 0
        self._session: str | None = None
        self.complaints: list[str] = []
        self.requests: list[str] = []
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.send(f"{domain}.enable")

    def send(self, method: str, **parameters: Any) -> Any:
        """Call a method of the DevTools protocol and wait for its result."""
        self._last += 1
        session = {"sessionId": self._session} if self._session else {}
        message = {"id": self._last, "method": method, "params": parameters, **session}
        os.write(self._out, json.dumps(message).encode() + b"\0")
        answer = next(each for each in self._messages() if each.get("id") == self._last)
        assert "error" not in answer, answer
        return answer["result"]

    def open(self, page: Path, fragment: str = "", size: tuple[int, int] = (1280, 800)) -> None:
        metrics = {"width": size[0], "height": size[1], "deviceScaleFactor": 1, "mobile": False}
        self.send("Emulation.setDeviceMetricsOverride", **metrics)
        self.send("Page.navigate", url="about:blank")  # or a new fragment alone would not load the page anew
        self.send("Page.navigate", url=page.resolve().as_uri() + (f"#{fragment}" if fragment else ""))
        next(each for each in self._messages() if each.get("method") == "Page.domContentEventFired")
        while self.run("document.readyState") != "complete":
            pass

    def run(self, expression: str) -> Any:
        """The value of a JavaScript expression, which may be a promise."""
        answer = self.send("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def press(self, *keys: str) -> None:
        """Press keys by their names in JavaScript, and wait until the page has dealt with the last."""
        for key in keys:
            text = {"text": "\r" if key == "Enter" else key} if len(key) == 1 or key == "Enter" else {}
            stroke = {"key": key, "modifiers": MODIFIERS.get(key, 0), **_code(key)}
            self.send("Input.dispatchKeyEvent", type="keyDown", **stroke, **text)
            self.send("Input.dispatchKeyEvent", type="keyUp", **stroke)
            self.run("new Promise((done) => requestAnimationFrame(() => setTimeout(done)))")

    def screenshot(self, file: Path) -> None:
        file.write_bytes(base64.b64decode(self.send("Page.captureScreenshot")["data"]))

    def prefer(self, scheme: str) -> None:
        """`light` or `dark`."""
        self.send("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    def _messages(self) -> Iterator[dict[str, Any]]:
        while True:
            message = json.loads(self._read())
            self._note(message)
            yield message

    def _read(self) -> bytes:
        message = bytearray()
        while (character := self._in.read(1)) != b"\0":
            assert character, "the browser has closed its pipe"
            message += character
        return bytes(message)

    def _note(self, message: dict[str, Any]) -> None:
        parameters = message.get("params", {})
        if message.get("method") == "Log.entryAdded":
            self.complaints.append(parameters["entry"]["text"])
        elif message.get("method") == "Runtime.exceptionThrown":
            self.complaints.append(json.dumps(parameters["exceptionDetails"]))
        elif message.get("method") == "Network.requestWillBeSent":
            self.requests.append(parameters["request"]["url"])


def _code(key: str) -> dict[str, int]:
    """What the browser's own behaviour goes by, where it has one for the key."""
    codes = {"Tab": 9, "Enter": 13, "Escape": 27, "ArrowLeft": 37, "ArrowUp": 38, "ArrowRight": 39, "ArrowDown": 40}
    return {"windowsVirtualKeyCode": codes[key]} if key in codes else {}


@contextmanager
def browser(profile: Path) -> Iterator[Browser]:
    """A browser with a profile of its own, which must be an empty folder; it ends with the context."""
    assert EXECUTABLE is not None
    (read_commands, write_commands), (read_answers, write_answers) = os.pipe(), os.pipe()
    # It takes commands from descriptor 3 and answers on 4: a shell puts ours there.
    plumbing = f'exec "$0" "$@" 3<&{read_commands} 4>&{write_answers}'
    arguments = [
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--remote-debugging-pipe",
        f"--user-data-dir={profile}",
    ]
    process = subprocess.Popen(
        ["bash", "-c", plumbing, EXECUTABLE, *arguments, "--no-first-run", "--disable-background-networking"],
        pass_fds=(read_commands, write_answers),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    os.close(read_commands)
    os.close(write_answers)
    try:
        tab = Browser(write_commands, read_answers)
        yield tab
        tab._session = None
        tab.send("Browser.close")
    finally:
        os.close(write_commands)
        process.terminate()
        process.wait(timeout=30)
