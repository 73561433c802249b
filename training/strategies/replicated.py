"""Strategies that hold everything whole on every rank: one process and DDP. ZeRO-1 (zero1.py) changes what
the optimizer holds. training/strategies/strategy.py says what each method is for."""

from __future__ import annotations

import copy
import functools
import logging
import math

import torch
import torch.distributed as dist
import torch.nn as nn

from common.text import shorten
from model import Transformer
from ops.linear import refresh_weights
from training.configuration.dtypes import DTYPES
from training.configuration.keys import TrainConfig
from training.process.work_timer import WorkTimer
from training.process.world import Waits, World, start_together
from training.strategies.strategy import Shard, norms, offer_sums

log = logging.getLogger("nanomfu")

LOSS_ROOM = 4  # floats; so the size of a message stays a multiple of 16 bytes
REST = "rest"  # the part of the model outside of blocks and head, mainly the embeddings


class Bucket:
    """The gradient sums of some modules, as views of one fp32 tensor: matrices first, then vectors. With
    gradient_dtype='bfloat16', matrices have a tensor of their own.

    They live as long as the run: the backward adds to them in place, and they are communicated in place, or
    as a copy in reduce_dtype. After the gradients there is space for the iteration's loss, so that it travels
    with the last bucket.
    """

    def __init__(
        self,
        parameters: dict[str, nn.Parameter],
        world_size: int,
        device: torch.device,
        dtype: torch.dtype = torch.float32,
    ):
        self.of_matrices = {n: padded_shape(p, world_size) for n, p in parameters.items() if p.ndim >= 2}
        self.of_vectors = {n: tuple(p.shape) for n, p in parameters.items() if p.ndim < 2}
        elements, rest = self._sizes()
        if dtype == torch.float32:
            self._divide([torch.zeros(elements + rest, device=device)])
        else:
            matrices = torch.zeros(elements, dtype=dtype, device=device)
            self._divide([matrices, torch.zeros(rest, device=device)])

    def _sizes(self) -> tuple[int, int]:
        """Elements of the matrices, and of what follows them."""
        elements = sum(map(math.prod, self.of_matrices.values()))
        return elements, sum(map(math.prod, self.of_vectors.values())) + LOSS_ROOM

    def _divide(self, tensors: list[torch.Tensor]) -> None:
        elements, rest = self._sizes()
        self.tensors, self.flat = tensors, tensors[-1]
        self.gradients = [*tensors[:-1], self.flat[:-LOSS_ROOM]]  # all of it without the loss
        self.vectors, self.loss = self.flat[-rest:-LOSS_ROOM], self.flat[-1]
        self.views = _views(tensors[0][:elements], self.of_matrices) | _views(self.vectors, self.of_vectors)
        self.matrices = [self.views[name] for name in self.of_matrices]

    def cast(self, dtype: torch.dtype) -> Bucket:
        """The same numbers in this dtype; what has it already is no copy."""
        if all(tensor.dtype == dtype for tensor in self.tensors):
            return self
        other = copy.copy(self)
        other._divide([tensor.to(dtype) for tensor in self.tensors])
        return other


def _views(flat: torch.Tensor, shapes: dict[str, tuple[int, ...]]) -> dict[str, torch.Tensor]:
    parts = flat.split([math.prod(shape) for shape in shapes.values()]) if shapes else ()
    return {name: part.view(shape) for (name, shape), part in zip(shapes.items(), parts, strict=True)}


def padded_shape(matrix: torch.Tensor, world_size: int) -> tuple[int, ...]:
    """The matrix's shape with rows added at the end, so that every rank has the same number of rows."""
    return (-(-len(matrix) // world_size) * world_size, *matrix.shape[1:])


def in_messages(buckets: dict[str, Bucket]) -> list[list[str]]:
    """Divides the buckets, given in the order of the backward, into messages. A message is complete when it
    is half as long as all that follows it. So the first is the longest, and the last is one block, which
    little of the backward is left to hide. All are hidden if they take two thirds of the backward's time or
    less.

    A message for each block would be hidden, too, but costs more: NCCL holds its multiprocessors from the
    start of a message until the slowest rank has started it, too, and matmuls run without them meanwhile
    (LOG.md, 2026-11-24).
    """
    messages: list[list[str]] = [[]]
    sizes = {name: sum(tensor.numel() for tensor in bucket.tensors) for name, bucket in buckets.items()}
    waiting, following = 0, sum(sizes.values())
    for name, size in sizes.items():
        messages[-1].append(name)
        waiting, following = waiting + size, following - size
        if following and waiting >= following / 2:
            messages.append([])
            waiting = 0
    return messages


def part_of_model(name: str) -> str:
    """The part that a parameter is communicated with, by its path: a block, the head, or the rest. Tied
    weights belong to the embedding, so to the rest."""
    top, *path = name.split(".")
    return f"blocks.{path[0]}" if top == "blocks" else "head" if top == "head" else REST


def is_stored_in_compute_dtype(model: nn.Module, name: str) -> bool:
    """Whether a parameter is kept in the compute dtype for the forward: a matrix, which is read often, and
    what belongs to a module of torch, which casts nothing. The project's norms and biases cast theirs."""
    owner = model.get_submodule(name.rpartition(".")[0])
    return model.get_parameter(name).ndim >= 2 or type(owner).__module__.startswith("torch.")


class Replicated:
    """Every rank holds all weights and all gradients: one process, or data parallelism (Li et al. 2020).

    The model computes with matrices in the compute dtype, copied from the optimizer's own once per iteration;
    vectors are cast where they are used. A bucket holds one block's gradients. During the last micro-step's
    backward, the buckets of several blocks are all-reduced together (in_messages), in parallel to the
    backward of the blocks below, as soon as autograd is done with the last of their parameters.
    """

    parts = 1  # tensors that several ranks hold are whole
    row_group: dist.ProcessGroup | None = None

    def __init__(self, model: Transformer, config: TrainConfig, world: World, timer: WorkTimer | None = None):
        """`timer` is not used: no forward waits for another rank here."""
        self.module = self.forward = model
        self.world, self.last = world, False
        self.dtype, self.param_dtype = DTYPES[config.dtype], DTYPES[config.param_dtype]
        self.reduce_dtype, self.gradient_dtype = DTYPES[config.reduce_dtype], DTYPES[config.gradient_dtype]
        # The optimizer's gradients are not the sums: they came in another dtype, or bf16 weights want bf16.
        self.converts = self.param_dtype != torch.float32 or (
            world.size > 1 and self.reduce_dtype != torch.float32
        )
        self.messages: list[list[Bucket]] = []  # those that are reduced together, during the backward
        self.awaited: list[set[str]] = []  # of each message, the parameters whose gradient is not complete
        self.next = 0  # the first message that is not sent yet: all ranks send them in one order
        self.has_warned = False
        self.works: list[Waits] = []  # in progress
        self.sent: dict[Bucket, Bucket] = {}  # of this iteration: the sums, and what of them is reduced
        self.norms: list[torch.Tensor] = []  # of parts of the gradient, as they arrive
        named = dict(model.named_parameters())
        if world.size > 1:
            for parameter in named.values():
                dist.broadcast(parameter.data, src=0)  # so that all start with the same weights
        self.buckets = self._make_buckets(named)
        self.views = {name: view for bucket in self.buckets for name, view in bucket.views.items()}
        self.shards = [self._make_shard(name, parameter) for name, parameter in named.items()]
        self.trained = [shard for shard in self.shards if shard.trains]
        self._connect_gradients()
        self.publish()

    # --- building ---

    def _make_buckets(self, named: dict[str, nn.Parameter]) -> list[Bucket]:
        """One for each block and one for the head, whose reduction starts during the backward. The last one
        has the rest. Frozen parameters have no gradient."""
        groups: dict[str, dict[str, nn.Parameter]] = {REST: {}}
        for name, parameter in named.items():
            if parameter.requires_grad:
                groups.setdefault(part_of_model(name), {})[name] = parameter
        settings = self.world.size, self.world.device, self.gradient_dtype
        rest = Bucket(groups.pop(REST), *settings)
        buckets = {name: Bucket(parameters, *settings) for name, parameters in groups.items()}
        if self.world.size > 1:
            for names in in_messages({name: buckets[name] for name in reversed(buckets)}):
                self.messages.append([buckets[name] for name in names])
        return [*buckets.values(), rest]

    def _make_shard(self, name: str, parameter: nn.Parameter) -> Shard:
        """Gives the optimizer a tensor of its own and leaves the parameter in the compute dtype. In fp32,
        both are one tensor."""
        own = parameter.data.to(self.param_dtype)
        if is_stored_in_compute_dtype(self.module, name):
            parameter.data = own.to(self.dtype)
        working_copy = parameter.data if parameter.dtype != own.dtype else None
        return Shard.of(name, parameter, own, self.world.size, working_copy)

    def _connect_gradients(self) -> None:
        """Makes the backward add each gradient in its bucket, and the optimizer find it there."""
        of_parameter: dict[torch.Tensor, torch.Tensor] = {}
        for shard in self.trained:
            whole = self.views[shard.name]
            of_parameter[shard.parameter] = whole[: len(shard.parameter)] if shard.is_matrix else whole
            if shard.local.is_cuda and shard.local.dtype == torch.float32:
                shard.local.grad_dtype = None  # any: an update reads all
        offer_sums(self.module, of_parameter)
        message_of = {name: i for i, m in enumerate(self.messages) for bucket in m for name in bucket.views}
        for shard in self.trained:
            total = of_parameter[shard.parameter]
            hook = functools.partial(self._after_gradient, total, shard.name, message_of.get(shard.name))
            if shard.parameter.dtype == total.dtype:
                shard.parameter.grad = total  # autograd adds in place
            if shard.parameter.grad is None or shard.name in message_of:
                shard.parameter.register_post_accumulate_grad_hook(hook)
        if not self.converts:
            self._give_gradients_to_optimizer()

    def _after_gradient(
        self, total: torch.Tensor, name: str, message: int | None, parameter: torch.Tensor
    ) -> None:
        """Autograd calls this once in each backward, when all that used the parameter in the forward, however
        often, has had its backward. If the message that waits for it is complete, it is sent."""
        if parameter.grad is not None and parameter.grad is not total:  # of another dtype
            total.add_(parameter.grad)
            parameter.grad = None
        if self.last and message is not None:
            self.awaited[message].discard(name)
            while self.next < len(self.messages) and not self.awaited[self.next]:
                self._send_next()

    def _give_gradients_to_optimizer(self) -> None:
        """The views themselves, or copies in the dtype that the weight's gradient must have."""
        views = {name: view for bucket in self.buckets for name, view in self._reduced(bucket).views.items()}
        for shard in self.trained:
            gradient = self._mine(shard, views[shard.name])
            shard.local.grad = gradient.to(shard.local.grad_dtype or gradient.dtype)

    def _mine(self, shard: Shard, whole: torch.Tensor) -> torch.Tensor:
        """The part for shard.local of a tensor with the parameter's shape, which may be padded."""
        return whole[: len(shard.local)] if shard.is_matrix else whole

    # --- the methods of the protocol ---

    def micro_step(self, last: bool, repeats: bool = False) -> None:
        self.last = last and not repeats and self.world.size > 1
        if self.last:
            self.awaited = [{name for b in message for name in b.views} for message in self.messages]

    def gradient_sums(self) -> dict[str, torch.Tensor]:
        return self.views

    def _send_next(self) -> None:
        self._send(self.messages[self.next])
        self.next += 1

    def _send(self, buckets: list[Bucket]) -> None:
        """Starts to make the mean over the ranks, in reduce_dtype."""
        op = dist.ReduceOp.AVG
        if dist.get_backend() == "gloo":  # gloo cannot average
            op = dist.ReduceOp.SUM
            for tensor in (tensor for bucket in buckets for tensor in bucket.tensors):
                tensor.div_(self.world.size)
        self.sent |= {bucket: bucket.cast(self.reduce_dtype) for bucket in buckets}
        self._reduce([self.sent[bucket] for bucket in buckets], op)

    def _reduced(self, bucket: Bucket) -> Bucket:
        return self.sent.get(bucket, bucket)

    def _reduce(self, buckets: list[Bucket], op: dist.ReduceOp.RedOpType) -> None:
        self._all_reduce([tensor for bucket in buckets for tensor in bucket.tensors], op)

    def _all_reduce(self, tensors: list[torch.Tensor], op: dist.ReduceOp.RedOpType) -> None:
        start_together(dist.all_reduce, [(tensor,) for tensor in tensors], self.works, op=op)

    def reduce_gradients(self, loss: torch.Tensor) -> None:
        """The last bucket is complete only when the backward ends, so nothing of the backward hides its
        journey. The norms of the others are computed meanwhile."""
        *others, last = self.buckets
        self.loss = loss
        last.loss.copy_(loss)
        if self.last and self.next < len(self.messages) and not self.has_warned:
            self.has_warned = True
            names = shorten(", ".join(sorted(self.awaited[self.next])), 200)
            log.warning(
                f"The loss does not depend on {names}, so gradients are sent after the backward, not during "
                "it, which is slower: remove what the model does not use, or freeze it (requires_grad=False)"
            )
        while self.next < len(self.messages):  # also if the only micro-step has run twice
            self._send_next()
        during = len(self.works)
        if self.world.size > 1:
            self._send([last])
        self._receive(during)
        self.norms = self._norms_of(others)
        self._receive(len(self.works))
        self.norms += self._norms_of([last])
        if self.converts:
            self._give_gradients_to_optimizer()

    def _receive(self, count: int) -> None:
        """Waits for the oldest of what is in progress. On a GPU, the stream waits and not the host."""
        for work in self.works[:count]:
            work.wait()
        del self.works[:count]

    def _norms_of(self, buckets: list[Bucket]) -> list[torch.Tensor]:
        # whole buckets: what is between the gradients, the rows that pad a matrix, is zero
        whole = [gradients for bucket in buckets for gradients in self._reduced(bucket).gradients]
        return [norms(whole, foreach=False)] if whole else []

    def loss_and_norm(self) -> tuple[torch.Tensor, torch.Tensor]:
        loss = self._reduced(self.buckets[-1]).loss.float()
        return loss, torch.linalg.vector_norm(torch.cat(self.norms)).float()

    @torch.no_grad()
    def publish(self, copied: bool = False) -> None:
        """Every rank has made the same update; only the working copies must be renewed."""
        if not copied:
            self._copy_back()
        refresh_weights(self.module)

    def settle(self) -> None:
        pass

    def _copy_back(self) -> None:
        pairs = [(s.working_copy, s.local) for s in self.shards if s.working_copy is not None]
        if pairs:
            torch._foreach_copy_([working for working, _ in pairs], [own for _, own in pairs])

    def clear_gradients(self) -> None:
        # a kernel for each: _foreach_zero_ writes at 60 % of its speed on an H200
        for tensor in (tensor for bucket in self.buckets for tensor in bucket.tensors):
            tensor.zero_()
        self.sent.clear()
        self.next = 0
        if self.converts:  # their memory is the next forward's
            for shard in self.trained:
                shard.local.grad = None

    def working_copies(self) -> dict[str, torch.Tensor]:
        copies = [s for s in self.shards if s.parameter.data_ptr() != s.local.data_ptr()]
        return {shard.name: shard.parameter.data for shard in copies}

    def abandon_iteration(self) -> None:
        self.works.clear()
        self.clear_gradients()

    def can_go_on(self) -> bool:
        return True

    def has_gradients(self) -> bool:
        return any(bool(tensor.any()) for bucket in self.buckets for tensor in bucket.tensors)  # sync point
