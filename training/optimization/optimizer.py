"""The optimizer over this rank's shards, as the configuration asks: AdamW (adamw.py), or Muon on the matrices
of the blocks and AdamW on the rest (muon.py)."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn as nn

from common.errors import UserError
from training.configuration.keys import TrainConfig
from training.optimization.adamw import NAMES, adamw_class, build_adamw, make_roundings
from training.optimization.muon import Muon, MuonAndAdamW, is_muons, orthogonalization_flops
from training.strategies.strategy import Shard


def build_optimizer(
    shards: list[Shard], config: TrainConfig, row_group: dist.ProcessGroup | None = None
) -> torch.optim.Optimizer | MuonAndAdamW:
    """row_group: the strategy's. Frozen parameters are left out."""
    roundings = make_roundings(shards, config)
    shards = [shard for shard in shards if shard.trains]
    if config.optimizer == "adamw":
        return build_adamw(shards, config, roundings)
    muons = [shard for shard in shards if is_muons(shard.name, shard.parameter)]
    rest = [shard for shard in shards if not is_muons(shard.name, shard.parameter)]
    if not muons or not rest:
        raise UserError("optimizer='muon', but all that it would train is frozen; use --optimizer=adamw")
    return MuonAndAdamW(Muon(muons, config, row_group, roundings), build_adamw(rest, config, roundings))


def describe_optimizer(model: nn.Module, config: TrainConfig) -> dict:
    """The record's startup_info.optimizer: tensors and parameters of the whole model, per group."""
    muon = config.optimizer == "muon"
    weights = {name: p for name, p in model.named_parameters() if p.requires_grad}
    muons = {name: p for name, p in weights.items() if muon and is_muons(name, p)}
    rest = [p for name, p in weights.items() if name not in muons]
    groups: list[dict] = [
        {"weight_decay": decay, "tensors": len(members), "params": sum(p.numel() for p in members)}
        for members, decay in (
            ([p for p in rest if p.ndim >= 2], config.weight_decay),
            ([p for p in rest if p.ndim < 2], 0.0),
        )
    ]
    kind = NAMES[adamw_class(config, config.device == "cuda")]
    if muon:
        ours = muons.values()
        count = {"tensors": len(ours), "params": sum(p.numel() for p in ours)}
        groups = [{"optimizer": "muon", "weight_decay": config.weight_decay, **count}, *groups]
        model_config = config.model_config()
        flops = sum(orthogonalization_flops(name, p, model_config) for name, p in muons.items())
        groups[0]["orthogonalization_flops"] = flops  # of an update; not in the MFU, which counts the model's
        kind = f"Muon on the matrices of blocks, {kind} on the rest"
    return {
        "type": kind,
        "moments": config.adam_dtype,
        "weight_rounding": config.weight_rounding,
        "param_groups": groups,
    }


def optimizer_warnings(config: TrainConfig) -> list[str]:
    """Values that are allowed and probably not meant, with the fix."""
    rate, decay, beta1, beta2 = config.learning_rate, config.weight_decay, config.beta1, config.beta2
    texts = {
        f"beta2={beta2:g} is not above beta1^2={beta1**2:.4g}: updates have no bound (Reddi et al. 2018, "
        "theorem 4), and the loss may rise; raise beta2, 0.95 is usual": beta1 > 0 and beta2 <= beta1**2,
        f"learning_rate={rate:g} times weight_decay={decay:g} is at least 1: an update at that rate decays "
        "weights to 0 or beyond; lower weight_decay, 0.1 is usual": rate * decay >= 1,
        "learning_rate=0 changes no weight; a test of the speed needs no change": rate == 0,
    }
    return [] if config.eval_only else [text for text, holds in texts.items() if holds]
