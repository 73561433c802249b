"""Starts the process that sends the run record to experiment trackers (tools/track.py), so that nothing that
a tracker does can hold up or end the run. Rank 0 only."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from training.configuration.keys import ROOT

log = logging.getLogger("nanomfu")

WAIT_S = 20.0  # for the last figures, at the end of a run; torchrun kills 30 s after a SIGTERM


class Follower:
    def __init__(self, names: list[str], record: Path):
        self.output = record.parent / "trackers.log"
        command = ["-m", "tools.track", str(record.resolve()), f"--trackers={','.join(names)}"]
        self.command = f"python {' '.join(command)}"
        with open(self.output, "ab") as output:
            streams: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": output, "stderr": output}
            # a session of its own: Ctrl-C in a terminal must not end it before the run
            command = [sys.executable, *command, f"--follow={os.getpid()}"]
            self.process = subprocess.Popen(command, cwd=ROOT, **streams, start_new_session=True)

    def wait(self) -> None:
        """After the record is complete. Warns if the trackers do not have everything."""
        try:
            status = self.process.wait(WAIT_S)
        except subprocess.TimeoutExpired:
            log.info(f"Trackers: still sending; {self.output} says how it ends")
            return
        if status:
            log.warning(f"a tracker lacks figures of this run; {self.output} says why. Then: {self.command}")
