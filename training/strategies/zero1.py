"""ZeRO-1: as DDP, but each rank updates only its rows of the weights. training/strategies/strategy.py says
what each method is for."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn as nn

from model import Transformer
from ops.linear import refresh_weights
from training.configuration.keys import TrainConfig
from training.process.work_timer import WorkTimer
from training.process.world import Waits, World, all_gather, reduce_scatter, start_together
from training.strategies.replicated import Bucket, Replicated, padded_shape
from training.strategies.strategy import Shard, norm, norms


class Zero1(Replicated):
    """ZeRO stage 1 (Rajbhandari et al. 2020, sec. 5.1): working weights and gradients are replicated; the
    optimizer's own weights and moments are sharded by rows of the matrices.

    During the last backward, reduce-scatter brings each rank its rows of a gradient, in place. Each rank
    updates its rows, and the rows are all-gathered in the compute dtype. Vectors, a hundred-thousandth of a
    model, are updated by every rank.
    """

    def __init__(self, model: Transformer, config: TrainConfig, world: World, timer: WorkTimer | None = None):
        # name -> the working matrix with its padding, which is what is gathered
        self.padded: dict[str, torch.Tensor] = {}
        super().__init__(model, config, world, timer)
        self.row_group = dist.group.WORLD
        self.of_name = {shard.name: shard for shard in self.shards}

    def _make_shard(self, name: str, parameter: nn.Parameter) -> Shard:
        if parameter.ndim < 2:
            return super()._make_shard(name, parameter)
        whole = parameter.data
        own = whole[self._span(whole)].to(self.param_dtype, copy=True)
        self.padded[name] = whole.new_zeros(padded_shape(whole, self.world.size), dtype=self.dtype)
        self.padded[name][: len(whole)] = whole
        parameter.data = self.padded[name][: len(whole)]
        copy = self.padded[name][self._span(whole)][: len(own)]
        start = self._span(whole).start * whole.shape[1:].numel()
        return Shard.of(name, parameter, own, working_copy=copy, start=start)

    def _span(self, matrix: torch.Tensor) -> slice:
        """This rank's rows of a matrix; the last ranks may have fewer, as with FSDP."""
        rows = -(-len(matrix) // self.world.size)
        return slice(self.world.rank * rows, (self.world.rank + 1) * rows)

    def _mine(self, shard: Shard, whole: torch.Tensor) -> torch.Tensor:
        return whole[self._span(whole)][: len(shard.local)] if shard.is_matrix else whole

    def _reduce(self, buckets: list[Bucket], op: dist.ReduceOp.RedOpType) -> None:
        matrices = [matrix for bucket in buckets for matrix in bucket.matrices]
        start_together(reduce_scatter, [(m[self._span(m)], m) for m in matrices], self.works, op=op)
        self._all_reduce([bucket.vectors for bucket in buckets if len(bucket.vectors)], op)

    def _norms_of(self, buckets: list[Bucket]) -> list[torch.Tensor]:
        """Of this rank's rows of the matrices."""
        mine = [
            self._mine(self.of_name[name], view)
            for bucket in buckets
            for name, view in self._reduced(bucket).views.items()
            if name in self.padded
        ]
        return [norms(mine)] if mine else []

    def loss_and_norm(self) -> tuple[torch.Tensor, torch.Tensor]:
        squares = torch.linalg.vector_norm(torch.cat(self.norms)).float().square()
        both = torch.stack([self.loss / self.world.size, squares])
        dist.all_reduce(both)
        loss, squares = both.unbind()
        vectors = [shard.grad for shard in self.trained if not shard.is_matrix]
        return loss, (squares + norm(vectors).square() if vectors else squares).sqrt()

    @torch.no_grad()
    def publish(self, copied: bool = False) -> None:
        if not copied:
            self._copy_back()
        # in place: each rank's rows are already where they belong
        gathers: list[Waits] = []
        start_together(all_gather, [(m, m[self._span(m)]) for m in self.padded.values()], gathers)
        for gather in gathers:
            gather.wait()
        refresh_weights(self.module)
