"""Strategies that hold whole working weights on every rank: one process, DDP and ZeRO-1.
training/strategies/strategy.py says what each method is for."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import Shard as ShardOn

from model import Transformer
from ops.embedding import Embedding
from ops.linear import Linear, refresh_weights
from training.configuration.dtypes import DTYPES
from training.configuration.keys import TrainConfig
from training.process.work_timer import WorkTimer
from training.process.world import World, all_gather, reduce_scatter
from training.strategies.strategy import Shard, norm, whole_shape

LOSS_ROOM = 4  # floats; so the size of a message stays a multiple of 16 bytes


class Bucket:
    """The gradient sums of some modules, as views of one fp32 tensor: matrices first, then vectors. With
    gradient_dtype='bfloat16', matrices have a tensor of their own.

    They live as long as the run: the backward adds to them in place, and they are communicated in place.
    After the gradients there is space for the iteration's loss, so that it travels with the last bucket.
    """

    def __init__(
        self, parameters: dict[str, nn.Parameter], world_size: int, dtype: torch.dtype = torch.float32
    ):
        device = next(iter(parameters.values())).device
        of_matrices = {n: _padded_shape(p, world_size) for n, p in parameters.items() if p.ndim >= 2}
        of_vectors = {n: tuple(p.shape) for n, p in parameters.items() if p.ndim < 2}
        elements = sum(map(math.prod, of_matrices.values()))
        separate = dtype != torch.float32
        rest = sum(map(math.prod, of_vectors.values())) + LOSS_ROOM
        self.flat = torch.zeros(rest if separate else elements + rest, device=device)
        self.loss, gradients = self.flat[-1], self.flat[:-LOSS_ROOM]
        matrices, self.vectors = self.flat[:elements], self.flat[-rest:-LOSS_ROOM]
        self.tensors, self.gradients = [self.flat], [gradients]  # all of it, and without the loss
        if separate:
            matrices = torch.zeros(elements, dtype=dtype, device=device)
            self.tensors, self.gradients = [matrices, self.flat], [matrices, gradients]
        self.views = _views(matrices, of_matrices) | _views(self.vectors, of_vectors)
        self.matrices = [self.views[name] for name in of_matrices]


def _views(flat: torch.Tensor, shapes: dict[str, tuple[int, ...]]) -> dict[str, torch.Tensor]:
    parts = flat.split([math.prod(shape) for shape in shapes.values()]) if shapes else ()
    return {name: part.view(shape) for (name, shape), part in zip(shapes.items(), parts, strict=True)}


def _padded_shape(matrix: torch.Tensor, world_size: int) -> tuple[int, ...]:
    """The matrix's shape with rows added at the end, so that every rank has the same number of rows."""
    return (-(-len(matrix) // world_size) * world_size, *matrix.shape[1:])


class Replicated:
    """Every rank holds all weights and all gradients: one process, or data parallelism (Li et al. 2020).

    The model computes with matrices in the compute dtype, copied from the optimizer's own once per iteration;
    vectors are cast where they are used. A bucket holds one block's gradients. As soon as the last
    micro-step's backward has left the block, the bucket's all-reduce starts, in parallel to the backward of
    the block below.
    """

    parts = 1  # tensors that several ranks hold are whole

    def __init__(self, model: Transformer, config: TrainConfig, world: World, timer: WorkTimer | None = None):
        """`timer` is not used: no forward waits for another rank here."""
        self.module = self.forward = model
        self.world, self.last = world, False
        self.dtype, self.param_dtype = DTYPES[config.dtype], DTYPES[config.param_dtype]
        self.reduce_dtype, self.gradient_dtype = DTYPES[config.reduce_dtype], DTYPES[config.gradient_dtype]
        self.works: list[tuple[dist.Work, Callable[[], object] | None]] = []  # in progress, and what follows
        named = dict(model.named_parameters())
        if world.size > 1:
            for parameter in named.values():
                dist.broadcast(parameter.data, src=0)  # so that all start with the same weights
        self.buckets = self._make_buckets(named)
        self.views = {name: view for bucket in self.buckets for name, view in bucket.views.items()}
        self.shards = [self._make_shard(name, parameter) for name, parameter in named.items()]
        self._connect_gradients()
        self.publish()

    # --- building ---

    def _make_buckets(self, named: dict[str, nn.Parameter]) -> list[Bucket]:
        """One for each block and one for the head, whose reduction starts during the backward. The last one
        has the rest, mainly the embeddings."""
        groups: dict[str, dict[str, nn.Parameter]] = {"rest": {}}
        for name, parameter in named.items():
            top, *path = name.split(".")
            group = f"blocks.{path[0]}" if top == "blocks" else "head" if top == "head" else "rest"
            groups.setdefault(group, {})[name] = parameter
        rest = Bucket(groups.pop("rest"), self.world.size, self.gradient_dtype)
        buckets = {name: Bucket(p, self.world.size, self.gradient_dtype) for name, p in groups.items()}
        if self.world.size > 1:
            for group, bucket in buckets.items():
                self._reduce_after_backward(self.module.get_submodule(group), bucket)
        return [*buckets.values(), rest]

    def _reduce_after_backward(self, module: nn.Module, bucket: Bucket) -> None:
        """Reduces the bucket once the backward has left the module, that is, its input has a gradient."""

        def start(gradient):
            if self.last:
                self._reduce(bucket)

        def hook_input(module, inputs):
            if torch.is_grad_enabled():
                inputs[0].register_hook(start)

        module.register_forward_pre_hook(hook_input)

    def _make_shard(self, name: str, parameter: nn.Parameter) -> Shard:
        """Gives the optimizer a tensor of its own and leaves the parameter in the compute dtype. In fp32,
        both are one tensor."""
        own = parameter.data.to(self.param_dtype)
        if parameter.ndim >= 2:
            parameter.data = own.to(self.dtype)
        copy = parameter.data if parameter.dtype != own.dtype else None
        return Shard(name, parameter, nn.Parameter(own), self.world.size, copy)

    def _connect_gradients(self) -> None:
        """Makes the backward add each gradient in its bucket, and the optimizer find it there."""
        of_parameter: dict[torch.Tensor, torch.Tensor] = {
            s.parameter: self.views[s.name][: len(s.parameter)] for s in self.shards
        }
        for module in self.module.modules():
            if isinstance(module, (Linear, Embedding)):
                module.weight_grad = of_parameter[module.weight]
        for shard in self.shards:
            if not shard.is_matrix:
                shard.parameter.grad = of_parameter[shard.parameter]
        self._give_gradients_to_optimizer()

    def _give_gradients_to_optimizer(self) -> None:
        for shard in self.shards:  # the view itself; a copy only for bf16 parameters
            shard.local.grad = self._mine(shard, self.views[shard.name]).to(shard.local.dtype)

    def _mine(self, shard: Shard, whole: torch.Tensor) -> torch.Tensor:
        """The part for shard.local of a tensor with the parameter's shape, which may be padded."""
        return whole[: len(shard.local)]

    # --- the methods of the protocol ---

    def micro_step(self, last: bool) -> None:
        self.last = last and self.world.size > 1

    def _reduce(self, bucket: Bucket) -> None:
        for tensor in bucket.tensors:
            self._all_reduce(tensor)

    def _all_reduce(self, tensor: torch.Tensor) -> None:
        wire, op = self._for_the_wire(tensor)
        work = dist.all_reduce(wire, op=op, async_op=True)
        self.works.append((work, None if wire is tensor else lambda: tensor.copy_(wire)))

    def _for_the_wire(self, tensor: torch.Tensor) -> tuple[torch.Tensor, dist.ReduceOp.RedOpType]:
        """The tensor in reduce_dtype, and the operation that makes the mean."""
        if dist.get_backend() == "gloo":  # gloo cannot average
            return tensor.div_(self.world.size).to(self.reduce_dtype), dist.ReduceOp.SUM
        return tensor.to(self.reduce_dtype), dist.ReduceOp.AVG

    def reduce_gradients(self, loss: torch.Tensor) -> None:
        self.buckets[-1].loss.copy_(loss)
        if self.world.size > 1:
            self._reduce(self.buckets[-1])
            for work, then in self.works:
                work.wait()
                if then:
                    then()
            self.works.clear()
        if self.param_dtype != torch.float32:
            self._give_gradients_to_optimizer()

    def loss_and_norm(self) -> tuple[torch.Tensor, torch.Tensor]:
        # whole buckets: what is between the gradients, the rows that pad a matrix, is zero
        whole = [gradients for bucket in self.buckets for gradients in bucket.gradients]
        return self.buckets[-1].loss, norm(whole, foreach=False)

    @torch.no_grad()
    def publish(self, copied: bool = False) -> None:
        """Every rank has made the same update; only the working copies must be renewed."""
        if not copied:
            self._copy_back()
        refresh_weights(self.module)

    def _copy_back(self) -> None:
        pairs = [(s.working_copy, s.local) for s in self.shards if s.working_copy is not None]
        if pairs:
            torch._foreach_copy_([copy for copy, _ in pairs], [own for _, own in pairs])

    def clear_gradients(self) -> None:
        # a kernel for each: _foreach_zero_ writes at 60 % of its speed on an H200
        for tensor in (tensor for bucket in self.buckets for tensor in bucket.tensors):
            tensor.zero_()

    def as_global(self, shard: Shard, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def working_copies(self) -> dict[str, torch.Tensor]:
        copies = [s for s in self.shards if s.parameter.data_ptr() != s.local.data_ptr()]
        return {shard.name: shard.parameter.data for shard in copies}

    def abandon_iteration(self) -> None:
        self.works.clear()
        self.clear_gradients()

    def has_gradients(self) -> bool:
        return any(bool(tensor.any()) for bucket in self.buckets for tensor in bucket.tensors)  # sync point


class Zero1(Replicated):
    """ZeRO stage 1 (Rajbhandari et al. 2020, sec. 5.1): working weights and gradients are replicated; the
    optimizer's own weights and moments are sharded by rows of the matrices.

    During the last backward, reduce-scatter brings each rank its rows of a gradient, in place. Each rank
    updates its rows, and the rows are all-gathered in the compute dtype. Vectors, a hundred-thousandth of a
    model, are updated by every rank.
    """

    def __init__(self, model: Transformer, config: TrainConfig, world: World, timer: WorkTimer | None = None):
        self.mesh = init_device_mesh(world.device.type, (world.size,))
        # name -> the working matrix with its padding, which is what is gathered
        self.padded: dict[str, torch.Tensor] = {}
        super().__init__(model, config, world, timer)

    def _make_shard(self, name: str, parameter: nn.Parameter) -> Shard:
        if parameter.ndim < 2:
            return super()._make_shard(name, parameter)
        whole = parameter.data
        own = whole[self._span(whole)].to(self.param_dtype, copy=True)
        self.padded[name] = whole.new_zeros(_padded_shape(whole, self.world.size), dtype=self.dtype)
        self.padded[name][: len(whole)] = whole
        parameter.data = self.padded[name][: len(whole)]
        copy = self.padded[name][self._span(whole)][: len(own)]
        start = self._span(whole).start * whole.shape[1:].numel()
        return Shard(name, parameter, nn.Parameter(own), working_copy=copy, start=start)

    def _span(self, matrix: torch.Tensor) -> slice:
        """This rank's rows of a matrix; the last ranks may have fewer, as in DTensor's Shard(0)."""
        rows = -(-len(matrix) // self.world.size)
        return slice(self.world.rank * rows, (self.world.rank + 1) * rows)

    def _mine(self, shard: Shard, whole: torch.Tensor) -> torch.Tensor:
        return whole[self._span(whole)][: len(shard.local)] if shard.is_matrix else whole

    def _reduce(self, bucket: Bucket) -> None:
        for matrix in bucket.matrices:
            self._reduce_scatter(matrix)
        if len(bucket.vectors):
            self._all_reduce(bucket.vectors)

    def _reduce_scatter(self, matrix: torch.Tensor) -> None:
        wire, op = self._for_the_wire(matrix)
        span = self._span(matrix)
        work = reduce_scatter(wire[span], wire, op=op, async_op=True)
        self.works.append((work, None if wire is matrix else lambda: matrix[span].copy_(wire[span])))

    def loss_and_norm(self) -> tuple[torch.Tensor, torch.Tensor]:
        squares = norm([shard.grad for shard in self.shards if shard.is_matrix]).square()
        both = torch.stack([self.buckets[-1].loss / self.world.size, squares])
        dist.all_reduce(both)
        loss, squares = both.unbind()
        vectors = [shard.grad for shard in self.shards if not shard.is_matrix]
        return loss, (squares + norm(vectors).square() if vectors else squares).sqrt()

    @torch.no_grad()
    def publish(self, copied: bool = False) -> None:
        if not copied:
            self._copy_back()
        # in place: each rank's rows are already where they belong
        works = [all_gather(whole, whole[self._span(whole)], async_op=True) for whole in self.padded.values()]
        for work in works:
            work.wait()
        refresh_weights(self.module)

    def as_global(self, shard: Shard, tensor: torch.Tensor) -> torch.Tensor:
        if not shard.is_matrix:
            return tensor
        shape, stride = whole_shape(shard, tensor)
        return DTensor.from_local(
            tensor, self.mesh, [ShardOn(0)], run_check=False, shape=shape, stride=stride
        )
