"""One thread of each process that looks while the main thread trains: for signals, for ranks that are gone,
for a run that stands still.

The main thread cannot do it: it may sit in a collective or a compiler for minutes, and Python runs no signal
handler until that returns. So the signals are blocked in the main thread and arrive here. They are blocked in
every process that it starts, too: data workers and compilers must outlive them, or nothing can be saved.

A stop is a request: every rank hears of it in the same iteration (training/faults/consensus.py), check() raises
Stopped there, the run is saved and ends. Before the first iteration and at a second Ctrl-C, it ends at once.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import re
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path

import torch

from training.configuration.keys import TrainConfig
from training.faults.consensus import Agreement
from training.faults.liveness import Peers
from training.process.console import write_to_log_file
from training.process.exit_status import OthersFailed
from training.process.redaction import redact
from training.process.world import (
    FLIGHT_RECORDER,
    World,
    is_launched,
    launch_info,
    leave_now,
    tell_launcher,
    within,
)

log = logging.getLogger("nanomfu")

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP)
TICK = 1.0  # seconds between two looks
PATIENT_ITERATIONS = 12  # compilation, CUDA Graphs: the first ones may take start_timeout_minutes each
AGAIN = 1.0  # seconds after which another Ctrl-C is another one: torchrun hands the same one on
LAST_WORDS = 5.0  # seconds for the record and the flight recorder of a process that is about to end
OTHERS_FIRST = 5.0  # seconds: torchrun blames who ends first, so who was only waiting ends later
NEWS_SECONDS = 3.0  # for the news that another rank is gone, after a collective has failed
LOST_CONTACT = re.compile(
    "gloo|nccl|connection (closed|reset|refused|was)|broken pipe|timed out waiting|socket", re.IGNORECASE
)
END_SECONDS = 60.0  # for the last barrier: everything is saved by then
FAILED = 1


class Stopped(Exception):
    """All ranks leave the loop before this iteration, because one of them was asked to."""

    def __init__(self, number: int, iteration: int):
        super().__init__(f"stopped by {signal.Signals(number).name} before iteration {iteration}")
        self.iteration, self.status = iteration, 128 + number


class Watch:
    """Entered at the start of a run; join() when the other ranks are there, check() in every iteration."""

    def __init__(self, config: TrainConfig):
        self.config = config
        self.agreement: Agreement | None = None
        self.peers: Peers | None = None
        self.iteration, self.phase = -1, "starting"
        self.patient = True  # whether start_timeout_minutes applies
        self.still_seconds = 0.0  # since the last check(), while this process ran
        self.first: int | None = None  # first iteration of this process; None before the loop
        self.stop_asked_at: float | None = None
        self.ending: int | None = None  # the exit status, once the run has nothing left to do but to end
        self.last_words: Callable[[str], None] = lambda status: None  # completes the record
        self.launcher = os.getppid()
        self.closed = threading.Event()

    # --- what the main thread calls ---

    def __enter__(self) -> Watch:
        self.inbox, wakeup = socket.socketpair()
        self.inbox.setblocking(False)
        wakeup.setblocking(False)
        self.before = [(number, signal.getsignal(number)) for number in SIGNALS], signal.set_wakeup_fd(-1)
        self.wakeup = wakeup
        signal.set_wakeup_fd(wakeup.fileno(), warn_on_full_buffer=False)
        for number, handler in self.before[0]:
            if handler != signal.SIG_IGN or is_launched():  # nohup and the like, but not through torchrun
                signal.signal(number, lambda number, frame: None)  # the byte in the socket is what counts
        self.thread = threading.Thread(target=self._run, name="watch", daemon=True)
        self.thread.start()
        self.mask = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        return self

    def __exit__(self, kind, error, traceback) -> None:
        reason = self._cause(NEWS_SECONDS) if error and is_lost_contact(error) else None
        if self.peers and error and not reason:
            first_line = redact(str(error)).strip().split("\n")[0]
            self.peers.end_all(f"rank {self.peers.world.rank} failed: {type(error).__name__}: {first_line}")
        self.closed.set()
        self.wakeup.send(b"\0")
        self.thread.join()
        handlers, wakeup = self.before
        signal.pthread_sigmask(signal.SIG_SETMASK, self.mask)
        for number, handler in handlers:
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        signal.set_wakeup_fd(wakeup)
        self.inbox.close()
        self.wakeup.close()
        if reason:
            raise OthersFailed(reason) from error

    def join(self, world: World) -> None:
        """All ranks, once they have joined."""
        self.agreement = Agreement(world, self.config)
        self.still_seconds = 0.0
        self.peers = Peers(world)

    def check(self, iteration: int | None = None, at_once: bool = False) -> None:
        """Before every iteration, and between the parts of what takes long: all ranks tell each other what
        they were asked for. Raises Stopped on all of them if one was asked to stop."""
        if iteration is not None:
            if self.first is None:
                self.first = iteration
            self.iteration, self.phase = iteration, "training"
            self.patient = iteration < self.first + PATIENT_ITERATIONS
        self.still_seconds = 0.0
        self.agreement.exchange(at_once)
        if number := int(self.agreement.answer("stop")):
            raise Stopped(number, self.iteration)

    @contextmanager
    def during(self, phase: str):
        """Around what is no iteration and may take long: an evaluation, a checkpoint."""
        before = self.phase, self.patient
        self.phase, self.patient, self.still_seconds = phase, True, 0.0
        yield
        self.phase, self.patient = before
        self.still_seconds = 0.0

    def end(self, status: int) -> None:
        """From here on other processes may end before this one."""
        self.phase, self.still_seconds, self.ending = "ending", 0.0, status

    def _cause(self, wait_seconds: float) -> str | None:
        """Why a collective failed, if another rank is the cause. Waits: the news may still be on the way."""
        until = time.monotonic() + wait_seconds
        while self.peers and not (reason := self._others_end()) and time.monotonic() < until:
            time.sleep(0.2)
        return reason if self.peers else None

    # --- the thread ---

    def _run(self) -> None:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
        ticks, last = 0, time.monotonic()
        while not self.closed.is_set():
            ready, _, _ = select.select([self.inbox], [], [], TICK)
            if ready:
                for number in self.inbox.recv(64):
                    self._signal(number)
            now = time.monotonic()
            if now - last < TICK:
                continue
            # a process that was stopped, with all others perhaps, has not stood still in that time
            self.still_seconds += min(now - last, 2 * TICK)
            ticks, last = ticks + 1, now
            self._look(ticks)

    def _look(self, ticks: int) -> None:
        if self.ending is not None:
            if self.still_seconds > END_SECONDS:
                leave_now(self.ending)
            return
        if self.peers:
            self.peers.publish(ticks, self.iteration, self.phase)
            reason = self._others_end()
            if reason and not self.closed.is_set():
                self._leave(self.peers.end_all(reason))
        if is_launched() and os.getppid() != self.launcher and not self.stop_asked_at:
            log.warning("torchrun is gone: ending after this iteration")
            self._signal(signal.SIGTERM)
        minutes = self.config.start_timeout_minutes if self.patient else self.config.timeout_minutes
        if self.peers and self.config.timeout_minutes and self.still_seconds > 60 * minutes:
            self._hang(minutes, ticks)

    def _signal(self, number: int) -> None:
        if number not in SIGNALS:  # other libraries' handlers write to the same socket
            return
        name = signal.Signals(number).name
        if self.first is None:
            log.info(f"{name} before the first iteration: there is nothing to save")
            if self.peers:  # another rank may be an instant ahead, in its first iteration
                reason = f"rank {self.peers.world.rank} got {name} before its first iteration"
                within(LAST_WORDS, self.peers.end_all, f"{reason}: there is nothing to save")
            self._last("interrupted")
            leave_now(128 + number)
        again = self.stop_asked_at and time.monotonic() - self.stop_asked_at > AGAIN
        if number == signal.SIGINT and again and self.ending is None:
            print("interrupted again: ending without a checkpoint", file=sys.stderr, flush=True)
            self._last("interrupted")
            leave_now(128 + number)
        if not self.stop_asked_at:
            log.info(f"{name}: ending after this iteration")
        self._ask(number)

    def _ask(self, number: int) -> None:
        self.stop_asked_at = self.stop_asked_at or time.monotonic()
        self.agreement.ask("stop", number)

    def _others_end(self) -> str | None:
        reason = self.peers.reason_to_end()
        if reason:
            return reason
        gone = self.peers.gone()
        return f"{', '.join(map(self.peers.name, gone))} has ended" if gone else None

    def _hang(self, minutes: float, ticks: int) -> None:
        """Names who is behind, leaves traces for whoever looks for the reason, ends this process."""
        rank, where = self.peers.world.rank, f"in iteration {self.iteration} ({self.phase})"
        if self.peers.world.size > 1:
            where = self.peers.who_is_behind(ticks, self.iteration, self.phase)
        out_dir = Path(self.config.out_dir)
        within(LAST_WORDS, _write_stacks, out_dir / f"hang_stacks_rank_{rank}.txt")
        within(LAST_WORDS, _write_collectives, out_dir / f"{FLIGHT_RECORDER}{rank}")
        what = f"no progress for {60 * minutes:.0f} s ({self._key()})"
        files = f"what each live rank was doing is in {out_dir}/hang_stacks_rank_*.txt"
        reason = f"{what}: {where}; {files}"
        self._leave(reason, is_own=self.peers.end_all(reason) == reason)

    def _key(self) -> str:
        return "start_timeout_minutes" if self.patient else "timeout_minutes"

    def _leave(self, reason: str, is_own: bool = False) -> None:
        """Ends this process because of another one, unless the main thread has an error of its own."""
        if is_own:
            tell_launcher(reason)
        elif self.closed.wait(OTHERS_FIRST):
            return
        if is_own or self.peers.is_first_here():
            rank, _, world_size = launch_info()
            mark = f"[rank {rank}] " if world_size > 1 else ""
            print(f"{mark}error: {reason}", file=sys.stderr, flush=True)
        within(LAST_WORDS, write_to_log_file, f"error: {reason}")
        self._last("failed")
        leave_now(FAILED)

    def _last(self, status: str) -> None:
        within(LAST_WORDS, self.last_words, status)


def is_lost_contact(error: BaseException) -> bool:
    """Whether it is what a collective raises when another rank does not answer any more."""
    return isinstance(error, RuntimeError) and LOST_CONTACT.search(str(error)) is not None


def _write_stacks(path: Path) -> None:
    with open(path, "w") as file:
        faulthandler.dump_traceback(file)


def _write_collectives(path: Path) -> None:
    """NCCL's flight recorder, also where NCCL itself has not noticed a timeout."""
    if not torch.cuda.is_available():
        return
    from torch._C import _distributed_c10d as c10d

    dump = getattr(c10d, "_dump_nccl_trace", None) or c10d._dump_fr_trace
    path.write_bytes(dump())
