"""Reads the token files of one split as one sequence of ids.

The trap: token windows come from anywhere in a dataset, and of a file the operating system reads ahead, up to
megabytes for a window of kilobytes. So files are opened for random access
(training/batches/random_access.py), and everything that an iteration needs is requested at once.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator
from itertools import accumulate
from pathlib import Path

import numpy as np

from common.errors import RunError
from data.pipeline.token_files import largest_id, plain_ids
from training.batches.random_access import forget_open_files, read_bytes, request


class TokenFiles:
    """The files of one split as one sequence of token ids; negative: no target of training."""

    def __init__(self, paths: list[Path], sizes: list[int], dtype: np.dtype, vocab_size: int):
        """sizes: bytes of each file; vocab_size: an id that is not below it is refused."""
        self.paths, self.sizes, self.dtype, self.vocab_size = paths, sizes, dtype, vocab_size
        self.starts = list(accumulate((size // dtype.itemsize for size in sizes), initial=0))  # in tokens
        forget_open_files()

    @property
    def total(self) -> int:
        return self.starts[-1]

    def read(self, start: int, count: int) -> np.ndarray:
        """`count` ids from position `start` on, across file boundaries; after the last id comes the first."""
        pieces = []
        for file, offset, length in self._pieces(start, count):
            place = (offset * self.dtype.itemsize, length * self.dtype.itemsize)
            ids = np.frombuffer(read_bytes(self.paths[file], self.sizes[file], *place), self.dtype)
            if largest_id(ids) >= self.vocab_size:
                self._refuse(file, offset, ids)
            pieces.append(ids)
        return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)

    def prefetch(self, starts: Iterable[int], count: int) -> None:
        """Requests all these places at once, so that read() need not wait for one after the other."""
        for start in starts:
            for file, offset, length in self._pieces(int(start), count):
                place = (offset * self.dtype.itemsize, length * self.dtype.itemsize)
                request(self.paths[file], self.sizes[file], *place)

    def _pieces(self, start: int, count: int) -> Iterator[tuple[int, int, int]]:
        """(number of a file, offset in it, length) of each piece; offset and length in tokens."""
        start %= self.total
        file = bisect_right(self.starts, start) - 1
        while count > 0:
            offset = start - self.starts[file]
            length = min(count, self.starts[file + 1] - start)
            yield file, offset, length
            count, file = count - length, (file + 1) % len(self.paths)
            start = self.starts[file]

    def _refuse(self, file: int, offset: int, ids: np.ndarray) -> None:
        ids = plain_ids(ids)
        place = int((ids >= self.vocab_size).argmax())
        raise RunError(
            f"{self.paths[file]} contains token id {int(ids[place]):,} at {offset + place:,}, beyond the "
            f"model's vocab_size={self.vocab_size:,}: it is damaged, or was changed after it was checked; "
            "python -m data.inspect DATASET --hash finds every such file"
        )
