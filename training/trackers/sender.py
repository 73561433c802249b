"""Sends entries of the run record to trackers, in a thread for each, so that no tracker can hold up a run.

The loop puts an entry into a queue and goes on. What fails, hangs or does not keep up gets nothing more in
this process: one warning says so, and how to send the rest. Everything is in the record, so nothing is lost.

Everything of one iteration is sent at once, when the first entry of a later one comes. So a tracker has all
figures of an iteration or none, and the last step that it has says where to go on after a kill.
"""

from __future__ import annotations

import logging
import math
import queue
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from training.trackers.figures import figures_of, is_count, step_of
from training.trackers.identity import tracked_run
from training.trackers.tensorboard_tracker import TensorBoardTracker
from training.trackers.tracker import NOTHING, TrackedRun, Tracker
from training.trackers.trackio_tracker import TrackioTracker
from training.trackers.wandb_tracker import WandbTracker

TRACKERS: dict[str, Callable[[], Tracker]] = {
    "wandb": WandbTracker,
    "tensorboard": TensorBoardTracker,
    "trackio": TrackioTracker,
}
SECTIONS = ("training_iterations", "eval_steps", "checkpoints", "events")  # of the record
QUEUE_MAX = 10_000  # entries of some KB, for a tracker that is slow to start
CLOSE_TIMEOUT_S = 20.0  # for all trackers together, at the end of a run; torchrun kills 30 s after a SIGTERM

ERROR_CHARACTERS = 300

Entry = tuple[str, dict[str, Any]]  # section, entry

log = logging.getLogger("nanomfu")


class Trackers:
    """All trackers of a run. Rank 0 only. No method waits but close(), and none raises."""

    def __init__(
        self,
        names: Iterable[str],
        record: dict[str, Any],
        record_path: Path,
        begins: bool = False,
        live: bool = True,
    ):
        """`record`: the content of the run record, with the entries of earlier attempts. begins: the trackers
        get these as a new run. live: more entries follow, of the last attempt."""
        self.names, self.record, self.record_path, self.begins = list(names), record, record_path, begins
        self.earlier = Earlier(record, live)
        self.senders: list[Sender] | None = None  # None: not started

    def add(self, section: str, entry: dict[str, Any]) -> None:
        """The entry must not change any more."""
        if section in SECTIONS:
            for sender in self._started():
                sender.put((section, entry))

    def close(self, status: str, summary: dict[str, Any], timeout: float = CLOSE_TIMEOUT_S) -> None:
        """Waits until everything is sent, or for `timeout` seconds."""
        for sender in self._started():
            sender.put((status, summary), last=True)
        until = time.monotonic() + timeout
        for sender in self._started():
            sender.join(max(0.0, until - time.monotonic()), timeout)

    def _started(self) -> list[Sender]:
        """Starts them with the first entry: what is known of the run is complete then."""
        if self.senders is None:
            run = tracked_run(self.record, self.record_path.parent, self.begins)
            self.senders = [Sender(name, run, self.earlier, self.record_path) for name in self.names]
        return self.senders


class Earlier:
    """The entries of earlier attempts, each with its step.

    The trap is the checkpoint from which an attempt resumes. It may have been noted a few iterations later,
    which this attempt makes again. If the tracker lacks it, it comes before the first step of this attempt,
    and counts from then on as sent there.
    """

    def __init__(self, record: dict[str, Any], live: bool):
        starts = [attempt.get("start_iter") for attempt in record["attempts"]]
        starts = [start if isinstance(start, int) else math.inf for start in starts]  # an old record
        self.start = starts.pop() if live else math.inf
        self.entries = [
            (min([step_of(entry), *starts[entry["attempt"] :]]), (section, entry))
            for section in SECTIONS
            for entry in record[section]
        ]

    def after(self, last: int) -> list[tuple[int, Entry]]:
        """What a tracker lacks that has everything up to the step `last`, by rising steps."""
        most = max(self.start, last + 1)
        lacking = [(int(min(step, most)), entry) for step, entry in self.entries if step > last]
        return sorted(lacking, key=lambda each: each[0])


class Sender:
    """One tracker, and the thread that calls it."""

    def __init__(self, name: str, run: TrackedRun, earlier: Earlier, record_path: Path):
        self.name, self.run, self.record_path = name, run, record_path
        self.queue: queue.Queue[tuple[Entry, bool]] = queue.Queue(QUEUE_MAX)  # (entry, whether the last)
        self.error: str | None = None  # why it gets nothing more
        self.steps = 0  # that were sent
        self.last = NOTHING  # the last step that the tracker has
        self.step, self.figures, self.texts = NOTHING, dict[str, float](), dict[str, str]()  # not yet sent
        self.thread = threading.Thread(target=self._run, args=(earlier,), daemon=True, name=f"tracker {name}")
        try:
            self.thread.start()
        except (RuntimeError, MemoryError) as error:  # no further thread can be had
            self._fail(str(error))

    def put(self, entry: Entry, last: bool = False) -> None:
        if self.error is None:
            try:
                self.queue.put_nowait((entry, last))
            except queue.Full:
                self._fail(f"it has not taken the last {QUEUE_MAX:,} rows")

    def join(self, seconds: float, stated: float) -> None:
        """Waits for the end of the thread."""
        if self.error is None:
            self.thread.join(seconds)
            if self.thread.is_alive():
                self._fail(f"it has not taken everything within {stated:g} s at the end")

    # --- in the thread ---

    def _run(self, earlier: Earlier) -> None:
        try:
            tracker = TRACKERS[self.name]()
            self.last = tracker.open(self.run)
            for step, entry in earlier.after(self.last):
                self._take(tracker, entry, step)
            while self.error is None:
                entry, last = self.queue.get()
                if last:
                    return self._close(tracker, *entry)
                self._take(tracker, entry, step_of(entry[1]))
        except BaseException as error:  # a library may also call sys.exit()
            text = " ".join(str(error).split())[:ERROR_CHARACTERS].rstrip(".")
            self._fail(f"{type(error).__name__}: {text}")

    def _take(self, tracker: Tracker, entry: Entry, step: int) -> None:
        if step <= self.last:  # the tracker has it, from an earlier attempt
            return
        found = figures_of(*entry)
        if step > self.step:
            self._send(tracker)
            self.step = step
        for name, value in found.numbers.items():
            self.figures[name] = self.figures.get(name, 0) + value if is_count(name) else value
        for name, text in found.texts.items():
            self.texts[name] = f"{self.texts[name]}\n{text}" if name in self.texts else text

    def _send(self, tracker: Tracker) -> None:
        """What was collected for a step."""
        if self.figures:
            tracker.send(self.step, self.figures, self.texts)
            self.steps, self.last = self.steps + 1, self.step
        self.figures, self.texts = {}, {}

    def _close(self, tracker: Tracker, status: str, summary: dict[str, Any]) -> None:
        self._send(tracker)
        tracker.close(status == "completed", summary)

    def _fail(self, reason: str) -> None:
        """Called by both threads."""
        if self.error is None:
            self.error = reason
            log.warning(
                f"the tracker {self.name} gets nothing more of this run: {reason}. The run goes on, and its "
                f"record has everything; once the run has ended: python -m tools.track {self.record_path} "
                f"--trackers={self.name}"
            )
