"""Reads the token files of one split as one sequence of ids.

The trap: token windows come from anywhere in a dataset, and of a memory-mapped file the operating system
reads ahead, up to megabytes for a window of kilobytes. So files are mapped for random access, and everything
that an iteration needs is requested at once.
"""

from __future__ import annotations

import functools
import mmap
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from itertools import accumulate
from pathlib import Path

import numpy as np

from training.configuration.errors import RunError

# Of all datasets together: a process may have 1024 files open, and a dataset can have thousands of shards.
OPEN_FILES = 256


class TokenFiles:
    """The files of one split as one sequence of token ids, memory-mapped while they are in use."""

    def __init__(self, paths: list[Path], sizes: list[int], dtype: np.dtype, vocab_size: int):
        """sizes: bytes of each file; vocab_size: an id that is not below it is refused."""
        self.paths, self.sizes, self.dtype, self.vocab_size = paths, sizes, dtype, vocab_size
        self.starts = list(accumulate((size // dtype.itemsize for size in sizes), initial=0))  # in tokens
        _map_file.cache_clear()  # a file may have been replaced since it was mapped

    @property
    def total(self) -> int:
        return self.starts[-1]

    def read(self, start: int, count: int) -> np.ndarray:
        """`count` ids from position `start` on, across file boundaries; after the last id comes the first."""
        pieces = []
        for file, offset, length in self._pieces(start, count):
            ids = self._map(file)[1][offset : offset + length]
            if int(ids.max()) >= self.vocab_size:
                self._refuse(file, offset, ids)
            pieces.append(ids)
        return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)

    def prefetch(self, starts: Iterable[int], count: int) -> None:
        """Requests all these places at once, so that read() need not wait for one after the other."""
        for start in starts:
            for file, offset, length in self._pieces(int(start), count):
                first, last = offset * self.dtype.itemsize, (offset + length) * self.dtype.itemsize
                page = first - first % mmap.PAGESIZE
                self._map(file)[0].madvise(mmap.MADV_WILLNEED, page, last - page)

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

    def _map(self, file: int) -> tuple[mmap.mmap, np.ndarray]:
        return _map_file(self.paths[file], self.sizes[file], self.dtype)

    def _refuse(self, file: int, offset: int, ids: np.ndarray) -> None:
        place = int((ids >= self.vocab_size).argmax())
        raise RunError(
            f"{self.paths[file]} contains token id {int(ids[place]):,} at {offset + place:,}, beyond the "
            f"model's vocab_size={self.vocab_size:,}: it is damaged, or was changed after it was checked; "
            "python -m data.inspect DATASET --hash finds every such file"
        )


@functools.lru_cache(OPEN_FILES)
def _map_file(path: Path, size: int, dtype: np.dtype) -> tuple[mmap.mmap, np.ndarray]:
    """Maps a file. A file that the cache has dropped stays open as long as a view of it is in use."""
    with open(path, "rb") as file:
        mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    if len(mapping) != size:
        raise RunError(f"{path} had {size:,} bytes when the run started and has {len(mapping):,} now")
    mapping.madvise(mmap.MADV_RANDOM)  # do not read ahead
    return mapping, np.frombuffer(mapping, dtype)
