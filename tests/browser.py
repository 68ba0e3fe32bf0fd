"""A headless Chromium, controlled through pipes with the DevTools protocol, for tests of HTML pages."""

import base64
import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


def find() -> str | None:
    """Path of a Chromium; None if there is none."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Tab:
    """One tab, with the errors and requests of its page."""

    def __init__(self, to: int, back: int) -> None:
        self._to, self._back = to, back
        self._number = 0
        self._buffer = b""
        self._session: str | None = None
        self.errors: list[str] = []
        self.requests: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Sends a command and returns its result; handles the events that arrive before it."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == self._number:
                assert "error" not in answer, (method, answer["error"])
                return answer["result"]

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            data = os.read(self._back, 1 << 20)
            assert data, "Chromium has exited"
            self._buffer += data
        line, _, self._buffer = self._buffer.partition(b"\0")
        answer = json.loads(line)
        kind, event = answer.get("method"), answer.get("params", {})
        if kind == "Runtime.exceptionThrown":
            self.errors.append(json.dumps(event["exceptionDetails"])[:2000])
        elif kind == "Log.entryAdded" and event["entry"]["level"] == "error":
            self.errors.append(event["entry"]["text"])
        elif kind == "Network.requestWillBeSent":
            self.requests.append(event["request"]["url"])
        return answer

    def open(self, path: Path, *, width: int, height: int = 900, dark: bool = False, mobile: bool = False) -> None:
        """Loads a file and waits until its charts are drawn."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=mobile)
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.call("Emulation.setEmulatedMedia", features=scheme)
        self.call("Page.navigate", url=path.resolve().as_uri())
        self.value(
            """new Promise((done, failed) => {
                 const look = () => document.readyState === "complete" &&
                   (!document.getElementById("charts") || document.documentElement.dataset.charts) ? done(true)
                   : performance.now() > 20000 ? failed(new Error("no charts after 20 s")) : setTimeout(look, 20);
                 look(); })"""
        )

    def value(self, script: str) -> Any:
        """The value of an expression or a promise."""
        answer = self.call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def screenshot(self, path: Path, *, whole: bool = False, clip: dict[str, float] | None = None) -> None:
        """whole: the full page; clip: x, y, width, height of a part of the page."""
        more: dict[str, Any] = {} if clip is None else {"clip": {**clip, "scale": 1}}
        answer = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole, **more)
        path.write_bytes(base64.b64decode(answer["data"]))


@contextlib.contextmanager
def browser() -> Iterator[Tab]:
    """A tab of a new Chromium with an empty profile."""
    program = find()
    assert program is not None
    to_read, to = os.pipe()
    back, back_write = os.pipe()
    with tempfile.TemporaryDirectory(
        ignore_cleanup_errors=True
    ) as profile:  # its child processes may still write to it
        # Chromium expects the pipes as descriptors 3 and 4; duplicating to 50 and above avoids overwriting one of them
        ends = (
            "import fcntl, os, sys; a, b = (fcntl.fcntl(int(n), fcntl.F_DUPFD, 50) for n in sys.argv[1:3]); "
            "os.dup2(a, 3); os.dup2(b, 4); os.execv(sys.argv[3], sys.argv[3:])"
        )
        switches = [
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--hide-scrollbars",
            "--no-first-run",
            "--disable-background-networking",
            f"--user-data-dir={profile}",
            "--remote-debugging-pipe",
        ]
        command = [sys.executable, "-S", "-c", ends, str(to_read), str(back_write), program, *switches, "about:blank"]
        process = subprocess.Popen(
            command, pass_fds=(to_read, back_write), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        os.close(to_read)
        os.close(back_write)
        try:
            yield Tab(to, back)
        finally:
            os.close(to)
            os.close(back)
            process.terminate()
            process.wait(10)
