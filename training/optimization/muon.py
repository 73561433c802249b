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

from typing import Any

import torch
import torch.distributed as dist

from common.errors import UserError
from model_config import ModelConfig
from ops.orthogonalize import nominal_flops, orthogonalize
from training.configuration.dtypes import DTYPES
from training.configuration.keys import TrainConfig
from training.optimization.adamw import AdamW
from training.optimization.optimizer import Kept, group_of, trained_shapes
from training.strategies.owners import Owners
from training.strategies.strategy import Shard

RMS = 0.2  # of an update, for a rate of 1
BATCH = 2**27  # elements that are orthogonalized together: in bf16, 256 MiB
ITEM = "Muon's momentum (float32)"  # of the memory estimate


def is_muons(name: str, shape: torch.Size) -> bool:
    """Whether Muon updates this parameter: a matrix of a block."""
    return name.startswith("blocks.") and len(shape) == 2


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


class Muon(AdamW):
    """AdamW, but for the matrices of the blocks. Keeps of those the step, and the momentum in fp32."""

    settings = (*AdamW.settings, "muon_momentum")

    @classmethod
    def keeps(cls, name: str, shape: torch.Size, config: TrainConfig) -> dict[str, Kept]:
        if not is_muons(name, shape):
            return super().keeps(name, shape, config)
        return {"step": Kept(ITEM, (), torch.float32), "momentum": Kept(ITEM, shape, torch.float32)}

    @classmethod
    def update_bytes(cls, config: TrainConfig, shards: int) -> dict[str, float]:
        """Blends on their way to an owner and directions back, and a batch that is orthogonalized, with its
        copies."""
        shapes = trained_shapes(config.model_config())
        elements = sum(shape.numel() for name, shape in shapes.items() if is_muons(name, shape))
        sent = 3 if shards > 1 else 1  # this rank's rows; received, and joined
        if config.dtype == "float16":  # in float32; what is computed of them is another tensor
            sent = 6 if shards > 1 else 3
        size = DTYPES[config.dtype].itemsize
        return {"Muon's updates": size * (sent * elements / shards + 4 * min(BATCH, elements))}

    @classmethod
    def describe(cls, weights: dict[str, torch.Tensor], config: TrainConfig) -> dict[str, Any]:
        mine = {name: weight for name, weight in weights.items() if is_muons(name, weight.shape)}
        rest = super().describe({name: w for name, w in weights.items() if name not in mine}, config)
        model = config.model_config()
        flops = sum(orthogonalization_flops(name, weight, model) for name, weight in mine.items())
        group = {
            "optimizer": "muon",
            **group_of(mine.values(), config.weight_decay),
            "orthogonalization_flops": flops,  # of an update; not in the MFU, which counts the model's
        }
        kind = f"Muon on the matrices of blocks, {rest['type']} on the rest"
        return rest | {"type": kind, "param_groups": [group, *rest["param_groups"]]}

    @classmethod
    def line(cls, config: TrainConfig) -> str:
        return f"{super().line(config)}, Muon's momentum {config.muon_momentum:g}"

    def __init__(self, shards: list[Shard], config: TrainConfig, row_group: dist.ProcessGroup | None = None):
        super().__init__(shards, config, row_group)
        self.muons = [s for s in self.shards if is_muons(s.name, s.parameter.shape)]
        self.shards = [s for s in self.shards if not is_muons(s.name, s.parameter.shape)]  # AdamW's
        if not self.muons or not self.shards:
            raise UserError("optimizer='muon', but all that it would train is frozen; use --optimizer=adamw")
        self.momentum = config.muon_momentum
        self.model, self.dtype = config.model_config(), DTYPES[config.dtype]
        self.blend_dtype = torch.float32 if self.dtype == torch.float16 else self.dtype
        costs = [orthogonalization_flops(s.name, s.parameter, self.model) for s in self.muons]
        self.owners = Owners(self.muons, costs, row_group)
        self.scales = {s.name: rms_scale(shapes_of(s.name, s.parameter, self.model)[0]) for s in self.muons}

    @torch.no_grad()
    def step(self, rate: torch.Tensor, divisor: torch.Tensor, found_inf: torch.Tensor) -> None:
        self.count(self.muons, found_inf)
        wholes = self.owners.gather([self._blend(shard, divisor, found_inf) for shard in self.muons])
        self._orthogonalize(wholes)
        directions = {i: whole.to(self.dtype) for i, whole in wholes.items()}
        for shard, direction in zip(self.muons, self.owners.scatter(directions), strict=True):
            self._apply(shard, direction, rate, found_inf)
        super().step(rate, divisor, found_inf)

    def _blend(self, shard: Shard, divisor: torch.Tensor, found_inf: torch.Tensor) -> torch.Tensor:
        """Updates the momentum. Nesterov's blend of it and the gradient, in blend_dtype."""
        momentum = self.state[shard.name]["momentum"]
        if momentum.is_cuda:
            from ops.triton_kernels.muon import triton_blend

            blend = torch.empty_like(momentum, dtype=self.blend_dtype)
            triton_blend(shard.grad, momentum, blend, self.momentum, divisor, found_inf)
            return blend
        gradient = shard.grad.float() / divisor
        new = momentum.lerp(gradient, 1 - self.momentum)
        momentum.copy_(torch.where(found_inf > 0, momentum, new))
        return gradient.lerp(new, self.momentum).to(self.blend_dtype)

    def _orthogonalize(self, wholes: dict[int, torch.Tensor]) -> None:
        """In place. Matrices of one shape are computed together."""
        by_shape: dict[torch.Size, list[tuple[torch.Tensor, float]]] = {}
        for i, whole in wholes.items():
            name = self.muons[i].name
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
        self, shard: Shard, direction: torch.Tensor, rate: torch.Tensor, found_inf: torch.Tensor
    ) -> None:
        weight, scale, decay = shard.local, self.scales[shard.name], self.decay(shard)
        if weight.is_cuda:
            from ops.triton_kernels.muon import triton_apply

            step, rounding = self.state[shard.name]["step"], self.roundings.get(shard.name)
            triton_apply(weight, direction, shard.working_copy, rate, scale, decay, found_inf, step, rounding)
            return
        new = weight.float()
        self.write(shard, new - rate * decay * new - rate * scale * direction.float(), found_inf)


OPTIMIZER = Muon


def rms_scale(shape: torch.Size) -> float:
    """Makes RMS the root of the mean square of an orthogonal matrix's elements."""
    return RMS * max(shape) ** 0.5
