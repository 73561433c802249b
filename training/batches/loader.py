"""Batches. A batch is a function of (seed, epoch, position) and of nothing else: windows of block_size tokens
that do not overlap, in a permuted order, each once an epoch. The position is a number of samples, so a resume
sees exactly the samples that were left, with any number of GPUs or workers.

    B sequences per micro-step · A micro-steps · T tokens per sequence
"""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator

import numpy as np
import torch

from training.batches.windows import Split, inputs_and_targets
from training.configuration.keys import TrainConfig
from training.process.work_timer import WorkTimer
from training.process.world import World


class IterationBatches(torch.utils.data.Dataset):
    """This rank's micro-batches of any iteration, by the position that the iteration starts at."""

    def __init__(self, windows: Split, config: TrainConfig, world: World):
        self.windows, self.seed = windows, config.seed
        self.shape = (config.gradient_accumulation_steps, world.size, config.batch_size)
        self.rank = world.rank
        self.samples = config.samples_per_iter(world.size)

    def numbers_at(self, position: int) -> np.ndarray:
        """(A, B) global sample numbers of this rank in the iteration that starts at `position`."""
        A, W, B = self.shape
        return position + np.arange(A * W * B).reshape(A, W, B)[:, self.rank]

    def __getitem__(self, position: int) -> torch.Tensor:
        """(A, B, T + 1) token ids, int64."""
        numbers = self.numbers_at(position)
        rows = self.windows.samples(numbers.ravel(), self.seed)
        return torch.from_numpy(rows.reshape(*numbers.shape, -1))


class Loader:
    """Hands out one iteration after another and knows the position: the samples handed out so far.

    The next iteration's tokens are copied to the device while this one's are trained on: a GPU's copy engine
    works beside its kernels.
    """

    def __init__(
        self,
        windows: Split,
        config: TrainConfig,
        world: World,
        position: int = 0,
        timer: WorkTimer | None = None,
    ):
        self.timer = timer
        self.batches = IterationBatches(windows, config, world)
        self.position, self.device = position, world.device
        self.source: Iterator[torch.Tensor] = (
            self._workers(config) if config.use_dataloader else self._inline()
        )
        self.copies = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None
        self.ahead: torch.Tensor | None = None  # the next iteration's tokens, on their way to the device
        self.waited_seconds = 0.0  # in next(), in total

    def next(self) -> tuple[torch.Tensor, torch.Tensor]:
        """x, y (A, B, T) on the device; y is x shifted by one. Nothing waits for the device."""
        if self.timer:
            self.timer.begin_batch()
        began = time.perf_counter()
        tokens = self._fetch() if self.ahead is None else self.ahead
        if self.copies is not None:
            torch.cuda.current_stream().wait_stream(self.copies)
            tokens.record_stream(torch.cuda.current_stream())
        x, y = inputs_and_targets(tokens)
        self.position += self.batches.samples
        self.ahead = self._fetch()
        self.waited_seconds += time.perf_counter() - began
        if self.timer:
            self.timer.begin_forward()
        return x, y

    def _fetch(self) -> torch.Tensor:
        tokens = next(self.source)
        with torch.cuda.stream(self.copies):  # None, on a CPU, changes nothing
            return tokens.to(self.device, non_blocking=True)

    def close(self) -> None:
        """Ends the worker processes, if there are any."""
        self.source = iter(())  # workers end with the iterator over them

    def _positions(self) -> Iterator[int]:
        position = self.position
        while True:
            yield position
            position += self.batches.samples

    def _inline(self) -> Iterator[torch.Tensor]:
        for position in self._positions():
            tokens = self.batches[position]
            yield tokens.pin_memory() if self.device.type == "cuda" else tokens

    def _workers(self, config: TrainConfig) -> Iterator[torch.Tensor]:
        workers = config.dataloader_num_workers
        loader = torch.utils.data.DataLoader(
            self.batches,
            batch_size=None,
            sampler=_Endless(self._positions),
            num_workers=workers,
            persistent_workers=workers > 0,
            prefetch_factor=config.dataloader_prefetch_factor if workers else None,
            pin_memory=self.device.type == "cuda",
            worker_init_fn=_ignore_signals,
            generator=torch.Generator(),  # its seed must not be drawn from the generator that dropout uses
        )
        return iter(loader)


class _Endless(torch.utils.data.Sampler):
    """A sampler around a function that returns an iterator."""

    def __init__(self, make):
        self.make = make

    def __iter__(self):
        return self.make()


def _ignore_signals(worker_id: int) -> None:
    """Stop requests are the training process's to handle, which needs its batches until it has stopped; it
    ends the workers by their queues, and they end by themselves if it is gone."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
