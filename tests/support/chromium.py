"""Headless Chromium, driven through a pipe by the DevTools protocol, so that no other package is needed."""

import json
import os
import select
import shutil
import subprocess
import time

PROGRAM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
WAIT_S = 60


class Chromium:
    """A browser with one page. `problems`: what its console complained about, and requests of the network."""

    def __init__(self, folder):
        to_browser, self.writer = os.pipe()
        self.reader, from_browser = os.pipe()
        flags = "--headless --no-sandbox --disable-gpu --disable-dev-shm-usage --remote-debugging-pipe"
        # the browser reads commands from descriptor 3 and answers on descriptor 4; 10 and above are free
        command = f'exec "$0" {flags} --user-data-dir="$1" 3<&{to_browser} 4>&{from_browser}'
        self.process = subprocess.Popen(
            ["bash", "-c", command, PROGRAM, str(folder)],
            pass_fds=(to_browser, from_browser),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(to_browser)
        os.close(from_browser)
        self.buffer, self.number, self.session, self.problems, self.events = b"", 0, None, [], []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def close(self):
        self.process.kill()
        self.process.wait()
        os.close(self.writer)
        os.close(self.reader)

    def call(self, method, **params):
        self.number += 1
        message = {"id": self.number, "method": method, "params": params}
        if self.session:
            message["sessionId"] = self.session
        os.write(self.writer, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive()
            if answer.get("id") == self.number:
                assert "error" not in answer, (method, answer["error"])
                return answer["result"]

    def _receive(self):
        end = time.monotonic() + WAIT_S
        while b"\0" not in self.buffer:
            ready, _, _ = select.select([self.reader], [], [], max(0, end - time.monotonic()))
            assert ready, f"Chromium did not answer within {WAIT_S} s"
            received = os.read(self.reader, 1 << 20)
            assert received, f"Chromium ended with status {self.process.wait()}"
            self.buffer += received
        content, _, self.buffer = self.buffer.partition(b"\0")
        message = json.loads(content)
        self._note(message.get("method"), message.get("params", {}))
        return message

    def _note(self, method, params):
        self.events.append(method)
        if method == "Runtime.exceptionThrown":
            self.problems.append(params["exceptionDetails"]["text"])
        elif method == "Log.entryAdded":
            self.problems.append(params["entry"]["text"])
        elif method == "Runtime.consoleAPICalled":
            self.problems.append(str(params["args"]))
        elif method == "Page.javascriptDialogOpening":
            self.problems.append("a dialog: " + params["message"])
        elif method == "Network.requestWillBeSent" and not params["request"]["url"].startswith("file:"):
            self.problems.append("a request: " + params["request"]["url"])

    def open(self, path, width=1280):
        """Shows the file in a window of this width."""
        size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 600}
        self.call("Emulation.setDeviceMetricsOverride", **size)
        self.events.clear()
        self.call("Page.navigate", url=path.resolve().as_uri())
        while "Page.loadEventFired" not in self.events:
            self._receive()

    def value(self, expression):
        """Of a JavaScript expression."""
        return self.call("Runtime.evaluate", expression=expression, returnByValue=True)["result"].get("value")

    def point_at(self, selector, share):
        """Moves the pointer into an element, to this share of its width."""
        box = self.value(
            f"(e => {{ e.scrollIntoView({{block: 'center'}}); const b = e.getBoundingClientRect();"
            f" return [b.left, b.top, b.width, b.height] }})(document.querySelector('{selector}'))"
        )
        x, y = box[0] + share * box[2], box[1] + box[3] / 2
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)
