"""Control Chromium through its debugging pipe: JSON messages that end with a zero byte, on descriptors 3 and 4."""

import base64
import json
import os
import shutil
import subprocess
import time
from pathlib import Path

NAMES = ("chromium", "chromium-browser", "google-chrome")
CHROMIUM = next(filter(None, map(shutil.which, NAMES)), None)
FLAGS = ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--remote-debugging-pipe")


class Browser:
    """One page in a new headless Chromium."""

    def __init__(self, profile: Path, size: tuple[int, int] = (900, 700)):
        assert CHROMIUM
        out, self._in = os.pipe()
        self._out, given = os.pipe()
        self._process = subprocess.Popen(
            ["bash", "-c", f'exec "$0" "$@" 3<&{out} 4>&{given}', CHROMIUM, *FLAGS, f"--user-data-dir={profile}",
             f"--window-size={size[0]},{size[1]}"],
            pass_fds=(out, given), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        os.close(out)
        os.close(given)
        self._rest, self._last, self._session = b"", 0, {}
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        session = self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        self._session = {"sessionId": session}

    def send(self, method: str, **params):
        """Call a method of the DevTools protocol and return its result."""
        self._last += 1
        message = {"id": self._last, "method": method, "params": params, **self._session}
        os.write(self._in, json.dumps(message).encode() + b"\0")
        while (answer := self._next()).get("id") != self._last:
            pass
        assert "error" not in answer, answer
        return answer["result"]

    def _next(self):
        while b"\0" not in self._rest:
            piece = os.read(self._out, 1 << 16)
            assert piece, "the browser has ended"
            self._rest += piece
        message, _, self._rest = self._rest.partition(b"\0")
        return json.loads(message)

    def run(self, script: str):
        """Evaluate JavaScript and return its value."""
        result = self.send("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def wait(self, condition: str, seconds: float = 20):
        """Wait until an expression is true."""
        until = time.monotonic() + seconds
        while not self.run(f"!!({condition})"):
            assert time.monotonic() < until, f"{condition}: {self.run('document.body.innerText')[-300:]}"
            time.sleep(0.05)

    def picture(self) -> bytes:
        return base64.b64decode(self.send("Page.captureScreenshot")["data"])

    def close(self):
        self._process.kill()
        self._process.wait()
        os.close(self._in)
        os.close(self._out)
