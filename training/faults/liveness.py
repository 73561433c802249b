"""Finds out which other ranks have ended, and which one the others wait for. It uses no collective, because
it is needed when a collective does not return, and before there is a process group. Processes of this machine
are checked by process id, and every rank writes its progress into torchrun's store, from its first second.

Until all ranks have joined, a rank whose progress does not change is taken for dead: rank 0 looks at all
others, and they look at rank 0. The clocks of two machines are never compared: each reader counts its own
ticks, in which it was not suspended itself, since a value changed.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple, TypeVar

import torch.distributed as dist

from common.processes import is_running
from training.process.exit_status import within
from training.process.launch import is_launched, launch_info, machine_number, machine_size, store_address
from training.process.world import NO_LIMIT, another_connection, meet

SILENCE_SECONDS = 3  # a rank that has published nothing for so long is silent
DEAD_TICKS = 50  # before all have joined, a rank that is silent for so long is taken for dead
ANSWER_TIMEOUT_S = 3.0  # for torchrun's store; torchrun may be stopped, or its machine gone
MEET_TIMEOUT_S = 10.0  # for rank 0, if this rank has failed before it has met it
TELL_SECONDS = 3.0  # in which every rank looks at least twice for a reason to end
NEVER_SEEN = (0, -1, "not started")
WAITING = "waiting for the other ranks"  # the phase of a rank that is ready to join
SAYS_WHY = "the output of its torchrun may say why"
ENDED = b"ended"  # instead of progress: this rank has done its work, and will not join
PHASES = ("batch", "forward", "backward")  # of an iteration, in their order
NAMED = 8  # ranks in one message

Answer = TypeVar("Answer")


class Process(NamedTuple):
    host: str  # a name for messages: two machines may have the same
    pid: int
    machine: int  # the number of the torchrun that started it
    namespace: str  # processes with the same machine and namespace see each other's ids


def this_process() -> Process:
    namespace = ""
    with contextlib.suppress(OSError):  # this is not Linux
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        namespace = f"{boot} {os.readlink('/proc/self/ns/pid')}"
    return Process(socket.gethostname(), os.getpid(), machine_number()[0], namespace)


class Liveness:
    """One rank's view of the others. It is built in the main thread and used by the watchdog's."""

    def __init__(self) -> None:
        self.rank, local_rank, self.size = launch_info() if is_launched() else (0, 0, 1)
        first = self.rank - local_rank
        self.local_ranks = range(first, first + machine_size())  # torchrun numbers them so
        self.processes = {self.rank: this_process()}  # those that are known
        self.joined = False
        self.quiet: Counter[int] = Counter()  # ticks since the progress of a rank changed
        self.last: dict[int, bytes] = {}  # its progress then
        self.over: str | None = None  # the first reason that any rank gave to end all
        self.unanswered = 0  # ticks without rank 0, or without an answer of the store
        self.broken = False  # whether the connection to the store is closed; it never opens again
        self.store: dist.Store | None = None
        self.met = threading.Event()  # set when there is a store
        self.asking = threading.Lock()  # held by the call that waits for the store's answer
        self.overdue: threading.Event | None = None  # set when an answer comes after its timeout
        if self.size > 1:
            threading.Thread(target=self._meet, name="meet", daemon=True).start()

    def _meet(self) -> None:
        """In a thread, as it waits for torchrun and for rank 0."""
        try:
            store = meet(self.rank, about=json.dumps(self.processes[self.rank]))
            for rank in self._watched():  # so that there is something to read, also from the dead
                store.compare_set(f"progress/{rank}", "", "")
            store.set(f"progress/{self.rank}", "0 -1 starting")
            self.processes[0] = Process(*json.loads(store.get("process/0")))
            self.store = store
            self.met.set()
        except RuntimeError:  # rank 0's torchrun has ended meanwhile
            self.broken = True

    def wait_for_all(self) -> dist.Store | None:
        """Returns when all ranks have called this: the store through which they can join. The watchdog ends
        the wait for a rank that never does."""
        if self.size == 1:
            return None
        self.met.wait()
        assert self.store, "met"
        store = another_connection(self.store)  # the watchdog's thread must not wait for this call
        try:
            if store.add("ready", 1) == self.size:
                store.set("all ready", "")
            store.wait(["all ready"], NO_LIMIT)
        except RuntimeError:
            self.broken = True
            threading.Event().wait()  # for the watchdog, which says why and ends this process
        return store

    def join(self) -> None:
        """All ranks, after they have joined: from here on a long silence is no death."""
        self.joined = True
        self._find(range(self.size))

    def leave(self) -> None:
        """This rank has done its work, without joining."""
        self._try(lambda store: store.set(f"progress/{self.rank}", ENDED.decode()))

    def name(self, rank: int) -> str:
        """As messages name it, with its machine and process."""
        if rank not in self.processes:
            return f"rank {rank}"
        return f"rank {rank} ({self.processes[rank].host}, process {self.processes[rank].pid})"

    def gone(self) -> list[int]:
        """Ranks of this machine whose process has ended, for any reason but that its work is done."""
        self._find(self.local_ranks)
        ended = [rank for rank in self._here() if not is_running(self.processes[rank].pid)]
        return [rank for rank in ended if self.joined or self._get(f"progress/{rank}") != ENDED]

    def is_first_here(self) -> bool:
        """Whether no lower rank of this machine is alive, so that this one prints the message."""
        return not any(is_running(self.processes[rank].pid) for rank in self._here() if rank < self.rank)

    def _here(self) -> list[int]:
        place = self.processes[self.rank][2:]
        others = list(self.processes.items())  # as two threads add to it
        return [rank for rank, one in others if rank != self.rank and one[2:] == place]

    def _find(self, ranks: Iterable[int]) -> None:
        """Reads which processes these ranks are, as far as they have said it."""
        for rank in ranks:
            if rank not in self.processes and (found := self._get(f"process/{rank}")):
                self.processes[rank] = Process(*json.loads(found))

    def publish(self, ticks: int, iteration: int, phase: str) -> None:
        """Writes this rank's progress. `ticks` grows as long as the process is alive."""
        self._try(lambda store: store.set(f"progress/{self.rank}", f"{ticks} {iteration} {phase}"))

    def continue_stopped(self) -> None:
        """Wakes those processes of this machine that SIGSTOP has stopped, so that they learn that the run
        ends: torchrun would wait 30 s before it kills them. Others do not notice the signal."""
        for rank in self._here():
            with contextlib.suppress(OSError):
                os.kill(self.processes[rank].pid, signal.SIGCONT)

    # --- before all have joined ---

    def _watched(self) -> range:
        return range(1, self.size) if self.rank == 0 else range(1)

    def dead(self) -> str | None:
        """Before all have joined: which rank, machine or store is taken for dead. Called once a tick."""
        if self.size == 1 or self.joined:
            return None
        watched, found = self._watched(), None
        if self.met.is_set():
            found = self._try(lambda store: store.multi_get([f"progress/{rank}" for rank in watched]))
        self.unanswered = 0 if found else self.unanswered + 1
        if self.broken or self.unanswered >= DEAD_TICKS:
            return self.store_is_lost()
        for rank, value in zip(watched, found or [], strict=False):
            changed = value != self.last.get(rank, b"") or value == ENDED
            self.quiet[rank] = 0 if changed else self.quiet[rank] + 1
            self.last[rank] = value
        silent = [rank for rank in watched if self.quiet[rank] >= DEAD_TICKS]
        return self._describe_dead(silent) if silent else None

    def store_is_lost(self) -> str:
        what = "does not answer" if self.met.is_set() else "has had no word of rank 0"
        return (
            f"torchrun's store, {store_address()}, {what}: torchrun of the machine of {self.name(0)} has "
            f"ended, or that machine is gone; {SAYS_WHY}"
        )

    def _describe_dead(self, silent: list[int]) -> str | None:
        self._find(self._watched())
        if known := [rank for rank in silent if rank in self.processes]:
            doing = _parse(self.last[known[0]])[2]
            return (
                f"{self._names(known, in_full=True)} silent for {DEAD_TICKS} s before all ranks had joined "
                f"({doing}): killed or stopped, or the machine is gone; {SAYS_WHY}"
            )
        # a rank that is slow to start is left to its torchrun, which is there if another process of it is
        missing = set(range(machine_number()[1])) - {one.machine for one in self.processes.values()}
        if not missing:
            return None
        return (
            f"{self._names(silent, in_full=False)} not there after {DEAD_TICKS} s, nor is any other process "
            f"of torchrun's node {', '.join(map(str, sorted(missing)))}; {SAYS_WHY}"
        )

    def not_ready(self) -> str | None:
        """For rank 0 in WAITING: the ranks that it waits for."""
        late = {rank: _parse(value)[2] for rank, value in self.last.items() if value != ENDED}
        ranks = [rank for rank, phase in late.items() if phase != WAITING]
        if not ranks:
            return None
        self._find(ranks)
        return f"{self._names(ranks, in_full=True)} {late[ranks[0]]}"

    # --- why, and who ---

    def end_all(self, reason: str) -> str:
        """Tells all ranks, also of other machines, to end. Returns the first reason that any rank gave."""
        return (self._try(lambda store: store.compare_set("over", "", reason)) or reason.encode()).decode()

    def tell_all(self, reason: str) -> None:
        """The same for a process that is about to end. If it is the store's only one, other machines must
        read the reason before torchrun takes the store down."""
        if self.end_all(reason) == reason and machine_number()[1] > 1 and not self.broken:
            time.sleep(TELL_SECONDS)

    def reason_to_end(self) -> str | None:
        if not self.over and (reason := self._get("over")):
            self.over = reason.decode()
        return self.over

    def who_is_behind(self, ticks: int, iteration: int, phase: str) -> str:
        """Describes which ranks the others wait for. The arguments are those of publish(), which it calls
        meanwhile."""
        first = self._progress()
        for i in range(SILENCE_SECONDS):
            time.sleep(1)
            self.publish(ticks + 1 + i, iteration, phase)
        second = self._progress()
        if not second:
            return "torchrun's store does not answer, so nobody knows who is behind"
        groups: dict[tuple[bool, int, str], list[int]] = {}  # (is alive, iteration, phase) -> ranks
        for rank in range(self.size):
            _, at, doing = second.get(rank, NEVER_SEEN)
            groups.setdefault((first.get(rank) != second.get(rank), at, doing), []).append(rank)
        found: list[str] = []
        for (alive, at, doing), ranks in sorted(groups.items(), key=_furthest_behind_first):
            names = self._names(ranks, in_full=len(groups) > 1 and not found)
            state = "alive, in" if alive else "silent, last seen in"
            found.append(f"{names} {state} {where(at, doing)}")
        return "; ".join(found)

    def _names(self, ranks: list[int], in_full: bool) -> str:
        names = [self.name(rank) if in_full else f"rank {rank}" for rank in ranks[:NAMED]]
        more = [f"{len(ranks) - NAMED} more"] if len(ranks) > NAMED else []
        return f"{', '.join(names + more)} {'is' if len(ranks) == 1 else 'are'}"

    def _progress(self) -> dict[int, tuple[int, int, str]]:
        """rank -> (ticks, iteration, phase) as last published."""
        table = {}
        for rank in range(self.size):
            value = self._get(f"progress/{rank}")
            if value:
                table[rank] = _parse(value)
        return table

    def _get(self, key: str) -> bytes | None:
        """The value of a key, None if it has none. Does not wait for it."""
        return self._try(lambda store: store.get(key) if store.check([key]) else None)

    def _try(self, action: Callable[[dist.Store], Answer]) -> Answer | None:
        """The store's answer; None if it does not answer in time, or the connection is broken."""
        store = self.store
        if store is None or self.broken or (self.overdue and not self.overdue.is_set()):
            return None
        if not self.asking.acquire(timeout=ANSWER_TIMEOUT_S):
            return None
        answered = threading.Event()

        def ask() -> Answer:
            try:
                return action(store)
            except dist.DistNetworkError:
                self.broken = True
                raise
            finally:
                answered.set()
                self.asking.release()

        answer = within(ANSWER_TIMEOUT_S, ask)
        if not answered.is_set():
            self.overdue = answered
        return answer


def _furthest_behind_first(group: tuple[tuple[bool, int, str], list[int]]) -> tuple:
    """The key that sorts silent ranks first, then those that are furthest behind."""
    (alive, iteration, phase), _ = group
    return alive, iteration, PHASES.index(phase) if phase in PHASES else -1, phase


def where(iteration: int, phase: str) -> str:
    return f"iteration {iteration} ({phase})" if iteration >= 0 else f"the start ({phase})"


def _parse(progress: bytes) -> tuple[int, int, str]:
    """(ticks, iteration, phase)."""
    if progress in (b"", ENDED):
        return NEVER_SEEN
    ticks, iteration, phase = progress.decode().split(" ", 2)
    return int(ticks), int(iteration), phase
