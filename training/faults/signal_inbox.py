"""Receives the signals that ask a run to stop in a thread of its own, whatever the main thread does.

The main thread may be in a collective or a compiler for minutes, and Python runs no signal handler until that
returns. So the signals are blocked there and arrive in the thread that unblocks them. They are also blocked
in every process that the main thread starts: data workers and compilers must outlive a signal, or nothing
could be saved.
"""

from __future__ import annotations

import contextlib
import select
import signal
import socket

from training.process.exit_status import STOP_SIGNALS
from training.process.launch import is_launched


class SignalInbox:
    """open(), wake() and close() are the main thread's; unblock() and receive() those of the other one."""

    def open(self) -> None:
        self.inbox, self.wakeup = socket.socketpair()
        self.inbox.setblocking(False)
        self.wakeup.setblocking(False)
        self.handlers_before = [(number, signal.getsignal(number)) for number in STOP_SIGNALS]
        self.wakeup_before = signal.set_wakeup_fd(self.wakeup.fileno(), warn_on_full_buffer=False)
        for number, handler in self.handlers_before:
            if handler != signal.SIG_IGN or is_launched():  # keeps nohup's choice, except under torchrun
                signal.signal(number, lambda number, frame: None)  # its byte in the socket is read
        self.mask = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)

    def unblock(self) -> None:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)

    def receive(self, timeout: float) -> bytes:
        """The numbers of the signals that came within so many seconds, also those of other handlers; 0 is
        wake()'s."""
        return self.inbox.recv(64) if select.select([self.inbox], [], [], timeout)[0] else b""

    def wake(self) -> None:
        with contextlib.suppress(BlockingIOError):  # full, so there is something to receive
            self.wakeup.send(b"\0")

    def close(self, unused: bool) -> None:
        """Signals do again what they did before. unused: whether the other thread has ended."""
        signal.pthread_sigmask(signal.SIG_SETMASK, self.mask)
        for number, handler in self.handlers_before:
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        signal.set_wakeup_fd(self.wakeup_before)
        if unused:
            self.inbox.close()
            self.wakeup.close()
