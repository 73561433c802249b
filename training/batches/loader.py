"""Batches. A batch is a function of (seed, epoch, position) and of nothing else: windows of block_size tokens
that do not overlap, in a permuted order, each once an epoch. The position is a number of samples, so a resume
sees exactly the samples that were left, with any number of GPUs or workers.

    B sequences per micro-step · A micro-steps · T tokens per sequence
"""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from fractions import Fraction

import numpy as np
import torch

from training.batches.token_files import TokenFiles
from training.configuration.keys import TrainConfig
from training.process.world import World

ROUNDS = 6  # Feistel rounds; four already pass for random (Luby and Rackoff 1988), two more cost nothing


def permute(index: np.ndarray, n: int, seed: int) -> np.ndarray:
    """Where a permutation of range(n), drawn by seed, sends each index; needs no memory proportional to n.

    A Feistel network on the smallest even number of bits that holds n, walked until it lands below n
    (Black and Rogaway 2002, sec. 4).
    """
    half = max(1, ((n - 1).bit_length() + 1) // 2)
    mask = np.uint64((1 << half) - 1)
    keys = np.random.SeedSequence(seed).generate_state(ROUNDS, np.uint64)
    value = _feistel(index.astype(np.uint64), half, mask, keys)
    while (outside := value >= n).any():
        value[outside] = _feistel(value[outside], half, mask, keys)
    return value.astype(np.int64)


def _feistel(value: np.ndarray, half: int, mask: np.uint64, keys: np.ndarray) -> np.ndarray:
    left, right = value >> np.uint64(half), value & mask
    for key in keys:
        mixed = (right + key) * np.uint64(0x9E3779B97F4A7C15)  # 2^64 / golden ratio, Knuth's multiplier
        mixed = (mixed ^ (mixed >> np.uint64(29))) * np.uint64(0xBF58476D1CE4E5B9)  # splitmix64's
        left, right = right, left ^ ((mixed >> np.uint64(32)) & mask)
    return (left << np.uint64(half)) | right


class Split:
    """What a loader reads: `count` windows an epoch, by read(indices, epochs)."""

    @property
    def parts(self) -> dict[str, tuple[Fraction, Split]]:
        """{source: (weight, its split)}; only a Mixture has several."""
        return {"": (Fraction(1), self)}

    def places(self, numbers: np.ndarray, seed: int) -> tuple[np.ndarray, np.ndarray]:
        """(window indices, epochs) of the samples with these numbers, each window once an epoch."""
        epochs, inside = np.divmod(numbers, self.count)
        indices = np.empty_like(inside)
        for epoch in np.unique(epochs):
            here = epochs == epoch
            indices[here] = permute(inside[here], self.count, seed=hash_seed(seed, int(epoch)))
        return indices, epochs

    def samples(self, numbers: np.ndarray, seed: int) -> np.ndarray:
        """The samples with these numbers (N,) as (N, T + 1) token ids, int64."""
        return self.read(*self.places(numbers, seed))


class Windows(Split):
    """A split cut into windows of block_size inputs and the token after them."""

    def __init__(self, tokens: TokenFiles, block_size: int):
        self.tokens, self.block_size = tokens, block_size
        self.count = (tokens.total - 1) // block_size

    def read(self, indices: np.ndarray, epochs: np.ndarray | int = 0) -> np.ndarray:
        """The windows (len(indices), T + 1) as int64, cut as in the given epochs."""
        starts = indices * self.block_size + epoch_offset(
            np.broadcast_to(epochs, indices.shape), self.block_size
        )
        self.tokens.prefetch(starts, self.block_size + 1)
        return np.stack([self.tokens.read(int(s), self.block_size + 1) for s in starts]).astype(np.int64)


def epoch_offset(epoch: np.ndarray, block_size: int) -> np.ndarray:
    """Where an epoch's first window starts; the tokens wrap around. Each epoch cuts them elsewhere, so that a
    token is not always in the same place behind the same context: with one cut for all epochs small data is
    learned by heart sooner (LOG.md). Golden-ratio steps spread the cuts; epoch 0 starts at the first token.
    """
    return (epoch * int(block_size * 0.6180339887498949)) % block_size


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


def hash_seed(seed: int, stream: int) -> int:
    """One seed for each (seed, stream), so that epochs are shuffled independently."""
    return int(np.random.SeedSequence((seed, stream)).generate_state(1, np.uint64)[0])


def inputs_and_targets(tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x, y (..., T) of rows (..., T + 1); y is x shifted by one. A negative id is padding: as a target no
    loss counts it, and as an input it is the end-of-text id whose complement it is (training/batches/packing.py)."""
    x, y = tokens[..., :-1], tokens[..., 1:]
    return torch.where(x < 0, ~x, x), y.contiguous()


class Loader:
    """Hands out one iteration after another and knows the position: the samples handed out so far.

    The next iteration's tokens are copied to the device while this one's are trained on: a GPU's copy engine
    works beside its kernels.
    """

    def __init__(self, windows: Split, config: TrainConfig, world: World, position: int = 0):
        self.batches = IterationBatches(windows, config, world)
        self.position, self.device = position, world.device
        self.source = self._workers(config) if config.use_dataloader else self._inline()
        self.copies = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None
        self.ahead = None  # the next iteration's tokens, on their way to the device
        self.waited_seconds = 0.0  # in next(), in total

    def next(self) -> tuple[torch.Tensor, torch.Tensor]:
        """x, y (A, B, T) on the device; y is x shifted by one. Nothing waits for the device."""
        began = time.perf_counter()
        tokens = self._fetch() if self.ahead is None else self.ahead
        if self.copies is not None:
            torch.cuda.current_stream().wait_stream(self.copies)
            tokens.record_stream(torch.cuda.current_stream())
        x, y = inputs_and_targets(tokens)
        self.position += self.batches.samples
        self.ahead = self._fetch()
        self.waited_seconds += time.perf_counter() - began
        return x, y

    def _fetch(self) -> torch.Tensor:
        tokens = next(self.source)
        with torch.cuda.stream(self.copies):  # None, on a CPU, changes nothing
            return tokens.to(self.device, non_blocking=True)

    def close(self) -> None:
        """Ends the worker processes, if there are any."""
        self.source = None

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
