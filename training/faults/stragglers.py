"""Which rank the others wait for. Synchronous ranks all take equally long for an iteration, so its time says
nothing: what counts is a rank's own work, from asking for the batch to the end of the last forward. Gradients
travel only after that; FSDP's waits for the weights of others are taken out.

A GPU's time is taken by events on its stream and read when they have long passed: nothing waits for them.
"""

from __future__ import annotations

import logging
import statistics
import time
from collections import deque
from dataclasses import dataclass

import torch

from training.batches.loader import Loader
from training.configuration.keys import TrainConfig
from training.faults.watchdog import Watch
from training.process.world import World
from training.records.run_record import RunRecord
from training.strategies.fsdp import Fsdp

log = logging.getLogger("nanomfu")

SLOW = 1.5  # times the median rank's own time
SLOW_SECONDS = 0.02  # longer than that rank, at least; less is the noise of a busy operating system
RECENT = 10  # measured iterations; a rank tells the others their median
IN_A_ROW = 8  # iterations in which it must look slow: it is named within 20
WARMUP_ITERS = 5  # of this process: compilation
UNREAD = 64  # iterations that a GPU may be behind


def watch_stragglers(
    loader: Loader,
    strategy,
    config: TrainConfig,
    world: World,
    watch: Watch,
    record: RunRecord | None,
) -> None:
    """Measures around the loader's next() and the strategy's forward from here on, and tells `watch` which of
    them it is; rank 0 logs who is slow. Not with CUDA Graphs: a replay has no inside. All ranks."""
    if world.size == 1 or config.use_cuda_graphs:
        return
    own, judge = OwnTime(world), Judge(world.size)
    next_batch, forward = loader.next, strategy.forward

    def timed_next():
        watch.agreement.ask("own_seconds", own.seconds())
        if world.is_main:
            for news in judge.look(watch.agreement.by_rank("own_seconds")):
                log.warning(f"{watch.peers.name(news.rank)} {news}")
                record.add_event(watch.iteration, news.kind, rank=news.rank, **news.times)
        own.begin()
        watch.phase = "batch"
        batch = next_batch()
        watch.phase = "forward"
        return batch

    def timed_forward(x, y):
        loss = forward(x, y)
        own.end()
        watch.phase = "backward"  # and what follows: the update, the other micro-steps
        return loss

    loader.next, strategy.forward = timed_next, timed_forward
    if isinstance(strategy, Fsdp):
        for module in (*strategy.module.blocks, strategy.module):  # around FSDP's own hook, which waits
            module.register_forward_pre_hook(lambda module, inputs: own.begin_wait(), prepend=True)
            module.register_forward_pre_hook(lambda module, inputs: own.end_wait())


class OwnTime:
    """Seconds of this rank's own work in each iteration."""

    def __init__(self, world: World):
        self.on_gpu = world.device.type == "cuda"
        self.marks: list | None = None  # of this iteration: begin, waits, end
        self.unread = deque(maxlen=UNREAD)  # of iterations that a GPU may not have completed
        self.recent = deque(maxlen=RECENT)  # seconds
        self.iterations = 0

    def begin(self) -> None:
        if self.marks and self.marks[2] and self.iterations > WARMUP_ITERS:
            self.unread.append(self.marks)
        self.iterations += 1
        self.marks = [self._now(), [], None]

    def end(self) -> None:
        """After each micro-step's forward; the last one counts."""
        self.marks[2] = self._now()

    def begin_wait(self) -> None:
        if self.marks:
            self.marks[1].append([self._now(), None])

    def end_wait(self) -> None:
        if self.marks:
            self.marks[1][-1][1] = self._now()

    def seconds(self) -> float:
        """The median of the iterations that were completed last; 0 before there are enough."""
        while self.unread and (not self.on_gpu or self.unread[0][2].query()):
            begin, waits, end = self.unread.popleft()
            self.recent.append(self._between(begin, end) - sum(self._between(*wait) for wait in waits))
        return statistics.median(self.recent) if len(self.recent) == RECENT else 0.0

    def _now(self):
        if not self.on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _between(self, first, second) -> float:
        return first.elapsed_time(second) / 1000 if self.on_gpu else second - first


@dataclass(frozen=True)
class News:
    """What rank 0 says of a rank."""

    rank: int
    is_slow: bool
    own_ms: float
    median_ms: float  # of all ranks

    def __str__(self) -> str:
        what = "is a straggler, the others wait for it" if self.is_slow else "is no straggler any more"
        return f"{what}: {self.own_ms:.0f} ms of own work an iteration; the median rank {self.median_ms:.0f}"

    @property
    def kind(self) -> str:
        return "straggler" if self.is_slow else "no_straggler"

    @property
    def times(self) -> dict[str, float]:
        return {"own_ms": self.own_ms, "median_ms": self.median_ms}


class Judge:
    """Who is slow, from the medians of all ranks, iteration by iteration."""

    def __init__(self, ranks: int):
        self.slow_for = [0] * ranks  # iterations in a row
        self.named: set[int] = set()

    def look(self, seconds: list[float]) -> list[News]:
        """Of ranks that have become slow, or are not any more. A zero says nothing yet."""
        if not all(seconds):
            return []
        usual = statistics.median_low(seconds)
        news = []
        for rank, own in enumerate(seconds):
            is_slow = own > SLOW * usual and own - usual > SLOW_SECONDS
            self.slow_for[rank] = self.slow_for[rank] + 1 if is_slow else 0
            if self.slow_for[rank] == IN_A_ROW:
                self.named.add(rank)
                news.append(News(rank, True, 1000 * own, 1000 * usual))
            elif not is_slow and rank in self.named:
                self.named.discard(rank)
                news.append(News(rank, False, 1000 * own, 1000 * usual))
        return news
