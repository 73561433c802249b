"""Headless Chromium: what a page holds after its scripts have run, and what the browser complained about."""

import re
import shutil
import subprocess

from support.helpers import HANG_S

PROGRAM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
FLAGS = "--headless --no-sandbox --disable-gpu --disable-dev-shm-usage --enable-logging=stderr --dump-dom"


def shown(path, script="", width=1280):
    """(the page as HTML, [message of its console]). `script` runs when the page has been loaded, in a copy of
    it whose policy allows that."""
    if script:
        text = re.sub(r"script-src '[^']+'", "script-src 'unsafe-inline'", path.read_text(encoding="utf-8"))
        script = f"<script>addEventListener('load', () => {{ {script} }})</script>"
        path = path.with_name("with_script.html")
        path.write_text(text.replace("</body>", f"{script}</body>"), encoding="utf-8")
    command = [PROGRAM, *FLAGS.split(), f"--user-data-dir={path.parent / 'chromium'}"]
    command += [f"--window-size={width},900", path.resolve().as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=HANG_S)
    return done.stdout, re.findall(r"CONSOLE.*?\] (.*)", done.stderr)
