"""Names a rank that the others wait for, and reports when it is no longer slow."""

from __future__ import annotations

import logging
import statistics
from collections.abc import Callable
from typing import NamedTuple

from training.configuration.keys import TrainConfig
from training.configuration.rules import captures_cuda_graphs
from training.faults.consensus import Consensus
from training.faults.watchdog import Watchdog
from training.process.work_timer import WorkTimer
from training.process.world import World
from training.records.run_record import RunRecord

log = logging.getLogger("nanomfu")

SLOW = 1.5  # a slow rank's own work takes more than this, times the median rank's own work
SLOW_SECONDS = 0.02  # and takes at least so much longer; less is the noise of a busy operating system
IN_A_ROW = 8  # consecutive iterations in which a rank must be slow: it is named within 20


def make_work_timer(config: TrainConfig, world: World, watchdog: Watchdog) -> WorkTimer | None:
    """A timer for the loader, the step and FSDP. None for one process, and None with CUDA graphs, because
    nothing can be measured inside a replay."""
    if world.size == 1 or captures_cuda_graphs(config):
        return None
    return WorkTimer(world.device.type == "cuda", watchdog.enter_phase)


class Stragglers:
    """Each rank tells the others how long its own work takes; rank 0 logs which ranks are slow."""

    def __init__(
        self,
        timer: WorkTimer | None,
        world: World,
        consensus: Consensus,
        name: Callable[[int], str],
        record: RunRecord | None,
    ):
        """name: of a rank, for messages."""
        self.timer, self.consensus, self.name, self.record = timer, consensus, name, record
        self.detector = StragglerDetector(world.size) if world.is_main else None

    def check(self, iteration: int) -> None:
        """In every iteration. All ranks. Does not wait: the answers come from an earlier iteration."""
        if self.timer is None:
            return
        self.consensus.ask("own_seconds", self.timer.seconds())
        if self.detector is None:
            return
        for rank, kind, own, median in self.detector.changes(self.consensus.by_rank("own_seconds")):
            is_slow = kind == "straggler"
            what = "is a straggler, the others wait for it" if is_slow else "is no straggler any more"
            times = f"{own:.0f} ms of own work an iteration; the median rank {median:.0f}"
            log.warning(f"{self.name(rank)} {what}: {times}")
            if self.record is not None:
                self.record.add_event(iteration, kind, rank=rank, own_ms=own, median_ms=median)


class Change(NamedTuple):
    """A rank has become slow, or is no longer slow."""

    rank: int
    kind: str  # of the event
    own_ms: float
    median_ms: float  # of all ranks


class StragglerDetector:
    """Finds slow ranks, from the medians of all ranks, iteration by iteration."""

    def __init__(self, ranks: int):
        self.slow_for = [0] * ranks  # iterations in a row
        self.named: set[int] = set()

    def changes(self, seconds: list[float]) -> list[Change]:
        """The ranks that have become slow, or are no longer slow. A zero means: not measured yet."""
        if not all(seconds):
            return []
        usual = statistics.median_low(seconds)
        changes = []
        for rank, own in enumerate(seconds):
            is_slow = own > SLOW * usual and own - usual > SLOW_SECONDS
            self.slow_for[rank] = self.slow_for[rank] + 1 if is_slow else 0
            if self.slow_for[rank] == IN_A_ROW or (not is_slow and rank in self.named):
                self.named ^= {rank}
                kind = "straggler" if is_slow else "no_straggler"
                changes.append(Change(rank, kind, 1000 * own, 1000 * usual))
        return changes
