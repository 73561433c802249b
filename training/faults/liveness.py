"""Liveness of the other ranks: which are gone, and which one the others wait for. It uses no collective,
because it is needed when one does not come back. Processes of this machine are looked up by their number, and
every rank writes into torchrun's store how far it is.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import torch.distributed as dist

from training.process.world import World, gather_objects

SECOND_LOOK = 3  # seconds; who has written nothing between two looks is silent
NEVER_SEEN = (0, -1, "not started")
PHASES = ("batch", "forward", "backward")  # of an iteration, in their order
NAMED = 8  # ranks in one message

Answer = TypeVar("Answer")


class Liveness:
    """One rank's view of the others. Everything but the construction is for the watchdog's thread."""

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
        # a connection of its own: the main thread may wait in the default one, which lets nobody else in
        self.store: dist.Store | None = None
        if world.size > 1:
            self.store = dist.distributed_c10d._get_default_store().clone()  # type: ignore[attr-defined]  # no stub

    def name(self, rank: int) -> str:
        host, pid = self.processes[rank]
        return f"rank {rank} ({host}, process {pid})"

    def gone(self) -> list[int]:
        """Ranks of this machine whose process has ended, however it did."""
        return [rank for rank, pid in self.local_pids.items() if not _exists(pid)]

    def is_first_here(self) -> bool:
        """Whether no lower rank of this machine is left to speak."""
        return not any(_exists(pid) for rank, pid in self.local_pids.items() if rank < self.world.rank)

    def publish(self, ticks: int, iteration: int, phase: str) -> None:
        """How far this rank is. `ticks` grows as long as the process is alive."""
        self._try(lambda store: store.set(f"progress/{self.world.rank}", f"{ticks} {iteration} {phase}"))

    def end_all(self, reason: str) -> str:
        """Tells every rank, also of other machines, to end; gives the first reason that any rank gave."""
        return (self._try(lambda store: store.compare_set("over", "", reason)) or reason.encode()).decode()

    def reason_to_end(self) -> str | None:
        reason = self._get("over")
        return reason.decode() if reason else None

    def who_is_behind(self, ticks: int, iteration: int, phase: str) -> str:
        """Whom the others wait for. Takes as publish() does how far this rank is, and goes on publishing."""
        first = self._progress()
        for i in range(SECOND_LOOK):
            time.sleep(1)
            self.publish(ticks + 1 + i, iteration, phase)
        second = self._progress()
        if not second:
            return "torchrun's store does not answer, so nobody knows who is behind"
        groups: dict[tuple[bool, int, str], list[int]] = {}  # (is alive, iteration, phase) -> ranks
        for rank in range(self.world.size):
            _, at, doing = second.get(rank, NEVER_SEEN)
            groups.setdefault((first.get(rank) != second.get(rank), at, doing), []).append(rank)
        parts: list[str] = []
        for (alive, at, doing), ranks in sorted(groups.items(), key=_least_first):
            names = self._names(ranks, in_full=len(groups) > 1 and not parts)
            state = "alive, in" if alive else "silent, last seen in"
            parts.append(f"{names} {state} iteration {at} ({doing})")
        return "; ".join(parts)

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
        """Without waiting for it."""
        return self._try(lambda store: store.get(key) if store.check([key]) else None)

    def _try(self, action: Callable[[dist.Store], Answer]) -> Answer | None:
        """What the store answers; None if it does not."""
        if self.store is None:
            return None
        try:
            return action(self.store)
        except Exception:  # DistNetworkError, RuntimeError: whatever a broken connection raises
            return None


def _least_first(group: tuple[tuple[bool, int, str], list[int]]) -> tuple:
    """The silent, then who is furthest behind."""
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
    """Whether it has ended, and torchrun has not asked how."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:  # it has just gone, or this is not Linux
        return False
