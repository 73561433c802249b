"""FSDP2, the strategy that shards everything. training/strategies/strategy.py says what each method is
for."""

from __future__ import annotations

from typing import cast

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from common.errors import UserError
from model import Transformer
from ops.linear import Linear, refresh_weights
from training.configuration.dtypes import DTYPES
from training.configuration.keys import TrainConfig
from training.process.work_timer import WorkTimer
from training.process.world import World
from training.strategies.fused_sums import FusedSums, fuses_gradient_sums, group_of
from training.strategies.replicated import part_of_model
from training.strategies.strategy import Shard, norm


class Fsdp:
    """FSDP2, fully_shard (Zhao et al. 2023): weights, gradients and optimizer state sharded by rows.

    Weights are gathered in the compute dtype once per iteration, unless reshard_after_forward drops them
    after every forward. fsdp_sharding='hybrid' shards over a machine's processes and replicates over
    machines.
    """

    def __init__(self, model: Transformer, config: TrainConfig, world: World, timer: WorkTimer | None = None):
        _check_parameters(model)
        dtype = DTYPES[config.dtype]
        if config.fsdp_sharding == "hybrid":
            machines = world.size // world.local_size
            names = ("replicate", "shard")
            mesh = init_device_mesh(world.device.type, (machines, world.local_size), mesh_dim_names=names)
        else:
            mesh = init_device_mesh(world.device.type, (world.size,))
        policy = MixedPrecisionPolicy(
            param_dtype=None if dtype == torch.float32 else dtype,
            reduce_dtype=DTYPES[config.reduce_dtype],
            cast_forward_inputs=False,  # the rotary angles must stay fp32
        )
        self.reshard = config.reshard_after_forward
        linears = [module for module in model.modules() if isinstance(module, Linear)]
        self.keeps_copies = any(layer.copies() for layer in linears)
        for parameter in model.parameters():  # not model.to(), which would also round the rotary angles
            parameter.data = parameter.data.to(DTYPES[config.param_dtype])
        refresh_weights(model)
        for block in model.blocks:
            fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=self.reshard)
        # by itself, the head's gradient travels beside the blocks' backward. Tied, it is the embedding's, too
        self.head = [] if model.config.weight_tying else [model.head]
        for module in (*self.head, model):
            fully_shard(module, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
        self.module = self.forward = model
        self.world, self.replicas = world, world.size // mesh.shape[-1]
        self.parts = world.size // self.replicas
        self.row_group = mesh.get_group(mesh.ndim - 1)
        self.shards = [
            Shard.of(name, p, _sharded(p.detach()).to_local(), self.replicas, start=self._start(p))
            for name, p in model.named_parameters()
        ]
        self.trained = [shard for shard in self.shards if shard.trains]
        # the FSDP units, each gathered as a whole: every block, the head, and the rest of the model
        # fully_shard adds this class to a module's own
        self.units = cast("list[FSDPModule]", [*model.blocks, *self.head, model])
        self.unsharded: dict = {}  # parameter -> FSDP's object for it, once its own sums are asked for
        self.sums = FusedSums(model, self.units, policy) if fuses_gradient_sums(config) else None
        self.last = True  # micro-step of the iteration: its backward reduces the gradients
        self.under_way = False  # from the first micro-step until the gradients are cleared
        self.uses: dict[str, list[bool]] = {}  # of each unit in a forward: whether its input has a gradient
        for name, module in model.named_modules():
            if module in self.units[:-1]:
                self._send_after_last_use(name, module)
        if timer:
            self._measure_waits(timer)

    def _start(self, parameter: nn.Parameter) -> int:
        """Index of this rank's first element in the whole parameter. Each rank before this one has as many
        rows as the first; that of a rank without rows may be beyond the end."""
        rows = -(-len(parameter) // self.parts)
        return self.world.rank % self.parts * rows * parameter.shape[1:].numel()

    def _send_after_last_use(self, name: str, unit: FSDPModule) -> None:
        """FSDP sends a unit's gradients after the backward of each use in the forward, and forgets the sums
        that it sent. So if a block runs twice, the backward of its first use, which comes last, sends."""
        uses = self.uses[name] = []

        def begin(module, inputs):  # after FSDP's own hook
            uses.extend([inputs[0].requires_grad] * torch.is_grad_enabled())
            if len(uses) > 1 and not all(uses):
                raise UserError(
                    f"{name} runs twice in a forward, once on an input without a gradient, since all before "
                    "it is frozen; FSDP cannot sum its gradients: use ZeRO-1 (use_zero1=True)"
                )
            if any(uses):
                inputs[0].register_hook(end)

        def end(gradient):
            uses.pop()
            unit.set_requires_gradient_sync(self.last and not uses, recurse=False)

        cast("nn.Module", unit).register_forward_pre_hook(begin)

    def _measure_waits(self, timer: WorkTimer) -> None:
        """Puts hooks around FSDP's own hooks, which wait for the weights of other ranks."""
        for unit in cast("list[nn.Module]", self.units):
            unit.register_forward_pre_hook(lambda module, inputs: timer.begin_wait(), prepend=True)
            unit.register_forward_pre_hook(lambda module, inputs: timer.end_wait())

    def micro_step(self, last: bool, repeats: bool = False) -> None:
        self.under_way, self.last = True, last
        for uses in self.uses.values():
            uses.clear()
        model = self.units[-1]
        model.set_requires_gradient_sync(last)
        model.set_is_last_backward(last)
        model.set_reshard_after_backward(last or self.reshard)

    def gradient_sums(self) -> dict[str, torch.Tensor]:
        if self.last:
            mean = "mean over the ranks, so that another may be at fault"
            return {f"{s.name}, {mean}": _local_gradient(s) for s in self.trained}
        if self.sums:
            return self.sums.views
        if not self.unsharded:
            own = {p.sharded_param: p for unit in self.units for p in group_of(unit).fsdp_params}
            self.unsharded = {shard.name: own[shard.parameter] for shard in self.trained}
        sums = {name: _own_sum(parameter) for name, parameter in self.unsharded.items()}
        return {name: total for name, total in sums.items() if total is not None}

    def reduce_gradients(self, loss: torch.Tensor) -> None:
        self.loss = loss
        for shard in self.trained:
            shard.local.grad = _local_gradient(shard)

    def loss_and_norm(self) -> tuple[torch.Tensor, torch.Tensor]:
        squares = norm([shard.grad for shard in self.trained]).square()
        both = torch.stack([self.loss / self.world.size, squares / self.replicas])
        dist.all_reduce(both)
        loss, squares = both.unbind()
        return loss, squares.sqrt()

    def publish(self, copied: bool = False) -> None:
        """The next forward gathers the new weights and casts them: there are no working copies to write. If
        layers keep copies of their weights, such as quantized ones, they are gathered here."""
        if not self.keeps_copies:
            return
        self.settle()
        gathers = [unit.unshard(async_op=True) for unit in self.units]
        for gather in gathers:
            if gather is not None:
                gather.wait()
        refresh_weights(self.module)
        if self.reshard:
            for block in self.units[: len(self.module.blocks)]:
                block.reshard()

    def settle(self) -> None:
        """A gather that is recorded repeats in each replay; one from before, such as an evaluation's, would
        not, and its memory is freed."""
        for unit in self.units:
            unit.reshard()

    def clear_gradients(self) -> None:
        self.under_way = False
        for shard in self.shards:
            shard.parameter.grad = shard.local.grad = None
        if self.sums:
            self.sums.clear()
        for parameter in self.unsharded.values():
            parameter._unsharded_param.grad = parameter.unsharded_accumulated_grad = None

    def working_copies(self) -> dict[str, torch.Tensor]:
        return {}  # gathered weights are freed, or written anew from the shards

    def abandon_iteration(self) -> None:
        self.clear_gradients()

    def can_go_on(self) -> bool:
        """fully_shard has hooks and events of its own. Only torch 2.13 can reset them (reset_iter_state), and
        it waits for events, which fails for those that a broken capture has recorded."""
        return not self.under_way

    def has_gradients(self) -> bool:
        sums = self.sums.buckets if self.sums else []
        left = any(shard.parameter.grad is not None for shard in self.shards)
        return left or any(bool(bucket.flat.any()) for bucket in sums)  # sync point


def _check_parameters(model: Transformer) -> None:
    """Raises UserError for a parameter that FSDP cannot shard."""
    first, tied = dict[nn.Parameter, str](), model.config.weight_tying
    for name, parameter in model.named_parameters(remove_duplicate=False):
        other, problem = first.setdefault(parameter, name), None
        if parameter.ndim == 0:
            problem = f"{name} has the shape (), which FSDP cannot shard; give it the shape (1,)"
        elif part_of_model(name) != part_of_model(other) and not (tied and name == "head.lm_head.weight"):
            problem = f"{name} and {other} are one parameter, which two units of FSDP cannot share"
        if problem:
            raise UserError(f"{problem}, or use ZeRO-1 (use_zero1=True)")


def _local_gradient(shard: Shard) -> torch.Tensor:
    """Zeros, if the loss does not depend on the parameter."""
    gradient = shard.parameter.grad
    return torch.zeros_like(shard.local) if gradient is None else _sharded(gradient).to_local()


def _own_sum(parameter) -> torch.Tensor:
    """Where FSDP sums the gradient of one of its parameters over micro-steps; None before there is one."""
    total = parameter.unsharded_accumulated_grad  # in reduce_dtype, if that is another one
    return parameter._unsharded_param.grad if total is None else total


def _sharded(tensor: torch.Tensor | None) -> DTensor:
    """The same tensor, which fully_shard has made a DTensor."""
    assert isinstance(tensor, DTensor), type(tensor)
    return tensor
