"""Whole matrices from row shards, and back. Each matrix has one owner among the ranks that share its rows.

One all-to-all brings the rows of every matrix to its owner, another brings rows of the results back. So a
strategy keeps its shards, checkpoints and gathers as they are, and an optimizer gets whole matrices. Where
nothing is sharded, every rank owns all matrices, and nothing is sent.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from training.strategies.strategy import Shard


class Owners:
    """Which rank of `group` owns which matrix. Ranks have ceil(rows / ranks) rows of each, the last ones
    fewer, as ZeRO-1 and FSDP2 divide them."""

    def __init__(self, shards: list[Shard], costs: list[int], group: dist.ProcessGroup | None):
        """costs: of the owner's work, for each matrix. group: None where every rank has whole matrices."""
        self.shapes = [tuple(shard.parameter.shape) for shard in shards]
        self.group = group
        self.parts = 1 if group is None else dist.get_world_size(group)
        self.rank = 0 if group is None else dist.get_rank(group)
        owner = assign(costs, self.parts)
        self.of_rank = [[i for i, o in enumerate(owner) if o == rank] for rank in range(self.parts)]
        self.mine = self.of_rank[self.rank]

    def gather(self, rows: list[torch.Tensor]) -> dict[int, torch.Tensor]:
        """This rank's rows of every matrix, in one dtype -> {number: matrix} of those that it owns. All
        ranks of the group."""
        if self.parts == 1:
            return dict(enumerate(rows))
        received = self._exchange(
            [[rows[i] for i in owned] for owned in self.of_rank],
            [[self._shape(i, rank) for i in self.mine] for rank in range(self.parts)],
        )
        return {i: torch.cat(parts) for i, *parts in zip(self.mine, *received, strict=True)}

    def scatter(self, wholes: dict[int, torch.Tensor]) -> list[torch.Tensor]:
        """The inverse of gather(): this rank's rows of every matrix."""
        if self.parts == 1:
            return list(wholes.values())
        divided = [
            wholes[i].split([self._shape(i, rank)[0] for rank in range(self.parts)]) for i in self.mine
        ]
        received = self._exchange(
            [[parts[rank] for parts in divided] for rank in range(self.parts)],
            [[self._shape(i, self.rank) for i in owned] for owned in self.of_rank],
        )
        rows = {
            i: part
            for owned, parts in zip(self.of_rank, received, strict=True)
            for i, part in zip(owned, parts, strict=True)
        }
        return [rows[i] for i in range(len(self.shapes))]

    def _shape(self, matrix: int, rank: int) -> tuple[int, int]:
        """Of this rank's part of a matrix."""
        rows, columns = self.shapes[matrix]
        each = -(-rows // self.parts)
        return max(0, min(rows, (rank + 1) * each) - rank * each), columns

    def _exchange(
        self, messages: list[list[torch.Tensor]], shapes: list[list[tuple[int, int]]]
    ) -> list[list[torch.Tensor]]:
        """messages: what each rank gets from this one; shapes: of what each rank sends to this one."""
        flat = torch.cat([tensor.reshape(-1) for message in messages for tensor in message])
        sizes = [[rows * columns for rows, columns in of_rank] for of_rank in shapes]
        received = flat.new_empty(sum(map(sum, sizes)))
        width = flat.element_size()  # sent as bytes: gloo's all-to-all knows no bf16
        dist.all_to_all_single(
            received.view(torch.uint8),
            flat.view(torch.uint8),
            [width * sum(of_rank) for of_rank in sizes],
            [width * sum(tensor.numel() for tensor in message) for message in messages],
            group=self.group,
        )
        parts = iter(received.split([size for of_rank in sizes for size in of_rank]))
        return [[next(parts).view(shape) for shape in of_rank] for of_rank in shapes]


def assign(costs: list[int], parts: int) -> list[int]:
    """The owner of each matrix: the dearest first, each to the rank that has least to do. Equal on all
    ranks."""
    load, owner = [0] * parts, [0] * len(costs)
    for i in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        owner[i] = min(range(parts), key=lambda rank: (load[rank], rank))
        load[owner[i]] += costs[i]
    return owner
