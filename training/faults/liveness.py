"""Finds out which other ranks have ended, and which one the others wait for. It uses no collective, because
it is needed when a collective does not return. Processes of this machine are checked by process id, and every
rank writes its progress into torchrun's store.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import torch.distributed as dist

from training.process.exit_status import within
from training.process.world import World, gather_objects

SILENCE_SECONDS = 3  # a rank that has published nothing for so long is silent
ANSWER_TIMEOUT_S = 3.0  # for torchrun's store; torchrun may be stopped, or its machine gone
NEVER_SEEN = (0, -1, "not started")
PHASES = ("batch", "forward", "backward")  # of an iteration, in their order
NAMED = 8  # ranks in one message

Answer = TypeVar("Answer")


class Liveness:
    """One rank's view of the others. It is built in the main thread and used by the watchdog's."""

    def __init__(self, world: World):
        """All ranks, after they have joined."""
        self.world = world
        here = socket.gethostname()
        self.processes = gather_objects((here, os.getpid()), world)
        self.local_pids = {
            rank: pid
            for rank, (host, pid) in enumerate(self.processes)
            if host == here and rank != world.rank
        }
        # a connection of its own: the main thread may be waiting in the default one, which blocks other calls
        self.store: dist.Store | None = None
        self.asking = threading.Lock()  # held by the call that waits for the store's answer
        self.overdue: threading.Event | None = None  # set when an answer comes after its timeout
        if world.size > 1:
            self.store = dist.distributed_c10d._get_default_store().clone()  # type: ignore[attr-defined]  # no stub

    def name(self, rank: int) -> str:
        host, pid = self.processes[rank]
        return f"rank {rank} ({host}, process {pid})"

    def gone(self) -> list[int]:
        """Ranks of this machine whose process has ended, for any reason."""
        return [rank for rank, pid in self.local_pids.items() if not _exists(pid)]

    def is_first_here(self) -> bool:
        """Whether no lower rank of this machine is alive, so that this one prints the message."""
        return not any(_exists(pid) for rank, pid in self.local_pids.items() if rank < self.world.rank)

    def publish(self, ticks: int, iteration: int, phase: str) -> None:
        """Writes this rank's progress. `ticks` grows as long as the process is alive."""
        self._try(lambda store: store.set(f"progress/{self.world.rank}", f"{ticks} {iteration} {phase}"))

    def end_all(self, reason: str) -> str:
        """Tells all ranks, also of other machines, to end. Returns the first reason that any rank gave."""
        return (self._try(lambda store: store.compare_set("over", "", reason)) or reason.encode()).decode()

    def reason_to_end(self) -> str | None:
        reason = self._get("over")
        return reason.decode() if reason else None

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
        for rank in range(self.world.size):
            _, at, doing = second.get(rank, NEVER_SEEN)
            groups.setdefault((first.get(rank) != second.get(rank), at, doing), []).append(rank)
        found: list[str] = []
        for (alive, at, doing), ranks in sorted(groups.items(), key=_furthest_behind_first):
            names = self._names(ranks, in_full=len(groups) > 1 and not found)
            state = "alive, in" if alive else "silent, last seen in"
            found.append(f"{names} {state} iteration {at} ({doing})")
        return "; ".join(found)

    def _names(self, ranks: list[int], in_full: bool) -> str:
        names = [self.name(rank) if in_full else f"rank {rank}" for rank in ranks[:NAMED]]
        more = [f"{len(ranks) - NAMED} more"] if len(ranks) > NAMED else []
        return f"{', '.join(names + more)} {'is' if len(ranks) == 1 else 'are'}"

    def _progress(self) -> dict[int, tuple[int, int, str]]:
        """rank -> (ticks, iteration, phase) as last published."""
        table = {}
        for rank in range(self.world.size):
            value = self._get(f"progress/{rank}")
            if value:
                ticks, iteration, phase = value.decode().split(" ", 2)
                table[rank] = int(ticks), int(iteration), phase
        return table

    def _get(self, key: str) -> bytes | None:
        """The value of a key, None if it has none. Does not wait for it."""
        return self._try(lambda store: store.get(key) if store.check([key]) else None)

    def _try(self, action: Callable[[dist.Store], Answer]) -> Answer | None:
        """The store's answer; None if it does not answer in time, or the connection is broken."""
        store = self.store
        if store is None or (self.overdue and not self.overdue.is_set()):
            return None
        if not self.asking.acquire(timeout=ANSWER_TIMEOUT_S):
            return None
        answered = threading.Event()

        def ask() -> Answer:
            try:
                return action(store)
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


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return not _is_zombie(pid)


def _is_zombie(pid: int) -> bool:
    """Whether the process has ended, but torchrun has not yet read its exit status."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:  # the process has just ended, or this is not Linux
        return False
