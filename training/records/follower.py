"""Starts the process that sends the run record to experiment trackers (tools/track), so that nothing that a
tracker does can hold up or end the run. Rank 0 only."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from training.configuration.keys import GUARDED, ROOT
from training.process.redaction import redact_all

log = logging.getLogger("nanomfu")

WAIT_S = 20.0  # for the last figures, at the end of a run; torchrun kills 30 s after a SIGTERM


class Follower:
    def __init__(self, names: list[str], record: Path, new_run: bool):
        self.output = record.parent / "trackers.log"
        command = ["-m", "tools.track", str(record.resolve()), f"--trackers={','.join(names)}"]
        self.command = f"python {' '.join(command)}"
        command += [f"--follow={os.getpid()}", *["--new_run"] * new_run]
        with open(self.output, "ab") as output:
            streams: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": output, "stderr": output}
            # a session of its own: Ctrl-C in a terminal must not end it before the run
            command = [sys.executable, *command]
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


def makes_other_rows(history: dict[str, Any] | None, config: dict[str, Any], start: int) -> bool:
    """Whether an attempt from iteration `start` on makes iterations again that the one before has made with
    other settings: the trackers, which would go on showing the old losses, get a new run then. `history` is
    the record of that one."""
    if history is None or not any(row["iter"] >= start for row in history["training_iterations"]):
        return False
    before, now = history.get("config"), redact_all(config)
    return not isinstance(before, dict) or any(before.get(key) != now.get(key) for key in GUARDED)
