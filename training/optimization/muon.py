"""Muon on the matrices of the blocks, AdamW on the rest (Jordan et al. 2024, "Muon: an optimizer for hidden
layers in neural networks").

The update of a matrix is Nesterov's blend of its gradient and momentum, made orthogonal
(ops/orthogonalize.py), times 0.2 sqrt(its longer side). That is the RMS of AdamW's updates, so learning_rate
and weight_decay mean the same for both (Liu et al. 2025, arXiv 2502.16982, sec. 2.2). Matrices of their own
are q, k and v, which are one weight here, and gate and up, whose rows alternate.

Shards stay as AdamW has them: the momentum has the rows of its weight. Only blends travel, in the compute
dtype, to the owner of a matrix, and directions back (training/strategies/owners.py). Under DDP every rank
orthogonalizes all. Equal gradients give equal bits for any strategy and number of ranks.

float16 cannot hold small gradients. So blends travel in float32 there, and a matrix is rounded to float16
once its norm is divided out.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from model_config import ModelConfig
from ops.orthogonalize import nominal_flops, orthogonalize
from ops.quantization.random_bits import bf16_stochastically
from training.configuration.dtypes import DTYPES
from training.configuration.keys import TrainConfig
from training.optimization.adamw import Roundings, on_device
from training.strategies.owners import Owners
from training.strategies.strategy import Shard

RMS = 0.2  # of an update, for a rate of 1
BATCH = 2**27  # elements that are orthogonalized together: in bf16, 256 MiB


def is_muons(name: str, parameter: torch.Tensor) -> bool:
    """Whether Muon updates this parameter: a matrix of a block."""
    return name.startswith("blocks.") and parameter.ndim == 2


def matrices_of(name: str, weight: torch.Tensor, model: ModelConfig) -> list[torch.Tensor]:
    """The matrices that a weight is made of, as views of it."""
    if name.endswith("attn.qkv.weight"):
        q, k = model.attention_width, model.n_kv_head * model.head_dim
        return list(weight.split((q, k, k)))
    if name.endswith("ffn.up.weight") and model.ffn_type == "swiglu":
        return [weight[0::2], weight[1::2]]
    return [weight]


def shapes_of(name: str, weight: torch.Tensor, model: ModelConfig) -> list[torch.Size]:
    """Of matrices_of(). Reads the shape of the weight alone: FSDP's weights are gathered by any operation."""
    whole = torch.empty(weight.shape, device="meta")
    return [matrix.shape for matrix in matrices_of(name, whole, model)]


def orthogonalization_flops(name: str, weight: torch.Tensor, model: ModelConfig) -> int:
    return sum(nominal_flops(*shape) for shape in shapes_of(name, weight, model))


class Muon(torch.optim.Optimizer):
    """State of a weight: momentum, fp32, and the number of its updates. found_inf = 1 leaves every bit as it
    is. Nothing is read by the host."""

    def __init__(
        self,
        shards: list[Shard],
        config: TrainConfig,
        group: dist.ProcessGroup | None,
        roundings: Roundings,
    ):
        """group: the ranks that share the rows of a matrix (Strategy.row_group). roundings: as AdamW's."""
        settings = {"lr": config.learning_rate, "weight_decay": config.weight_decay}
        super().__init__([shard.local for shard in shards], settings)
        self.shards, self.roundings, self.momentum = shards, roundings, config.muon_momentum
        self.model, self.dtype = config.model_config(), DTYPES[config.dtype]
        self.blend_dtype = torch.float32 if self.dtype == torch.float16 else self.dtype
        costs = [orthogonalization_flops(s.name, s.parameter, self.model) for s in shards]
        self.owners = Owners(shards, costs, group)
        self.scales = {s.name: rms_scale(shapes_of(s.name, s.parameter, self.model)[0]) for s in shards}
        for shard in shards:
            step = torch.zeros((), dtype=torch.float32, device=shard.local.device)
            momentum = torch.zeros_like(shard.local, dtype=torch.float32)
            self.state[shard.local] = {"step": step, "momentum": momentum}

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]  # without a closure
        (group,) = self.param_groups
        rate, grad_scale, found_inf = on_device(self, group, self.shards[0].local.device)
        steps = [self.state[shard.local]["step"] for shard in self.shards]
        torch._foreach_add_(steps, [1 - found_inf] * len(steps))
        wholes = self.owners.gather([self._blend(shard, grad_scale, found_inf) for shard in self.shards])
        self._orthogonalize(wholes)
        directions = {i: whole.to(self.dtype) for i, whole in wholes.items()}
        for shard, direction in zip(self.shards, self.owners.scatter(directions), strict=True):
            self._apply(shard, direction, rate, group["weight_decay"], found_inf)

    def _blend(self, shard: Shard, grad_scale: torch.Tensor, found_inf: torch.Tensor) -> torch.Tensor:
        """Updates the momentum. Nesterov's blend of it and the gradient, in blend_dtype."""
        momentum = self.state[shard.local]["momentum"]
        if momentum.is_cuda:
            from ops.triton_kernels.muon import triton_blend

            blend = torch.empty_like(momentum, dtype=self.blend_dtype)
            triton_blend(shard.grad, momentum, blend, self.momentum, grad_scale, found_inf)
            return blend
        gradient = shard.grad.float() / grad_scale
        new = momentum.lerp(gradient, 1 - self.momentum)
        momentum.copy_(torch.where(found_inf > 0, momentum, new))
        return gradient.lerp(new, self.momentum).to(self.blend_dtype)

    def _orthogonalize(self, wholes: dict[int, torch.Tensor]) -> None:
        """In place. Matrices of one shape are computed together."""
        by_shape: dict[torch.Size, list[tuple[torch.Tensor, float]]] = {}
        for i, whole in wholes.items():
            name = self.shards[i].name
            for part in matrices_of(name, whole, self.model):  # _apply() scales all as the first one wants it
                by_shape.setdefault(part.shape, []).append((part, rms_scale(part.shape) / self.scales[name]))
        for shape, parts in by_shape.items():
            # a CPU's bf16 products have other bits in a batch of another size
            count = max(1, BATCH // shape.numel()) if parts[0][0].is_cuda else 1
            for some in (parts[i : i + count] for i in range(0, len(parts), count)):
                results = orthogonalize([part for part, _ in some], dtype=self.dtype)
                for (part, scale), result in zip(some, results, strict=True):
                    part.copy_(result if scale == 1 else result * scale)

    def _apply(
        self, shard: Shard, direction: torch.Tensor, rate: torch.Tensor, decay: float, found_inf: torch.Tensor
    ) -> None:
        weight, rounding = shard.local, self.roundings.get(shard.local)
        step, scale = self.state[weight]["step"], self.scales[shard.name]
        if weight.is_cuda:
            from ops.triton_kernels.muon import triton_apply

            copy = shard.working_copy
            triton_apply(weight, direction, copy, rate, scale, decay, found_inf, step, rounding)
            return
        new = weight.float()
        new = new - rate * decay * new - rate * scale * direction.float()
        if rounding is not None and weight.dtype == torch.bfloat16:
            rounding.key[1].copy_(step)
            new = bf16_stochastically(new, rounding.key, start=rounding.start)
        weight.copy_(torch.where(found_inf > 0, weight, new.to(weight.dtype)))


def rms_scale(shape: torch.Size) -> float:
    """Makes RMS the root of the mean square of an orthogonal matrix's elements."""
    return RMS * max(shape) ** 0.5


class MuonAndAdamW:
    """Both optimizers, as the step, checkpoints and checks see one. The step sets grad_scale and found_inf
    before each update, as torch's fused optimizers want them."""

    grad_scale: torch.Tensor
    found_inf: torch.Tensor

    def __init__(self, muon: Muon, adamw: torch.optim.AdamW):
        self.both = muon, adamw
        self.param_groups = [*muon.param_groups, *adamw.param_groups]
        self.state = {**muon.state, **adamw.state}
        self.writes_copies = getattr(adamw, "writes_copies", False)

    def step(self) -> None:
        for optimizer in self.both:
            optimizer.grad_scale, optimizer.found_inf = self.grad_scale, self.found_inf  # type: ignore[union-attr]
            optimizer.step()
