"""Finds out which other ranks have ended, and which one the others wait for. It uses no collective, because
it is needed when a collective does not return, and before there is a process group. A rank has ended if its
connection is closed (common/connections.py): rank 0 notices all others' end, and they rank 0's.

Every rank writes its progress into torchrun's store, from its first second. Until all ranks have joined, rank
0 looks at all others, and they look at rank 0: one that is not there, or silent, is late and not dead. The
clocks of two machines are never compared: each reader counts its own ticks, in which it was not suspended
itself, since a value changed.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import socket
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from typing import NamedTuple, TypeVar

import torch.distributed as dist

from common.connections import accept_ranks, hold, listen
from common.processes import is_running
from training.process.exit_status import within
from training.process.launch import is_launched, launch_info, machine_number, machine_size, store_address
from training.process.world import NO_LIMIT, another_connection, meet, wait_until_a_torchrun_ends

log = logging.getLogger("nanomfu")

SILENCE_SECONDS = 3  # a rank that has published nothing for so long is silent
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


class Liveness:
    """One rank's view of the others. It is built in the main thread and used by the watchdog's."""

    def __init__(self) -> None:
        self.rank, local_rank, self.size = launch_info() if is_launched() else (0, 0, 1)
        first = self.rank - local_rank
        self.local_ranks = range(first, first + machine_size())  # torchrun numbers them so
        # those that are known
        self.processes = {self.rank: Process(socket.gethostname(), os.getpid())}
        self.joined = False
        self.silent: Counter[int] = Counter()  # ticks since the progress of a rank changed
        self.last: dict[int, bytes] = {}  # its progress then
        self.lost: set[int] = set()  # ranks whose connection to this one is closed
        self.over: str | None = None  # the first reason that any rank gave to end all
        self.a_torchrun_has_ended = False  # known to rank 0 alone
        self.broken = False  # whether the connection to the store is closed; it never opens again
        self.store: dist.Store | None = None
        self.met = threading.Event()  # set when there is a store
        self.asking = threading.Lock()  # held by the call that waits for the store's answer
        self.overdue: threading.Event | None = None  # set when an answer comes after its timeout
        if self.size > 1:
            threading.Thread(target=self._meet, name="meet", daemon=True).start()
        if self.rank == 0 and machine_number()[1] > 1:
            threading.Thread(target=self._watch_torchruns, name="torchruns", daemon=True).start()

    def _meet(self) -> None:
        """In a thread, as it waits for torchrun and for rank 0, and then watches the connections."""
        host, _ = store_address()  # rank 0 is on that machine
        try:
            store = meet(self.rank, about=json.dumps(self.processes[self.rank]))
            if self.rank == 0:
                for rank in range(self.size):  # so that there is something to read, also of the dead
                    store.compare_set(f"process/{rank}", "", "")
                    store.compare_set(f"progress/{rank}", "", "")
                listener, token = listen(self.size), uuid.uuid4().hex
                store.set("rank 0 listens", json.dumps([listener.getsockname()[1], token]))
            port, token = json.loads(store.get("rank 0 listens"))
            store.set(f"progress/{self.rank}", "0 -1 starting")
            self.processes[0] = Process(*json.loads(store.get("process/0")))
            self.store = store
            self.met.set()
        except RuntimeError:  # a torchrun has ended meanwhile
            self.broken = True
            return
        greetings = {f"{token} {rank}".encode(): rank for rank in range(1, self.size)}
        if self.rank == 0:
            accept_ranks(listener, greetings, self.lost)
        elif not hold(host, port, f"{token} {self.rank}".encode(), self.lost):
            log.warning(f"rank {self.rank} cannot connect to {host}, port {port}: its end will be seen late")

    def _watch_torchruns(self) -> None:
        self.a_torchrun_has_ended = wait_until_a_torchrun_ends()

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

    def end_without_joining(self) -> None:
        """This rank has done its work, without joining."""
        self.met.wait(MEET_TIMEOUT_S if self.size > 1 else 0)
        self._try(lambda store: store.set(f"progress/{self.rank}", ENDED.decode()))
        self._try(lambda store: store.set("ended", self.name(self.rank)))

    def name(self, rank: int) -> str:
        """As messages name it, with its machine and process."""
        if rank in self.processes:
            return f"rank {rank} ({self.processes[rank].host}, process {self.processes[rank].pid})"
        here, machines = machine_size(), machine_number()[1]
        numbered = machines > 1 and here * machines == self.size  # as many processes on each machine
        return f"rank {rank} of machine {rank // here}" if numbered else f"rank {rank}"

    def ended(self) -> list[int]:
        """Ranks whose process has ended, for any reason but that its work is done."""
        self._find(lost := sorted(self.lost))
        return [rank for rank in lost if self.joined or self._get(f"progress/{rank}") != ENDED]

    def is_first_here(self) -> bool:
        """Whether no lower rank of this machine is alive, so that this one prints the message."""
        return not any(is_running(self.processes[rank].pid) for rank in self._here() if rank < self.rank)

    def _here(self) -> list[int]:
        """The other ranks of this machine that have said which process they are."""
        self._find(self.local_ranks)
        return [rank for rank in self.local_ranks if rank in self.processes and rank != self.rank]

    def _find(self, ranks: Iterable[int]) -> None:
        """Reads which processes these ranks are, as far as they have said it."""
        if unknown := [rank for rank in ranks if rank not in self.processes]:
            for rank, found in zip(unknown, self._read("process", unknown), strict=True):
                if found:
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

    def why_not_all_join(self, ready: bool) -> str | None:
        """Before all have joined: who can never join. Called once a tick. ready: whether this rank waits."""
        if self.size == 1 or self.joined:
            return None
        if self.broken:
            return self.store_is_lost()
        if ready and (ended := self._get("ended")):
            return f"{ended.decode()} has ended without joining (a dry run?): start all with the same flags"
        watched = self._watched()
        for rank, value in zip(watched, self._read("progress", watched), strict=True):
            before = self.last.get(rank, b"")
            self.last[rank] = value or before
            self.silent[rank] = self.silent[rank] + 1 if self.last[rank] == before else 0
        if self.a_torchrun_has_ended:
            return f"a torchrun has ended before all ranks had joined ({self.late()}); {SAYS_WHY}"
        return None

    def store_is_lost(self) -> str:
        what = "does not answer" if self.met.is_set() else "has had no word of rank 0"
        host, port = store_address()
        first = self.name(0) if 0 in self.processes else "rank 0"
        return (
            f"torchrun's store, {host}:{port}, {what}: torchrun of the machine of {first} has ended, or that "
            f"machine is gone; {SAYS_WHY}"
        )

    def late(self) -> str:
        """The ranks that are not ready, of those at which this one looks, and what the first of them does."""
        late = [rank for rank, value in self.last.items() if _parse(value)[2] != WAITING]
        self._find(late)
        return f"{self._names(late)}: {_parse(self.last[late[0]])[2]}" if late else ""

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
        """The first that any rank gave, or a rank that has ended without one."""
        if not self.over and (reason := self._get("over")):
            self.over = reason.decode()
        if not self.over and (ended := self.ended()):
            self.over = self.end_all(f"{self._names(ended)} has ended")
        return self.over

    def who_is_behind(self, ticks: int, iteration: int, phase: str) -> str:
        """Describes which ranks the others wait for. The arguments are those of publish(), which it calls
        meanwhile."""
        if not self.met.is_set():
            return f"{self.name(0)} is {NEVER_SEEN[2]}"
        self._find(range(self.size))
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
            verb = "is" if len(ranks) == 1 else "are"
            state = "alive, in" if alive else "silent, last seen in"
            found.append(f"{names} {verb} {state} {where(at, doing)}")
        return "; ".join(found)

    def _names(self, ranks: list[int], in_full: bool = True) -> str:
        names = [self.name(rank) if in_full else f"rank {rank}" for rank in ranks[:NAMED]]
        more = [f"{len(ranks) - NAMED} more"] if len(ranks) > NAMED else []
        return ", ".join(names + more)

    def _progress(self) -> dict[int, tuple[int, int, str]]:
        """rank -> (ticks, iteration, phase) as last published."""
        found = enumerate(self._read("progress", range(self.size)))
        return {rank: _parse(value) for rank, value in found if value}

    def _read(self, what: str, ranks: Collection[int]) -> list[bytes]:
        """What each of the ranks has written, in one question; b"" if nothing."""
        keys = [f"{what}/{rank}" for rank in ranks]
        return self._try(lambda store: store.multi_get(keys)) or [b""] * len(keys)

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
