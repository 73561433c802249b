"""Strategies: what is replicated and what is sharded over the processes. Each offers the same few verbs:

    forward(x, y)          the loss of one micro-batch, on the training graph
    micro_step(last)       context around a micro-step's forward and backward; gradients travel on the last
    reduce_gradients()     after the last backward: every shard.local.grad is the mean over the ranks
    grad_norm()            global gradient norm, a device tensor equal on all ranks
    publish()              after the update: every rank's weights are the new ones
    clear_gradients()
    as_global(shard, t)    a tensor shaped like shard.local as the whole it is part of, for checkpoints

and `shards`: for each parameter, the part that this rank's optimizer updates. Nothing else knows strategies.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import Shard as ShardOn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import get_total_norm

from training.config import TrainConfig
from training.distributed import World, all_gather, reduce_scatter

DDP_BUCKET_MB = 100  # few large all-reduces; the first still starts early in the backward


@dataclass(frozen=True)
class Shard:
    """The part of a parameter that this rank's optimizer updates; `local` shares the parameter's storage."""

    name: str
    parameter: nn.Parameter
    local: nn.Parameter

    @property
    def is_matrix(self) -> bool:
        return self.parameter.ndim >= 2


def compile_model(model: nn.Module) -> None:
    """torch.compile in place, before the strategy wraps it: each block and the head by itself.

    All blocks share one compilation, so it starts fast, and communication overlaps between blocks. Compiling
    the whole model measured 0.5 % faster on one H200 and took 53 s longer to start (LOG.md).
    """
    torch._dynamo.config.optimize_ddp = False  # its graph splitting is for whole-model compile
    for module in (*model.blocks, model.head):
        module.compile(fullgraph=True, dynamic=False)


def parallelize(model: nn.Module, config: TrainConfig, world: World, dtype: torch.dtype):
    """The strategy that the configuration asks for, around the initialised model. All ranks."""
    return STRATEGIES[strategy_name(config, world.size)](model, world, dtype)


def strategy_name(config: TrainConfig, world_size: int) -> str:
    if config.use_fsdp:
        return "fsdp"
    if config.use_zero1:
        return "zero1"
    return "ddp" if world_size > 1 else "single"


class Replicated:
    """One process, or DDP: every rank holds and updates everything. Li et al. 2020."""

    def __init__(self, model: nn.Module, world: World, dtype: torch.dtype):
        self.module = self.forward = model
        if world.size > 1:
            self.forward = DistributedDataParallel(
                model,
                device_ids=[world.local_rank] if world.device.type == "cuda" else None,
                bucket_cap_mb=DDP_BUCKET_MB,
                gradient_as_bucket_view=True,
                broadcast_buffers=False,  # the rotary tables never change
            )
        self.shards = [Shard(name, p, p) for name, p in model.named_parameters()]

    def micro_step(self, last: bool):
        return contextlib.nullcontext() if last or self.forward is self.module else self.forward.no_sync()

    def reduce_gradients(self) -> None:
        """DDP has averaged them during the last backward."""

    def grad_norm(self) -> torch.Tensor:
        return _norm(self.shards)

    def publish(self) -> None:
        """Every rank has made the same update."""

    def clear_gradients(self) -> None:
        if self.forward is not self.module:  # DDP's gradients live in its buckets; dropping them makes copies
            torch._foreach_zero_([shard.local.grad for shard in self.shards])
            return
        for shard in self.shards:
            shard.local.grad = None

    def as_global(self, shard: Shard, tensor: torch.Tensor) -> torch.Tensor:
        return tensor


class Zero1:
    """ZeRO stage 1 (Rajbhandari et al. 2020, sec. 5.1): weights replicated, optimizer state sharded by rows.

    During the last backward each gradient is reduce-scattered as soon as it is complete; each rank updates
    its rows, and the rows are all-gathered. A gradient is reduced in place, so there is no second copy.
    """

    def __init__(self, model: nn.Module, world: World, dtype: torch.dtype):
        self.module = self.forward = model
        self.world, self.mesh = world, init_device_mesh(world.device.type, (world.size,))
        self.rows = {}  # name -> rows per rank; the last ranks may have fewer, as in DTensor's Shard(0)
        self.shards = []
        self.pending = []  # (work, shard, its rows of the reduced gradient)
        self.last = False
        for name, parameter in model.named_parameters():
            dist.broadcast(parameter.data, src=0)  # as DDP does, so that ranks cannot start apart
            self.rows[name] = -(-len(parameter) // world.size)
            shard = Shard(name, parameter, nn.Parameter(self._mine(parameter.data, name)))
            parameter.register_post_accumulate_grad_hook(lambda p, shard=shard: self._reduce(shard))
            self.shards.append(shard)

    def micro_step(self, last: bool):
        self.last = last
        return contextlib.nullcontext()

    def _reduce(self, shard: Shard) -> None:
        if not self.last:
            return
        grad = self._padded(shard.parameter.grad, shard.name)
        mine = grad[self._span(shard.name)]
        op = dist.ReduceOp.AVG
        if dist.get_backend() == "gloo":  # which cannot average
            op = dist.ReduceOp.SUM
            grad.div_(self.world.size)
        self.pending.append((reduce_scatter(mine, grad, op=op, async_op=True), shard, mine))

    def reduce_gradients(self) -> None:
        for work, shard, mine in self.pending:
            work.wait()
            shard.local.grad = mine[: len(shard.local)]
        self.pending.clear()

    def grad_norm(self) -> torch.Tensor:
        return _sharded_norm(self.shards)

    def publish(self) -> None:
        works = []
        for shard in self.shards:
            whole = self._padded(shard.parameter.data, shard.name)
            mine = whole[self._span(shard.name)]  # in place: each rank's rows are already where they belong
            works.append((all_gather(whole, mine, async_op=True), shard, whole))
        for work, shard, whole in works:
            work.wait()
            if len(whole) != len(shard.parameter):
                shard.parameter.data.copy_(whole[: len(shard.parameter)])

    def clear_gradients(self) -> None:
        for shard in self.shards:
            shard.parameter.grad = shard.local.grad = None

    def as_global(self, shard: Shard, tensor: torch.Tensor) -> torch.Tensor:
        shape, stride = shard.parameter.shape, shard.parameter.stride()
        return DTensor.from_local(
            tensor, self.mesh, [ShardOn(0)], run_check=False, shape=shape, stride=stride
        )

    def _span(self, name: str) -> slice:
        rows = self.rows[name]
        return slice(self.world.rank * rows, (self.world.rank + 1) * rows)

    def _mine(self, whole: torch.Tensor, name: str) -> torch.Tensor:
        return whole[self._span(name)]

    def _padded(self, whole: torch.Tensor, name: str) -> torch.Tensor:
        """whole itself, or a copy with rows of zeros at the end, so that every rank has equally many."""
        missing = self.rows[name] * self.world.size - len(whole)
        return torch.cat((whole, whole.new_zeros(missing, *whole.shape[1:]))) if missing else whole


class Fsdp:
    """FSDP2, fully_shard (Zhao et al. 2023): weights, gradients and optimizer state sharded by rows.

    Weights are gathered in the compute dtype once per iteration, gradients are reduced in fp32.
    """

    def __init__(self, model: nn.Module, world: World, dtype: torch.dtype):
        mesh = init_device_mesh(world.device.type, (world.size,))
        policy = MixedPrecisionPolicy(
            param_dtype=None if dtype == torch.float32 else dtype,
            reduce_dtype=torch.float32,
            cast_forward_inputs=False,  # the rotary angles must stay fp32
        )
        for block in model.blocks:
            fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
        fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
        self.module = self.forward = model
        self.shards = [Shard(n, p, nn.Parameter(p.detach().to_local())) for n, p in model.named_parameters()]

    def micro_step(self, last: bool):
        self.module.set_requires_gradient_sync(last)
        self.module.set_is_last_backward(last)
        self.module.set_reshard_after_backward(last)
        return contextlib.nullcontext()

    def reduce_gradients(self) -> None:
        for shard in self.shards:
            shard.local.grad = shard.parameter.grad.to_local()

    def grad_norm(self) -> torch.Tensor:
        return _sharded_norm(self.shards)

    def publish(self) -> None:
        """The next forward gathers the new weights."""

    def clear_gradients(self) -> None:
        for shard in self.shards:
            shard.parameter.grad = shard.local.grad = None

    def as_global(self, shard: Shard, tensor: torch.Tensor) -> torch.Tensor:
        whole = shard.parameter
        return DTensor.from_local(
            tensor,
            whole.device_mesh,
            whole.placements,
            run_check=False,
            shape=whole.shape,
            stride=whole.stride(),
        )


def _norm(shards: list[Shard]) -> torch.Tensor:
    """Norm of this rank's gradients, a 0-d fp32 tensor."""
    grads = [shard.local.grad for shard in shards]
    if grads[0].is_cuda:
        return get_total_norm(grads)
    # torch's CPU kernel adds fp32 squares one by one: 1e-4 off at 5 M elements, and clipping would inherit it
    norms = [torch.linalg.vector_norm(grad, dtype=torch.float64) for grad in grads]
    return torch.linalg.vector_norm(torch.stack(norms)).float()


def _sharded_norm(shards: list[Shard]) -> torch.Tensor:
    squares = _norm(shards).square()
    dist.all_reduce(squares)
    return squares.sqrt()


STRATEGIES = {"single": Replicated, "ddp": Replicated, "zero1": Zero1, "fsdp": Fsdp}
