"""Reads rows of tensors that are stored in several safetensors files. So a rank reads its own rows, whichever
strategy divided the tensors, and among how many ranks.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path

import torch

from common.errors import UserError
from training.checkpoints.tensor_files import Part, Place, mapped


class TensorFiles:
    """Tensors whose parts are rows that follow each other. Raises ValueError if one is incomplete.

    halves: names of tensors whose files have the even rows first, then the odd ones: Hugging Face's gate_proj
    and up_proj, and our own checkpoints of format 2. They are read as row 0, 1, 2, ...
    """

    def __init__(self, parts: Iterable[tuple[Part, Place]], halves: Collection[str] = ()):
        self.stored: dict[str, list[tuple[Part, Place]]] = defaultdict(list)
        for part, place in sorted(parts, key=lambda item: item[0].offsets):
            self.stored[part.name].append((part, place))
        self.wholes = {name: _whole([part for part, _ in found]) for name, found in self.stored.items()}
        self.halves = frozenset(halves)
        for name in self.halves & self.wholes.keys():
            if not self.wholes[name].shape or self.wholes[name].end % 2:
                raise ValueError(f"the rows of {name} are not pairs")

    def load_all(self, tensors: dict[Part, torch.Tensor], where: Path) -> None:
        """load() of each. `where`: the folder that was read. Raises UserError."""
        try:
            for part, tensor in tensors.items():
                self.load(part, tensor)
        except (OSError, RuntimeError, ValueError) as error:
            raise UserError(f"{where} cannot be loaded: {error}") from error

    def load(self, part: Part, tensor: torch.Tensor) -> None:
        """Copies a part of a tensor, its rows from here to there, into `tensor`. Raises ValueError."""
        whole = self.wholes.get(part.name)
        if whole is None or len(whole.shape) != len(part.shape) or whole.shape[1:] != part.shape[1:]:
            raise ValueError(f"{part.name} is {whole and whole.shape}, and {part.shape} was asked for")
        if not part.shape:
            tensor.copy_(mapped(*self.stored[part.name][0]))
            return
        # else the rows that are not there would stay as they were; a rank without rows is beyond the end
        if part.shape[0] and part.end > whole.end:
            raise ValueError(f"{part.name} has {whole.end:,} rows, and {part.end:,} were asked for")
        for where, rows in self._pieces(part.name, range(part.offsets[0], part.end)):
            tensor[where].copy_(rows)

    def read_rows(self, name: str, rows: range) -> torch.Tensor:
        """These rows of a tensor; a copy in memory only if they are in several places."""
        pieces = list(self._pieces(name, rows))
        if len(pieces) == 1:
            return pieces[0][1]
        whole = self.wholes[name]
        found = torch.empty(len(rows), *whole.shape[1:], dtype=whole.dtype)
        for where, piece in pieces:
            found[where] = piece
        return found

    def _pieces(self, name: str, rows: range) -> Iterator[tuple[slice, torch.Tensor]]:
        """(which of the rows, the file's content), for each part that has some of them."""
        if name not in self.halves:
            yield from self._stored_pieces(name, rows)
            return
        half = self.wholes[name].end // 2
        for i in range(2 if rows.step == 1 else 1):
            mine = rows[i::2] if rows.step == 1 else rows
            first = mine.start // 2 + half * (mine.start % 2)
            for where, piece in self._stored_pieces(name, range(first, first + len(mine))):
                yield (slice(i + 2 * where.start, i + 2 * where.stop, 2) if rows.step == 1 else where), piece

    def _stored_pieces(self, name: str, rows: range) -> Iterator[tuple[slice, torch.Tensor]]:
        """The same, counted in the order of the files."""
        for part, place in self.stored[name]:
            start, step = part.offsets[0], rows.step
            mine = range(max(rows.start, start + (rows.start - start) % step), min(rows.stop, part.end), step)
            if mine:
                first = (mine.start - rows.start) // step
                piece = mapped(part, place)[mine.start - start : mine.stop - start : step]
                yield slice(first, first + len(mine)), piece


def _whole(parts: list[Part]) -> Part:
    """The tensor that these parts make: rows, as every strategy divides it, without a gap."""
    first = parts[0]
    if len(parts) > 1 and not first.shape:
        raise ValueError(f"{first.name} is there twice")
    if len({(part.dtype, len(part.shape), part.shape[1:]) for part in parts}) > 1:
        raise ValueError(f"the parts of {first.name} are not of one kind")
    end = 0
    for part in parts:
        if part.offsets != (end, *(0,) * (len(part.shape) - 1))[: len(part.shape)]:
            raise ValueError(f"the parts of {part.name} do not make a whole")
        end += part.shape[0] if part.shape else 0
    return first._replace(shape=(end, *first.shape[1:])) if first.shape else first
