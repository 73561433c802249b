"""The watchdog: one thread in each process that supervises the run while the main thread trains. It receives
signals (training/faults/signal_inbox.py), and it notices ranks that have ended and a run that makes no
progress.

A stop is a request: every rank learns of it in the same iteration (training/faults/consensus.py), check()
raises Stopped there, and the run is saved and ends. Before the first iteration, and at a second Ctrl-C, it
ends at once.

No output, file or launcher may stop this thread or delay it for long, as nothing else ends a run that hangs:
it writes through within(), and an error of its own ends the run.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import signal
import threading
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import NoReturn

import torch.distributed as dist

from training.configuration.keys import TrainConfig
from training.faults.consensus import Consensus
from training.faults.liveness import MEET_TIMEOUT_S, WAITING, Liveness, where
from training.faults.signal_inbox import SignalInbox
from training.faults.traces import write_collectives, write_stacks
from training.process.console import write_to_log_file
from training.process.exit_status import (
    FAILED,
    STOP_SIGNALS,
    OtherRankFailed,
    leave_now,
    print_last,
    tell_launcher,
    within,
)
from training.process.launch import is_launched
from training.process.redaction import redact
from training.process.world import FLIGHT_RECORDER, World
from training.records.rows import Logger

log = logging.getLogger("nanomfu")

TICK_S = 1.0  # between two checks
PATIENT_ITERATIONS = 12  # the first ones may take start_timeout_minutes each: compilation, CUDA graphs
SECOND_SIGNAL_S = 1.0  # a Ctrl-C after this time is a second one; before, torchrun repeats the first
BUSY_SECONDS = 0.02  # of CPU time between two ticks: reading and hashing 20 MB/s
SAY_TICKS = 30  # before the first line about ranks that are waited for; doubled after each
SAY_TIMEOUT_S = 2.0  # for a line in the log, while the main thread may be blocked in writing one
SHUTDOWN_TIMEOUT_S = 5.0  # for writing the record and the flight recorder before the process ends
WHO_TIMEOUT_S = 15.0  # for finding out which ranks are behind
CAUSE_FIRST_S = 5.0  # torchrun blames the rank that ends first, so a rank that only waited ends later
NEWS_TIMEOUT_S = 3.0  # after a failed collective or a signal, for the news that another rank has ended
LOST_CONTACT = re.compile(
    "gloo|nccl|connection (closed|reset|refused|was)|broken pipe|timed out waiting|socket", re.IGNORECASE
)
LAST_BARRIER_TIMEOUT_S = 60.0  # for the last barrier of the run; everything is saved by then
THREAD_TIMEOUT_S = 60.0  # for the watchdog's own thread, when the run is over


class Stopped(Exception):
    """All ranks leave the loop before this iteration, because one of them was asked to stop."""

    def __init__(self, number: int, iteration: int):
        super().__init__(f"stopped by {signal.Signals(number).name} before iteration {iteration}")
        self.iteration, self.status = iteration, 128 + number


class Watchdog:
    """Entered in a run's first second; begin() with its settings, meet() before the ranks join and join()
    after, complete_at_end() with its record, check() in every iteration."""

    def __init__(self) -> None:
        self.config = TrainConfig()  # whose limits are the defaults, until begin()
        self.liveness = Liveness()
        self.signals = SignalInbox()
        self.consensus: Consensus | None = None  # until join()
        self.logger: Logger | None = None  # until complete_at_end()
        self.iteration, self.phase = -1, "starting"
        self.patient = True  # whether start_timeout_minutes applies
        self.cpu_seconds = 0.0  # that this process had used at the last tick
        self.waiting_ticks, self.say_at = 0, SAY_TICKS  # ready to join; at which the next line is due
        self.stalled_seconds = 0.0  # since the last check(), while this process ran
        self.first: int | None = None  # first iteration of this process; None before the loop
        self.stop_asked_at: float | None = None
        self.final_status: int | None = None  # the exit status, once the run has only to end
        self.launcher = os.getppid()
        self.closed = threading.Event()

    # --- what the main thread calls ---

    def __enter__(self) -> Watchdog:
        self.signals.open()
        self.thread = threading.Thread(target=self._run, name="watchdog", daemon=True)
        self.thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        reason = self._cause(NEWS_TIMEOUT_S) if error and is_lost_contact(error) else None
        if reason and self.liveness.is_first_here():  # torchrun may end this process while end_with() waits
            print_last(f"error: {reason}")
        if error and not reason:
            first_line = redact(str(error)).strip().split("\n")[0]
            self.liveness.met.wait(MEET_TIMEOUT_S if self.liveness.size > 1 else 0)
            self.liveness.tell_all(
                f"{self.liveness.name(self.liveness.rank)} failed: {type(error).__name__}: {first_line}"
            )
        self.closed.set()
        self.signals.wake()
        self.thread.join(THREAD_TIMEOUT_S)  # first, as it publishes this rank's progress
        if not error and not self.liveness.joined:
            self.liveness.end_without_joining()
        self.signals.close(unused=not self.thread.is_alive())
        if reason:
            raise OtherRankFailed(reason) from error

    def begin(self, config: TrainConfig) -> None:
        """From here on, the run's own limits count, and traces go to its folder."""
        self.config = config

    def meet(self) -> dist.Store | None:
        """Waits until all ranks are ready to join. All ranks."""
        with self.during(WAITING):
            return self.liveness.wait_for_all()

    def join(self, world: World) -> Consensus:
        """All ranks, after they have joined."""
        self.consensus, self.stalled_seconds = Consensus(world), 0.0
        self.liveness.join()
        return self.consensus

    def complete_at_end(self, logger: Logger) -> None:
        """Its record is completed if the watchdog ends the process."""
        self.logger = logger

    def check(self, iteration: int | None = None, at_once: bool = False) -> None:
        """Called before every iteration, and between the steps of a long task. All ranks tell each other what
        they were asked. Raises Stopped on all ranks if one was asked to stop."""
        if iteration is not None:
            if self.first is None:
                self.first = iteration
            self.iteration, self.phase = iteration, "training"
            self.patient = iteration < self.first + PATIENT_ITERATIONS
        self.stalled_seconds = 0.0
        assert self.consensus, "join() comes first"
        self.consensus.exchange(at_once)
        if number := int(self.consensus.answer("stop")):
            raise Stopped(number, self.iteration)

    def enter_phase(self, phase: str) -> None:
        """Notes the phase of the iteration: the message about a hanging rank names it."""
        self.phase = phase

    @contextlib.contextmanager
    def during(self, phase: str) -> Iterator[None]:
        """Wraps work that is no iteration and may take long: an evaluation, a checkpoint."""
        before = self.phase, self.patient
        self.phase, self.patient, self.stalled_seconds = phase, True, 0.0
        try:
            yield
        finally:
            self.phase, self.patient = before
            self.stalled_seconds = 0.0

    def end(self, status: int) -> None:
        """From here on it is no error if other processes end before this one."""
        self.phase, self.stalled_seconds, self.final_status = "ending", 0.0, status

    def _cause(self, wait_seconds: float) -> str | None:
        """Why this rank must end, if another one is the cause. Waits: the news may still be on the way."""
        until = time.monotonic() + (wait_seconds if self.liveness.size > 1 else 0)
        while not (reason := self.liveness.reason_to_end()) and time.monotonic() < until:
            time.sleep(0.2)
        return reason

    # --- the thread ---

    def _run(self) -> None:
        try:
            self._supervise()
        except BaseException as error:  # without this thread, nothing would end a run that hangs
            self._end_unsupervised_run(error)

    def _supervise(self) -> None:
        self.signals.unblock()
        ticks, last = 0, time.monotonic()
        while not self.closed.is_set():
            numbers = self.signals.receive(TICK_S)
            for number in numbers:
                self._handle_signal(number)
            now = time.monotonic()
            if now - last < TICK_S and not (numbers and self.stop_asked_at):  # a rank may have ended
                continue
            # a process that was suspended, perhaps with all others, has not stalled in that time
            self.stalled_seconds += min(now - last, 2 * TICK_S)
            ticks, last = ticks + 1, now
            self._tick(ticks)

    def _tick(self, ticks: int) -> None:
        if self.final_status is not None:
            if self.stalled_seconds > LAST_BARRIER_TIMEOUT_S:
                leave_now(self.final_status)
            return
        self.liveness.publish(ticks, self.iteration, self.phase)
        reason = self.liveness.reason_to_end() or self.liveness.why_not_all_join(self.phase == WAITING)
        if reason and not self.closed.is_set():
            self._leave_because(self.liveness.end_all(reason))
        if not self.liveness.joined:
            self._look_at_start()
        if is_launched() and os.getppid() != self.launcher and not self.stop_asked_at:
            within(SAY_TIMEOUT_S, log.warning, "torchrun has ended: stopping after this iteration")
            self._handle_signal(signal.SIGTERM, "has lost its torchrun")
        minutes = self.config.start_timeout_minutes if self.patient else self.config.timeout_minutes
        is_limited = self.config.timeout_minutes and minutes  # 0: never
        if is_limited and self.stalled_seconds > 60 * minutes:
            self._end_hanging_run(minutes, ticks)

    def _look_at_start(self) -> None:
        """Before all have joined, a rank that computes has not stalled, as reading a large dataset may take
        hours; one that waits has stalled as long as another is silent."""
        used, self.cpu_seconds = time.process_time() - self.cpu_seconds, time.process_time()
        if self.phase != WAITING:
            self.stalled_seconds = 0.0 if used > BUSY_SECONDS else self.stalled_seconds
            return
        self.stalled_seconds = max(self.liveness.silent.values(), default=0)
        self.waiting_ticks += 1
        if self.waiting_ticks == self.say_at:
            self.say_at *= 2
            # rank 0 says it of all others, and one rank of each machine says it of rank 0
            says_it = self.liveness.rank <= max(self.liveness.local_ranks.start, 1)
            if says_it and (late := self.liveness.late()):
                within(SAY_TIMEOUT_S, log.warning, f"waiting for {late}")

    def _handle_signal(self, number: int, what: str = "") -> None:
        if number not in STOP_SIGNALS:  # other libraries' handlers write to the same socket
            return
        name = signal.Signals(number).name
        if self.first is None:
            within(SAY_TIMEOUT_S, log.info, f"{name} before the first iteration: there is nothing to save")
            # torchrun sends it, too, when another process of this machine has failed
            mine = (
                f"{self.liveness.name(self.liveness.rank)} {what or f'got {name}'} before its first iteration"
            )
            news = self._cause(NEWS_TIMEOUT_S if number == signal.SIGTERM else 0)
            self.liveness.tell_all(news or f"{mine}: there is nothing to save")
            if self.liveness.broken and self.liveness.is_first_here():
                print_last(f"error: {self.liveness.store_is_lost()}")
            self._leave_with("interrupted", 128 + number)
        is_second = self.stop_asked_at and time.monotonic() - self.stop_asked_at > SECOND_SIGNAL_S
        if number == signal.SIGINT and is_second and self.final_status is None:
            print_last("interrupted again: ending without a checkpoint")
            self._leave_with("interrupted", 128 + number)
        assert self.consensus, "join() comes before an iteration"
        self.consensus.ask("stop", number)
        if not self.stop_asked_at:
            self.stop_asked_at = time.monotonic()
            within(SAY_TIMEOUT_S, log.info, f"{name}: stopping after this iteration")

    def _end_hanging_run(self, minutes: float, ticks: int) -> None:
        """Names the ranks that are behind, writes traces that show the reason, and ends this process."""
        rank, place = self.liveness.rank, f"in {where(self.iteration, self.phase)}"
        if self.liveness.size > 1:
            behind = within(WHO_TIMEOUT_S, self.liveness.who_is_behind, ticks, self.iteration, self.phase)
            place = behind or f"rank {rank} waits {place}"
        out_dir = Path(self.config.out_dir)
        within(SHUTDOWN_TIMEOUT_S, write_stacks, out_dir / f"hang_stacks_rank_{rank}.txt")
        within(SHUTDOWN_TIMEOUT_S, write_collectives, out_dir / f"{FLIGHT_RECORDER}{rank}")
        key = "start_timeout_minutes" if self.patient else "timeout_minutes"
        what = f"no progress for {60 * minutes:.0f} s ({key})"
        files = f"what each live rank was doing is in {out_dir}/hang_stacks_rank_*.txt"
        reason = f"{what}: {place}; {files}"
        is_cause = self.liveness.end_all(reason) == reason
        self.liveness.continue_stopped()
        self._leave_because(reason, is_cause)

    def _leave_because(self, reason: str, is_cause: bool = False) -> None:
        """Ends this process because of another one, unless the main thread has an error of its own."""
        if is_cause:
            tell_launcher(reason)
        elif self._main_thread_fails():
            return
        if is_cause or self.liveness.is_first_here():
            print_last(f"error: {reason}")
        within(SHUTDOWN_TIMEOUT_S, write_to_log_file, f"error: {reason}")
        self._leave_with("failed", FAILED)

    def _main_thread_fails(self) -> bool:
        """Whether the main thread ends this process by an error of its own; waits CAUSE_FIRST_S for that. Not
        after a SIGTERM: torchrun has seen which rank failed first, and now waits for this one."""
        until = time.monotonic() + CAUSE_FIRST_S
        while not (self.stop_asked_at or self.closed.is_set()) and (left := until - time.monotonic()) > 0:
            if signal.SIGTERM in self.signals.receive(left):
                break
        return self.closed.is_set()

    def _end_unsupervised_run(self, error: BaseException) -> None:
        """Ends this process because of an error in the watchdog itself."""
        if self.final_status is not None:  # everything is saved
            leave_now(self.final_status)
        try:
            reason = redact(f"the watchdog failed: {type(error).__name__}: {error}")
            message = redact("".join(traceback.format_exception(error))) + f"error: {reason}"
            self.liveness.end_all(reason)
            tell_launcher(message)
            print_last(message)
            within(SHUTDOWN_TIMEOUT_S, write_to_log_file, message)
        finally:
            self._leave_with("failed", FAILED)

    def _leave_with(self, record_status: str, exit_status: int) -> NoReturn:
        """Completes the record, if there is one and its disk answers, and ends this process."""
        try:
            if self.logger is not None:
                within(SHUTDOWN_TIMEOUT_S, self.logger.close, record_status)
        finally:
            leave_now(exit_status)


def is_lost_contact(error: BaseException) -> bool:
    """Whether a collective raises such an error when another rank no longer answers."""
    return isinstance(error, RuntimeError) and LOST_CONTACT.search(str(error)) is not None
