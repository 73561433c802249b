"""Loads batches, each a function of (seed, epoch, position) and of nothing else: windows of block_size
tokens that do not overlap, in a permuted order, each once per epoch. The position is a number of samples, so
a resume sees exactly the samples that were left, with any number of GPUs or workers.

    B sequences per micro-step · A micro-steps · T tokens per sequence
"""

from __future__ import annotations

import itertools
import signal
import time
from collections.abc import Iterator

import numpy as np
import torch

from common.errors import RunError
from ops.documents import Documents, Edges
from training.batches.windows import Split, inputs_and_targets
from training.configuration.keys import TrainConfig
from training.process.exit_status import STOP_SIGNALS, WORKER_HINT
from training.process.work_timer import WorkTimer
from training.process.world import World

SIGNAL_SECONDS = 1.0  # within which the signal of a process that has ended arrives


class IterationBatches(torch.utils.data.Dataset):
    """This rank's micro-batches of any iteration, indexed by the position where the iteration starts."""

    def __init__(self, windows: Split, config: TrainConfig, world: World):
        self.windows, self.seed = windows, config.seed
        self.shape = (config.micro_steps, world.size, config.micro_batch)
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


class _ErrorsAsItems(torch.utils.data.Dataset):
    """The batches for a worker process. torch would raise a worker's error again with the worker's traceback
    as its message, so a RunError is handed over as an item, and Loader raises it."""

    def __init__(self, batches: IterationBatches):
        self.batches = batches

    def __getitem__(self, position: int) -> torch.Tensor | RunError:
        try:
            return self.batches[position]
        except RunError as error:
            return error


class Loader:
    """Returns the batches of one iteration after another. Its position is the number of samples returned.

    The next iteration's tokens are copied to the device during the current iteration: a GPU's copy engine
    works in parallel to its kernels.
    """

    def __init__(
        self,
        windows: Split,
        config: TrainConfig,
        world: World,
        position: int = 0,
        timer: WorkTimer | None = None,
        documents: Documents | None = None,
    ):
        self.timer, mask = timer, documents and documents.mask
        self.edges = mask if isinstance(mask, Edges) else None
        self.batches = IterationBatches(windows, config, world)
        self.position, self.device = position, world.device
        self.source: Iterator[torch.Tensor | RunError] = (
            self._workers(config) if config.use_dataloader else self._inline()
        )
        self.copies = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None
        self.ahead: torch.Tensor | None = None  # the next iteration's tokens, being copied to the device
        self.waited_seconds = 0.0  # total time spent in next()

    def next(self) -> tuple[torch.Tensor, torch.Tensor]:
        """x, y (A, B, T) on the device; y is x shifted by one. Does not wait for the device."""
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
        try:
            tokens = next(self.source)
        except (ConnectionError, EOFError) as error:  # the worker was killed while it handed over a batch
            # Its SIGCHLD follows, for which torch raises an error that says more; later it would interrupt
            # the closing of the record.
            time.sleep(SIGNAL_SECONDS)
            raise RunError(f"DataLoader worker has ended ({error!r}); {WORKER_HINT}") from error
        if isinstance(tokens, RunError):
            raise tokens
        if self.edges:
            self.edges.expect(inputs_and_targets(tokens)[0])
        with torch.cuda.stream(self.copies):  # on a CPU it is None, which has no effect
            return tokens.to(self.device, non_blocking=True)

    def close(self) -> None:
        """Ends the worker processes, if there are any."""
        self.source = iter(())  # the workers end when their iterator is deleted

    def _inline(self) -> Iterator[torch.Tensor]:
        for position in itertools.count(self.position, self.batches.samples):
            tokens = self.batches[position]
            yield tokens.pin_memory() if self.device.type == "cuda" else tokens

    def _workers(self, config: TrainConfig) -> Iterator[torch.Tensor | RunError]:
        workers = config.dataloader_num_workers
        loader = torch.utils.data.DataLoader(
            _ErrorsAsItems(self.batches),
            batch_size=None,
            sampler=itertools.count(self.position, self.batches.samples),
            num_workers=workers,
            persistent_workers=workers > 0,
            prefetch_factor=config.dataloader_prefetch_factor if workers else None,
            pin_memory=self.device.type == "cuda",
            worker_init_fn=_ignore_signals,
            generator=torch.Generator(),  # so that no seed is drawn from the generator that dropout uses
        )
        return iter(loader)


def _ignore_signals(worker_id: int) -> None:
    """The training process handles stop requests, and it needs batches until it has stopped. It ends the
    workers through their queues; if it has ended without that, they end by themselves."""
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
